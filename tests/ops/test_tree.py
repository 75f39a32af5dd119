"""Draft trees: every path of a tree gives what decoding it token by token gives, in float64."""

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hybridjax.ops import (
    OPS,
    gated_delta_verify,
    recurrent_commit,
    simple_gla_verify,
    tree_ancestors,
    tree_history,
    tree_history_commit,
)

BATCH, NODES, DEPTH, SLOTS = 3, 7, 5, 6
HEADS, KEY_HEADS, KEYS, VALUES = 4, 2, 6, 5
SCALE, SLOPES = 0.4, np.array([0.9, 0.3, 0.05, 0.0], np.float32)
SLOT = np.array([4, 2, 5], np.int32)
SIZE, WIDTH = 3, 2  # of the past of a convolution

ancestors_of = jax.jit(tree_ancestors)


@st.composite
def trees(draw):
    """Parents and positions of BATCH trees, some with padding nodes, and how many tokens came before."""
    parent = np.full((BATCH, NODES), -1, np.int32)
    positions = np.full((BATCH, NODES), -1, np.int32)
    for b in range(BATCH):
        start = draw(st.sampled_from([0, 1, 2, 9]))
        for n in range(draw(st.integers(0, NODES))):
            parent[b, n] = p = draw(st.integers(-1, n - 1))
            positions[b, n] = start if p < 0 else positions[b, p] + 1
    return parent, positions


def path_to(parent, n):
    path = [n]
    while parent[path[-1]] >= 0:
        path.append(parent[path[-1]])
    return path[::-1]


def draw_rows(seed):
    rng = np.random.default_rng(seed)
    f = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
    return {
        "q": f(BATCH, NODES, KEY_HEADS, KEYS),
        "k": f(BATCH, NODES, KEY_HEADS, KEYS),
        "v": f(BATCH, NODES, HEADS, VALUES),
        "g": -np.exp(2 * f(BATCH, NODES, HEADS)),
        "beta": rng.uniform(size=(BATCH, NODES, HEADS)).astype(np.float32),
        "pool": f(SLOTS, HEADS, KEYS, VALUES),
    }


def poisoned(rows, positions, fresh):
    """NaN in padding, in slots of nobody and of sequences that start afresh."""
    rows = {name: x.copy() for name, x in rows.items()}
    for name in ("q", "k", "v", "g", "beta"):
        rows[name][positions < 0] = np.nan
    rows["pool"][[0, 1, 3, *SLOT[fresh]]] = np.nan
    return rows


