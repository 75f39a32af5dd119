"""Times of the recurrent GPU kernels at the released shapes, beside the XLA path and the peers' figures.

    python -m benchmarks.kernels [--ops simple_gla_decode,...] [--sizes 1,8,64,256] [--tune]

Sizes are rows (decode), tokens (prefill) or trees of 16 nodes (verify, commit: paths of 5).

Each implementation is first compared with a float64 recurrence; a wrong one is not timed. A time is that of
one call among many in one program, which XLA replays as a CUDA graph: gaps between kernels count, launches
from the host do not. The pool is donated from call to call; verification, which writes none, is called with
other queries each time, and what depends on the tree alone is computed once in a program. Peers: the figures
of PEERS, replayed CUDA graphs taken on another day on such a GPU. Limit: the bytes of a call over the copy
bandwidth measured in this run.
"""

import argparse
import dataclasses
import functools
import statistics
import sys
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import profiler

from benchmarks.common import copy_bandwidth, environment, finish
from hybridjax.batch import TILE
from hybridjax.ops.dispatch import OPS
from hybridjax.ops.simple_gla import decay_slopes
from hybridjax.ops.tree import tree_ancestors

SIZE, HEADS, KEY_HEADS, VALUE_HEADS = 128, 32, 16, 48
SCALE = SIZE**-0.5

# Microseconds of the fastest peer on one H200: flash-linear-attention 0.6.0 (FlashInfer 0.7.2 CuTe second).
PEERS = {
    "simple_gla_decode": {1: (6.5,), 8: (13.0,), 64: (82.2,), 256: (302.8,)},
    "gated_delta_decode": {1: (4.2,), 8: (20.9,), 64: (139.5,), 256: (546.4,)},
    "simple_gla_prefill": {2048: (58.5,), 8192: (203.8,), 32768: (773.5,)},
    "gated_delta_prefill": {2048: (201.0, 97.6), 8192: (688.0, 363.2), 32768: (2766.0, 1292.0)},
}

