"""Draft trees on the GPU kernels: outputs of verification and the commit, against float64 recurrences."""

import jax.numpy as jnp
import numpy as np
import pytest
from interpreting import interpreted

from hybridjax.ops import tree_ancestors
from hybridjax.pallas_kernels import tree_commit, tree_verify
from hybridjax.pallas_kernels.state_update import Tuning

pytestmark = pytest.mark.usefixtures("no_races")

SIZE, SCALE, SHARE = 128, 0.09, 2
SLOPES = np.array([0.7, 0.01], np.float32)


def random_trees(seed, nodes, batch=3):
    """Parents and positions: a fresh tree, a later one with padding, one of padding only."""
    rng = np.random.default_rng(seed)
    parent = np.array([[-1, *(rng.integers(-1 if n % 7 == 0 else 0, n) for n in range(1, nodes))]] * batch)
    positions = np.zeros((batch, nodes), np.int32)
    for b, start in zip(range(batch), (0, 41, 7)):
        for n in range(nodes):
            positions[b, n] = start if parent[b, n] < 0 else positions[b, parent[b, n]] + 1
    positions[1, max(nodes - 3, 1) :] = -1
    positions[2] = -1
    return parent.astype(np.int32), positions


def path_to(parent, n):
    path = [n]
    while parent[path[-1]] >= 0:
        path.append(int(parent[path[-1]]))
    return path[::-1]


def operands(seed, positions, key_heads, dtype):
    rng = np.random.default_rng(seed)
    shape = positions.shape
    rows = [rng.standard_normal((*shape, heads, SIZE)) for heads in (key_heads, key_heads, 2)]
    rows[1] += rng.standard_normal(SIZE)  # keys that are alike, whose corrections depend on each other
    gates = [-rng.uniform(size=(*shape, 2)), rng.uniform(size=(*shape, 2))]
    padding = positions < 0
    rows = [jnp.asarray(x, dtype).at[padding].set(jnp.nan) for x in rows]
    return rows, [jnp.asarray(x, jnp.float32).at[padding].set(jnp.nan) for x in gates]


def exact(x):
    return np.asarray(jnp.asarray(x).astype(jnp.float32), np.float64)


def close(got, want, tolerance):
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    distance = np.linalg.norm(got - want, axis=-1)
    assert distance.max() <= tolerance * np.linalg.norm(want, axis=-1).max()


def simple_gla_token(state, q, k, v):
    state = np.exp(-SLOPES.astype(np.float64))[:, None, None] * state + k[:, :, None] * v[:, None, :]
    return state, SCALE * np.einsum("hk,hkv->hv", q, state)


def gated_delta_token(state, q, k, v, g, beta):
    q, k = (np.repeat(x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6), SHARE, axis=0) for x in (q, k))
    state = np.exp(g)[:, None, None] * state
    delta = beta[:, None] * (v - np.einsum("hk,hkv->hv", k, state))
    state = state + k[:, :, None] * delta[:, None, :]
    return state, SIZE**-0.5 * np.einsum("hk,hkv->hv", q, state)


def verify_and_commit(op, rows, gates, pool, slot, positions, parent, path, tuning):
    ancestors, positions = tree_ancestors(jnp.asarray(parent)), jnp.asarray(positions)
    if op == "simple_gla":
        run = interpreted(tree_verify.simple_gla)
        out = run(*rows, jnp.asarray(SLOPES), pool, slot, positions, ancestors, scale=SCALE)
        applied = (rows[1], rows[2], -jnp.asarray(SLOPES))
    else:
        run = interpreted(tree_verify.gated_delta)
        out, corrections = run(*rows, *gates, pool, slot, positions, ancestors)
        applied = (rows[1], corrections, gates[0])
    commit = interpreted(tree_commit.commit)
    return out, commit(*applied, pool, slot, positions, jnp.asarray(path), tuning=tuning)


@pytest.mark.parametrize("cores", [1, 3, 132])  # one buffer, two for all columns of a state, half of them
@pytest.mark.parametrize(
    ("nodes", "dtype"),
    [(1, "bfloat16"), (15, "float16"), (16, "bfloat16"), (24, "bfloat16"), (50, "bfloat16")],
)
@pytest.mark.parametrize("op", ["simple_gla", "gated_delta"])
def test_every_path_equals_decoding_it_and_the_commit_its_end(op, nodes, dtype, cores, monkeypatch):
    for module in (tree_verify, tree_commit):
        monkeypatch.setattr(module, "multiprocessors", lambda: cores)
    parent, positions = random_trees(nodes, nodes)
    rows, gates = operands(5, positions, 2 if op == "simple_gla" else 2 // SHARE, dtype)
    pool = jnp.asarray(np.random.default_rng(1).standard_normal((6, 2, SIZE, SIZE)), jnp.float32)
    pool = pool.at[jnp.array([0, 1, 4])].set(jnp.nan)  # 4 starts afresh
    slot = jnp.array([4, 2, 0], jnp.int32)
    ends = [nodes - 1, max(nodes - 5, 0)]
    path = np.full((3, 6), -1, np.int32)
    for b, end in enumerate(ends):
        chosen = path_to(parent[b], end)[:6]
        path[b, : len(chosen)] = chosen
    tuning = Tuning(columns=64, stages=2, resident=1)
    out, after = verify_and_commit(op, rows, gates, pool, slot, positions, parent, path, tuning)
    token = simple_gla_token if op == "simple_gla" else gated_delta_token
    values = [exact(x) for x in (rows if op == "simple_gla" else (*rows, *gates))]
    for b in range(2):
        start = np.zeros((2, SIZE, SIZE)) if b == 0 else exact(pool[2])
        live = int((positions[b] >= 0).sum())
        want = []
        for n in range(live):
            state = start
            for node in path_to(parent[b], n):
                state, o = token(state, *(x[b, node] for x in values))
            want.append(o)
        close(out[b, :live], want, 5e-5)
        assert (np.asarray(out[b, live:]) == 0).all()
        state = start
        for node in path[b][path[b] >= 0]:
            state, _ = token(state, *(x[b, node] for x in values))
        close(after[int(slot[b])], state, 5e-5)
    assert (np.asarray(out[2]) == 0).all()
    others = np.array([0, 1, 3, 5])
    np.testing.assert_array_equal(after[others], pool[others])