def simple_gla_step(state, rows, b, n):
    q, k, v = (np.asarray(rows[x][b, n], np.float64) for x in "qkv")
    q, k = (np.repeat(x, HEADS // KEY_HEADS, axis=0) for x in (q, k))
    state = np.exp(-SLOPES.astype(np.float64))[:, None, None] * state + k[:, :, None] * v[:, None, :]
    return state, SCALE * np.einsum("hk,hkv->hv", q, state)


def gated_delta_step(state, rows, b, n):
    q, k, v, g, beta = (np.asarray(rows[x][b, n], np.float64) for x in ("q", "k", "v", "g", "beta"))
    q, k = (x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6) for x in (q, k))
    q, k = (np.repeat(x, HEADS // KEY_HEADS, axis=0) for x in (q, k))
    state = np.exp(g)[:, None, None] * state
    delta = beta[:, None] * (v - np.einsum("hk,hkv->hv", k, state))
    state = state + k[:, :, None] * delta[:, None, :]
    return state, KEYS**-0.5 * np.einsum("hk,hkv->hv", q, state)


def run_simple_gla(implementation, rows, slot, positions, ancestors):
    q, k = (jnp.repeat(rows[x], HEADS // KEY_HEADS, axis=2) for x in "qk")
    out = simple_gla_verify(
        q,
        k,
        rows["v"],
        jnp.asarray(SLOPES),
        rows["pool"],
        slot,
        positions,
        ancestors,
        scale=SCALE,
        implementation=implementation,
    )
    return out, (k, rows["v"], -jnp.asarray(SLOPES))


def run_gated_delta(implementation, rows, slot, positions, ancestors):
    operands = (*(rows[x] for x in ("q", "k", "v", "g", "beta", "pool")), slot, positions, ancestors)
    out, corrections = gated_delta_verify(*operands, implementation=implementation)
    return out, (rows["k"], corrections, rows["g"])


OPS_OF = {"simple_gla": (run_simple_gla, simple_gla_step), "gated_delta": (run_gated_delta, gated_delta_step)}


def _program(op, implementation):
    def run(rows, slot, positions, ancestors, path):
        out, applied = OPS_OF[op][0](implementation, rows, slot, positions, ancestors)
        return out, recurrent_commit(
            *applied, rows["pool"], slot, positions, path, implementation="reference"
        )

    return jax.jit(run)


PROGRAMS = {
    (op, implementation): _program(op, implementation)
    for op in OPS_OF
    for implementation in OPS[f"{op}_verify"].names
    if implementation != "mosaic_gpu"
}


@pytest.mark.parametrize("op, implementation", PROGRAMS)
@hypothesis.settings(max_examples=30)
@hypothesis.given(tree=trees(), seed=st.integers(0, 99), choice=st.integers(0, 99))
def test_every_path_equals_decoding_it_and_a_commit_its_end(op, implementation, tree, seed, choice):
    parent, positions = tree
    fresh = (positions == 0).any(axis=1)
    rows = poisoned(draw_rows(seed), positions, fresh)
    live = (positions >= 0).sum(axis=1)
    path = np.full((BATCH, DEPTH), -1, np.int32)
    ends = [choice % n if n else None for n in live]
    for b, n in enumerate(ends):
        if n is not None:
            chosen = path_to(parent[b], n)[:DEPTH]
            path[b, : len(chosen)] = chosen
    ancestors = ancestors_of(parent)
    out, pool = PROGRAMS[op, implementation](rows, SLOT, positions, ancestors, path)
    out, pool = np.asarray(out), np.asarray(pool)
    for b in range(BATCH):
        start = np.zeros((HEADS, KEYS, VALUES)) if fresh[b] else rows["pool"][SLOT[b]].astype(np.float64)
        for n in range(live[b]):
            state = start
            for node in path_to(parent[b], n):
                state, want = OPS_OF[op][1](state, rows, b, node)
            np.testing.assert_allclose(out[b, n], want, rtol=1e-4, atol=1e-5)
        assert (out[b, live[b] :] == 0).all()
        if ends[b] is None:
            np.testing.assert_array_equal(pool[SLOT[b]], rows["pool"][SLOT[b]])
            continue
        state = start
        for node in path[b][path[b] >= 0]:
            state, _ = OPS_OF[op][1](state, rows, b, node)
        np.testing.assert_allclose(pool[SLOT[b]], state, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(pool[[1, 3]], rows["pool"][[1, 3]])


@hypothesis.given(tree=trees())
@hypothesis.settings(max_examples=30)
def test_ancestors_are_the_nodes_of_the_path(tree):
    parent, _ = tree
    found = np.asarray(ancestors_of(parent))
    for b in range(BATCH):
        for n in range(NODES):
            assert np.flatnonzero(found[b, n]).tolist() == sorted(path_to(parent[b], n))


history_of = jax.jit(tree_history, static_argnums=(5,), static_argnames=("fill",))
commit_history = jax.jit(tree_history_commit, static_argnames=("fill",))


@hypothesis.given(tree=trees(), seed=st.integers(0, 99), choice=st.integers(0, 99))
@hypothesis.settings(max_examples=40)
def test_a_node_looks_back_along_its_path_into_the_past(tree, seed, choice):
    parent, positions = tree
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((BATCH, NODES, WIDTH)).astype(np.float32)
    pool = rng.standard_normal((SLOTS, SIZE, WIDTH)).astype(np.float32)
    pool[[0, 1, 3]] = np.nan
    starts = [int(row[row >= 0].min()) if (row >= 0).any() else 0 for row in positions]
    for b, start in enumerate(starts):
        pool[SLOT[b], : max(SIZE - start, 0)] = np.nan  # nothing was before the first token
    found = [np.asarray(f) for f in history_of(x, pool, SLOT, positions, parent, (1, 3), fill=-7.0)]
    path = np.full((BATCH, DEPTH), -1, np.int32)
    for b, start in enumerate(starts):
        past = [np.full(WIDTH, -7.0)] * SIZE + list(pool[SLOT[b]][SIZE - min(start, SIZE) :])
        count = int((positions[b] >= 0).sum())
        for n in range(count):
            nodes = path_to(parent[b], n)
            rows = past + [x[b, m] for m in nodes]
            for f, offset in zip(found, (1, 3)):
                np.testing.assert_array_equal(f[b, n], rows[-1 - offset])
        if count:
            chosen = path_to(parent[b], choice % count)[:DEPTH]
            path[b, : len(chosen)] = chosen
    after = np.asarray(commit_history(x, pool, SLOT, positions, path, fill=-7.0))
    for b, start in enumerate(starts):
        chosen = path[b][path[b] >= 0]
        if not len(chosen):
            np.testing.assert_array_equal(after[SLOT[b]], pool[SLOT[b]])
            continue
        past = [np.full(WIDTH, -7.0)] * SIZE + list(pool[SLOT[b]][SIZE - min(start, SIZE) :])
        np.testing.assert_array_equal(after[SLOT[b]], (past + [x[b, n] for n in chosen])[-SIZE:])
    np.testing.assert_array_equal(after[[1, 3]], pool[[1, 3]])