SIZES = {
    **PEERS,
    **dict.fromkeys(("simple_gla_verify", "gated_delta_verify", "recurrent_commit"), (1, 8, 64)),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """Operands of one call; ``pool``: the index of the pool among them; ``moved``: the bytes it must move.

    ``gives``: what comes out, outputs and then the pool, or only one of them.
    """

    operands: tuple[jax.Array, ...]
    options: dict
    pool: int
    moved: int
    gives: str = "both"


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
    return Case(operands, {}, 5, moved)


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


def error(name: str, function: Callable, size: int) -> float:
    """Largest relative error of the outputs of a row and head, and of a head's state."""
    case = CASES[name](size, key=5)

    def results(got) -> list:
        got = list(got) if isinstance(got, tuple) else [got]
        return got if case.gives == "outputs" else [*got[:-1], got[-1][1:]]  # slot 0 is scratch

    want = results(tuple(recurrence(name, case)))
    got, again = (results(jax.jit(function)(*case.operands)) for _ in range(2))
    assert all(bool((a == b).all()) for a, b in zip(got, again)), "two runs differ"
    distance = [np.linalg.norm(np.asarray(g) - w, axis=-1) for g, w in zip(got, want, strict=True)]
    scale = [np.linalg.norm(w, axis=-1).mean(axis=-1, keepdims=True) for w in want]
    return float(max((d / s).max() for d, s in zip(distance, scale)))


def microseconds(function: Callable, case: Case, repeats: int, profile: bool = True) -> tuple[float, float]:
    """Median time of one call inside programs of many, and the time that its kernels run; see the module."""
    calls = max(8, min(200, int(6e9 / case.moved)))

    if case.gives == "outputs":
        return _unchained(function, case, repeats, calls)

    def many(*operands):
        out = None
        for _ in range(calls):
            out, pool = function(*operands) if case.gives == "both" else (None, function(*operands))
            operands = (*operands[: case.pool], pool, *operands[case.pool + 1 :])
        return out, operands[case.pool]

    donating = jax.jit(many, donate_argnums=case.pool)
    operands = list(case.operands)
    operands[case.pool] = operands[case.pool] + 0
    samples, queued = [], 4
    for sample in range(repeats + 2):
        start = time.perf_counter()
        for _ in range(queued):
            _, operands[case.pool] = donating(*operands)
        jax.block_until_ready(operands[case.pool])
        if sample > 1:
            samples.append((time.perf_counter() - start) / queued / calls)
    if jax.default_backend() == "cpu" or not profile:
        return 1e6 * statistics.median(samples), float("nan")
    kernels = profiler.measure(jax.jit(many), aggregate=False)(*operands)[1] or []
    # Without donation the program begins with a copy of the pool.
    running = sum(ms for i, (name, ms) in enumerate(kernels) if i > 0 or "copy" not in name.lower())
    return 1e6 * statistics.median(samples), 1e3 * running / calls


def _unchained(function: Callable, case: Case, repeats: int, calls: int) -> tuple[float, float]:
    """The same for calls that do not depend on each other: each has queries of its own."""
    queries = [case.operands[0] + i for i in range(calls)]
    many = jax.jit(lambda queries, rest: [function(q, *rest) for q in queries])
    samples = []
    for sample in range(repeats + 2):
        start = time.perf_counter()
        for _ in range(4):
            out = many(queries, case.operands[1:])
        jax.block_until_ready(out)
        if sample > 1:
            samples.append((time.perf_counter() - start) / 4 / calls)
    if jax.default_backend() == "cpu":
        return 1e6 * statistics.median(samples), float("nan")
    kernels = profiler.measure(many, aggregate=False)(queries, case.operands[1:])[1] or []
    return 1e6 * statistics.median(samples), 1e3 * sum(ms for _, ms in kernels) / calls


def candidates(name: str, tune: bool) -> dict[str, Callable]:
    """Implementations of an op by name; with ``tune`` also variants of its kernel."""
    found = {item: functools.partial(OPS[name], implementation=item) for item in OPS[name].names}
    if name.endswith(("prefill", "verify")):
        del found["reference"]  # a token at a time
    if tune:
        from hybridjax.pallas_kernels import catalog

        kernel = catalog.by_name(name)
        for options in kernel.variants:
            label = ",".join(f"{key}={value}" for key, value in options.items())
            found[f"kernel[{label}]"] = functools.partial(kernel.function(), **options)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ops", default=",".join(CASES))
    parser.add_argument("--sizes", default="", help="rows or tokens; default: those of the peers")
    parser.add_argument("--implementations", default="")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--no-profile", action="store_true", help="leave out the kernels' own times")
    options = parser.parse_args()

    bandwidth = copy_bandwidth(2**31 if jax.default_backend() != "cpu" else 2**26)
    print(f"{environment()}\ncopy {bandwidth / 1e12:.2f} TB/s", flush=True)
    wanted = [name for name in options.implementations.split(",") if name]
    rows = []
    for name in options.ops.split(","):
        for label, function in candidates(name, options.tune).items():
            if wanted and not any(label.startswith(w) for w in wanted):
                continue
            rows += measure(name, label, function, options, bandwidth)
    finish("kernels", rows, copy_bytes_per_second=bandwidth)
    return 0


def measure(name: str, label: str, function: Callable, options, bandwidth: float) -> list[dict]:
    """Checks one implementation of one op, then times it at each size."""
    rows = []
    try:
        make = CASES[name]
        check = 5 * TILE if name.endswith("prefill") else 7
        wrong = error(name, functools.partial(function, **make(check).options), check)
        print(f"{name} {label}: largest relative error {wrong:.1e}", flush=True)
        if not wrong < 0.02:
            return []
        for size in [int(s) for s in options.sizes.split(",") if s] or SIZES[name]:
            case = make(size)
            call = functools.partial(function, **case.options)
            took, running = microseconds(call, case, options.repeats, not options.no_profile)
            limit = case.moved / bandwidth * 1e6
            peers = PEERS.get(name, {}).get(size, ())
            beside = ", ".join(f"{took / peer:.2f} x {peer} us" for peer in peers)
            print(
                f"{name:20s} {size:6d} {label:28s} {took:9.1f} us ({running:.1f} in kernels), "
                f"{case.moved / took / 1e3:6.0f} GB/s, limit {limit:7.1f} us ({limit / took:4.0%}), "
                f"peers: {beside}",
                flush=True,
            )
            rows.append(
                {
                    "op": name,
                    "size": size,
                    "implementation": label,
                    "us": took,
                    "kernel_us": running,
                    "limit_us": limit,
                    "peers_us": peers,
                }
            )
    except (NotImplementedError, ValueError, AssertionError, jax.errors.JaxRuntimeError) as failure:
        print(f"{name} {label}: {type(failure).__name__}: {str(failure)[:400]}", flush=True)
    return rows


if __name__ == "__main__":
    sys.exit(main())
