"""Operands of the recurrent ops at the released shapes, and what the ops give, in float64 token by token."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from hybridjax.batch import TILE
from hybridjax.ops.simple_gla import decay_slopes
from hybridjax.ops.tree import tree_ancestors

SIZE, HEADS, KEY_HEADS, VALUE_HEADS = 128, 32, 16, 48
SCALE = SIZE**-0.5


@dataclasses.dataclass(frozen=True)
class Case:
    """Operands of one call; ``pool``: the index of the pool among them; ``moved``: the bytes it must move.

    ``gives``: what comes out, outputs and then the pool, or only one of them. ``parts``: whether a call is
    more than one kernel, of which XLA would compute once what calls have in common.
    """

    operands: tuple[jax.Array, ...]
    options: dict
    pool: int
    moved: int
    gives: str = "both"
    parts: bool = False


def _draw(key: int, shapes: list[tuple[int, ...]], dtype) -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(key), len(shapes))
    return [jax.random.normal(k, shape, dtype) for k, shape in zip(keys, shapes)]


def _gates(key: int, rows: int) -> list[jax.Array]:
    one, two = jax.random.split(jax.random.key(key + 100))
    shape = (rows, VALUE_HEADS)
    return [-jax.random.uniform(one, shape), jax.random.uniform(two, shape)]


def _decode_rows(rows: int, key: int) -> tuple[jax.Array, jax.Array]:
    """Slots in random order, and positions of sequences that have a state already."""
    slot = 1 + jax.random.permutation(jax.random.key(key), rows).astype(jnp.int32)
    return slot, jnp.full((rows,), 7, jnp.int32)


def simple_gla_decode(rows: int, key: int = 0) -> Case:
    q, k, v = _draw(key, [(rows, HEADS, SIZE)] * 3, jnp.bfloat16)
    (pool,) = _draw(key + 1, [(rows + 2, HEADS, SIZE, SIZE)], jnp.float32)
    slopes = jnp.asarray(decay_slopes(HEADS))
    operands = (q, k, v, slopes, pool, *_decode_rows(rows, key))
    moved = rows * HEADS * (2 * SIZE * SIZE * 4 + SIZE * (3 * 2 + 4))
    return Case(operands, {"scale": SCALE}, 4, moved)


def gated_delta_decode(rows: int, key: int = 0) -> Case:
    q, k = _draw(key, [(rows, KEY_HEADS, SIZE)] * 2, jnp.bfloat16)
    (v,) = _draw(key + 2, [(rows, VALUE_HEADS, SIZE)], jnp.bfloat16)
    (pool,) = _draw(key + 1, [(rows + 2, VALUE_HEADS, SIZE, SIZE)], jnp.float32)
    operands = (q, k, v, *_gates(key, rows), pool, *_decode_rows(rows, key))
    moved = rows * (VALUE_HEADS * (2 * SIZE * SIZE * 4 + SIZE * (2 + 4) + 8) + 2 * KEY_HEADS * SIZE * 2)
    return Case(operands, {}, 5, moved)


def _prefill_rows(tokens: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    tiles = jnp.zeros((tokens // TILE,), jnp.int32)
    return jnp.ones((1,), jnp.int32), tiles, jnp.arange(tokens, dtype=jnp.int32)


def simple_gla_prefill(tokens: int, key: int = 0) -> Case:
    q, k, v = _draw(key, [(tokens, HEADS, SIZE)] * 3, jnp.bfloat16)
    (pool,) = _draw(key + 1, [(3, HEADS, SIZE, SIZE)], jnp.float32)
    operands = (q, k, v, jnp.asarray(decay_slopes(HEADS)), pool, *_prefill_rows(tokens))
    return Case(operands, {"scale": SCALE}, 4, tokens * HEADS * SIZE * (3 * 2 + 4))


def gated_delta_prefill(tokens: int, key: int = 0) -> Case:
    q, k = _draw(key, [(tokens, KEY_HEADS, SIZE)] * 2, jnp.bfloat16)
    (v,) = _draw(key + 2, [(tokens, VALUE_HEADS, SIZE)], jnp.bfloat16)
    (pool,) = _draw(key + 1, [(3, VALUE_HEADS, SIZE, SIZE)], jnp.float32)
    operands = (q, k, v, *_gates(key, tokens), pool, *_prefill_rows(tokens))
    moved = tokens * (VALUE_HEADS * (SIZE * (2 + 4) + 8) + 2 * KEY_HEADS * SIZE * 2)
    return Case(operands, {}, 5, moved, parts=True)


NODES, PATH = 16, 5


def _tree(trees: int, key: int) -> tuple[np.ndarray, jax.Array]:
    """Parents of random trees of 16 nodes, each one of the four nodes before, and positions."""
    rng = np.random.default_rng(key)
    parent = np.full((trees, NODES), -1, np.int32)
    positions = np.full((trees, NODES), 7, np.int32)
    for row, where in zip(parent, positions):
        for n in range(1, NODES):
            row[n] = rng.integers(max(0, n - 4), n)
            where[n] = where[row[n]] + 1
    return parent, jnp.asarray(positions)


def _node_bytes(heads: int) -> int:
    return NODES * heads * SIZE


def simple_gla_verify(trees: int, key: int = 0) -> Case:
    q, k, v = _draw(key, [(trees, NODES, HEADS, SIZE)] * 3, jnp.bfloat16)
    (pool,) = _draw(key + 1, [(trees + 2, HEADS, SIZE, SIZE)], jnp.float32)
    parent, positions = _tree(trees, key)
    slot, _ = _decode_rows(trees, key)
    slopes, ancestors = jnp.asarray(decay_slopes(HEADS)), tree_ancestors(jnp.asarray(parent))
    moved = trees * (HEADS * SIZE * SIZE * 4 + _node_bytes(HEADS) * (3 * 2 + 4))
    return Case((q, k, v, slopes, pool, slot, positions, ancestors), {"scale": SCALE}, 4, moved, "outputs")


def gated_delta_verify(trees: int, key: int = 0) -> Case:
    q, k = _draw(key, [(trees, NODES, KEY_HEADS, SIZE)] * 2, jnp.bfloat16)
    (v,) = _draw(key + 2, [(trees, NODES, VALUE_HEADS, SIZE)], jnp.bfloat16)
    (pool,) = _draw(key + 1, [(trees + 2, VALUE_HEADS, SIZE, SIZE)], jnp.float32)
    g, beta = (x.reshape(trees, NODES, VALUE_HEADS) for x in _gates(key, trees * NODES))
    parent, positions = _tree(trees, key)
    slot, _ = _decode_rows(trees, key)
    moved = trees * (VALUE_HEADS * SIZE * SIZE * 4 + _node_bytes(VALUE_HEADS) * (2 + 2 * 4))
    moved += trees * _node_bytes(KEY_HEADS) * 4
    operands = (q, k, v, g, beta, pool, slot, positions, tree_ancestors(jnp.asarray(parent)))
    return Case(operands, {}, 5, moved, "outputs")


def recurrent_commit(trees: int, key: int = 0) -> Case:
    (k,) = _draw(key, [(trees, NODES, KEY_HEADS, SIZE)], jnp.bfloat16)
    (d,) = _draw(key + 2, [(trees, NODES, VALUE_HEADS, SIZE)], jnp.float32)
    (pool,) = _draw(key + 1, [(trees + 2, VALUE_HEADS, SIZE, SIZE)], jnp.float32)
    g = _gates(key, trees * NODES)[0].reshape(trees, NODES, VALUE_HEADS)
    parent, positions = _tree(trees, key)
    path = np.full((trees, PATH), -1, np.int32)
    for row, mine in zip(path, parent):
        nodes = [NODES - 1]
        while mine[nodes[-1]] >= 0:
            nodes.append(mine[nodes[-1]])
        row[: len(nodes)] = nodes[::-1][:PATH]
    slot, _ = _decode_rows(trees, key)
    moved = trees * (VALUE_HEADS * SIZE * (2 * SIZE + PATH) * 4 + PATH * KEY_HEADS * SIZE * 2)
    return Case((k, d, g, pool, slot, positions, jnp.asarray(path)), {}, 3, moved, "pool")


CASES = {
    f.__name__: f
    for f in (
        simple_gla_decode,
        gated_delta_decode,
        simple_gla_prefill,
        gated_delta_prefill,
        simple_gla_verify,
        gated_delta_verify,
        recurrent_commit,
    )
}


def recurrence(name: str, case: Case) -> list[np.ndarray]:
    """What an op gives, in float64 token by token: outputs of all rows or nodes, the pool."""
    values = [np.asarray(x.astype(jnp.float32), np.float64) for x in case.operands]
    pool, slot = values[case.pool].copy(), values[case.pool + 1].astype(int)
    if name == "recurrent_commit":
        k, d, g, path = values[0], values[1], values[2], values[-1].astype(int)
        k = np.repeat(k, d.shape[2] // k.shape[2], axis=2)
        for row, own in enumerate(slot):
            for n in path[row][path[row] >= 0]:
                added = k[row, n][:, :, None] * d[row, n][:, None, :]
                pool[own] = np.exp(g[row, n])[:, None, None] * pool[own] + added
        return [pool]
    simple = name.startswith("simple_gla")
    q, k, v = values[:3]
    norms = np.ones(k.shape[:-1])
    if simple:
        decay = np.broadcast_to(np.exp(-values[3]), q.shape[:-1])
        q, beta = q * case.options["scale"], decay
    else:
        decay, beta = np.exp(values[3]), values[4]
        norms = 1 / np.sqrt((k * k).sum(-1) + 1e-6)
        q, k = (x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6) for x in (q, k))
        q = q * SIZE**-0.5
        share = v.shape[-2] // k.shape[-2]
        q, k, norms = np.repeat(q, share, axis=-2), np.repeat(k, share, axis=-2), np.repeat(norms, share, -1)

    def token(state, at):
        state = decay[at][:, None, None] * state
        known = np.einsum("hk,hkv->hv", k[at], state)
        target = v[at] if simple else beta[at][:, None] * (v[at] - known)
        state = state + k[at][:, :, None] * target[:, None, :]
        return state, np.einsum("hk,hkv->hv", q[at], state), norms[at][:, None] * target

    out, given = np.zeros(v.shape), np.zeros(v.shape)
    if name.endswith("verify"):
        ancestors = values[-1].astype(bool)
        for at in np.ndindex(v.shape[:2]):
            state = pool[slot[at[0]]]
            for n in np.flatnonzero(ancestors[at]):
                state, out[at], given[at] = token(state, (at[0], n))
        return [out] if simple else [out, given]
    for row, position in enumerate(values[-1].astype(int)):
        own = slot[row if name.endswith("decode") else 0]
        pool[own], out[row], _ = token(0.0 * pool[own] if position == 0 else pool[own], row)
    return [out, pool]


def results(case: Case, got) -> list:
    """Outputs and pool as ``recurrence`` gives them, without slot 0, which is scratch."""
    got = list(got) if isinstance(got, tuple | list) else [got]
    return got if case.gives == "outputs" else [*got[:-1], got[-1][1:]]


def worst(got: list, want: list) -> float:
    """Largest relative error of the outputs of a row and head, and of a head's state."""
    distance = [
        np.linalg.norm(np.asarray(g, np.float64) - w, axis=-1) for g, w in zip(got, want, strict=True)
    ]
    scale = [np.linalg.norm(w, axis=-1).mean(axis=-1, keepdims=True) for w in want]
    return float(max((d / s).max() for d, s in zip(distance, scale)))
