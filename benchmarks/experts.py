"""Times of the routed experts at the released shape, one implementation beside the other.

    python -m benchmarks.experts [--tokens 1,8,64,512,2048] [--implementations mosaic_gpu,gather]

Each time is that of one call inside a scan over different tokens and routings, so that neither launches nor
a cache that remembers the last weights count. Limits: the weights of the experts touched over the copy
bandwidth, or the matrix products over the matmul rate, whichever is longer.
"""

import argparse
import functools
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.common import copy_bandwidth, environment, finish, matmul_rate, times
from hybridjax.ops import experts, route


def candidates(tune: bool) -> dict:
    """Implementations by name; with ``tune`` also variants of the GPU kernel."""
    found = {
        name: functools.partial(experts, implementation=name)
        for name in ("mosaic_gpu", "gather", "blocked", "ragged", "dense")
        if name in experts.names
    }
    if tune:
        from hybridjax.pallas_kernels.experts.hopper import apply

        for gate, down, stages in ((64, 64, 4), (128, 128, 4), (64, 128, 6), (64, 128, 8)):
            name = f"mosaic_gpu[{gate},{down},{stages}]"
            found[name] = functools.partial(apply, gate_tile=gate, down_tile=down, stages=stages)
    return found


def scratch(name: str, rows: int, shape: argparse.Namespace) -> int:
    """Bytes of intermediates if XLA fuses nothing."""
    choices, width, hidden = rows * shape.k, shape.width, shape.hidden
    if name == "dense":
        return rows * shape.experts * (2 * width + width + hidden) * 4
    if name == "gather":
        return choices * 3 * width * hidden * 4
    if name == "ragged":
        return shape.experts * choices * hidden * 4
    blocks = min(choices, shape.experts) + choices // 64
    return blocks * 64 * (2 * hidden + 3 * width) * 4


def make_inputs(rows: int, shape: argparse.Namespace, steps: int, seed: int):
    """x [steps, rows, H], ids and weights of random routings, and the mean number of experts touched."""
    keys = jax.random.split(jax.random.key(seed))
    x = jax.random.normal(keys[0], (steps, rows, shape.hidden), shape.dtype)
    logits = jax.random.normal(keys[1], (steps * rows, shape.experts))
    ids, weights = route(logits, shape.k, True)
    ids, weights = (t.reshape(steps, rows, shape.k) for t in (ids, weights))
    touched = np.mean([len(np.unique(step)) for step in np.asarray(ids)])
    return (x, ids, weights), float(touched)


def error(function, matrices, shape: argparse.Namespace, rows: int) -> float:
    """Largest relative error of a row against the definition; a quarter of the rows are padding."""
    (x, ids, weights), _ = make_inputs(rows, shape, 1, 1)
    ids = jnp.where(jnp.arange(rows)[:, None] % 4 == 3, -1, ids[0])
    args = (x[0], ids, weights[0], *matrices)
    got = np.asarray(jax.jit(function)(*args), np.float32)
    reference = functools.partial(experts, implementation="reference")
    want = np.asarray(jax.jit(reference)(*args), np.float32)
    assert not got[3::4].any()
    live = np.arange(rows) % 4 != 3
    return float((np.linalg.norm(got - want, axis=1)[live] / np.linalg.norm(want, axis=1)[live]).max())


def seconds(function, inputs, matrices, repeats: int) -> dict:
    """Seconds of one call, launches excluded."""

    @jax.jit
    def all_steps(inputs, matrices):
        def step(total, item):
            return total + function(*item, *matrices), None

        return jax.lax.scan(step, jnp.zeros_like(inputs[0][0]), inputs)[0]

    took = times(lambda: all_steps(inputs, matrices).block_until_ready(), repeats, warmup=2)
    steps = inputs[0].shape[0]
    return {key: value if key == "n" else value / steps for key, value in took.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", default="1,8,64,512,2048")
    parser.add_argument("--implementations", default="")
    parser.add_argument("--experts", type=int, default=512)
    parser.add_argument("--k", type=int, default=10)
    parser.add_argument("--hidden", type=int, default=2560)
    parser.add_argument("--width", type=int, default=640)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--check-rows", type=int, default=40)
    parser.add_argument("--scratch", type=float, default=4.0, help="GiB of intermediates allowed")
    parser.add_argument("--tune", action="store_true")
    shape = parser.parse_args()
    shape.dtype = jnp.dtype(shape.dtype)

    @jax.jit
    def make():
        keys = jax.random.split(jax.random.key(0))
        up = jax.random.normal(keys[0], (shape.experts, 2 * shape.width, shape.hidden), shape.dtype)
        down = jax.random.normal(keys[1], (shape.experts, shape.hidden, shape.width), shape.dtype)
        return up * shape.hidden**-0.5, down * shape.width**-0.5

    matrices = make()
    each = sum(m.nbytes for m in matrices) / shape.experts
    large = jax.default_backend() != "cpu"
    bandwidth = copy_bandwidth(2**31 if large else 2**26)
    rate = matmul_rate(8192 if large else 2048, shape.dtype)
    print(f"{environment()}\ncopy {bandwidth / 1e12:.2f} TB/s, matmul {rate / 1e12:.1f} TFLOP/s", flush=True)

    wanted = [name for name in shape.implementations.split(",") if name]
    rows, errors, skipped = [], {}, set()
    for count in map(int, shape.tokens.split(",")):
        inputs, touched = make_inputs(count, shape, shape.steps, 2)
        flops = 6 * count * shape.k * shape.hidden * shape.width
        limit = max(touched * each / bandwidth, flops / rate)
        for name, function in candidates(shape.tune).items():
            if (wanted and name not in wanted) or name in skipped:
                continue
            if scratch(name, count, shape) > shape.scratch * 2**30:
                print(f"tokens {count:5d} {name:24s} left out: it could need too much memory", flush=True)
                continue
            start = time.perf_counter()
            try:
                if name not in errors:
                    errors[name] = error(function, matrices, shape, shape.check_rows)
                    print(f"{name}: largest relative error of a row {errors[name]:.1e}", flush=True)
                if not errors[name] < 0.02:
                    print(f"{name}: wrong; no times are printed")
                    skipped.add(name)
                    continue
                took = seconds(function, inputs, matrices, shape.repeats)
            except (NotImplementedError, ValueError, jax.errors.JaxRuntimeError) as failure:
                print(f"{name}: {type(failure).__name__}: {str(failure)[:200]}", flush=True)
                skipped.add(name)
                continue
            row = {"tokens": count, "implementation": name, "seconds": took, "limit_seconds": limit}
            rows.append(row)
            print(
                f"tokens {count:5d} {name:24s} {took['median'] * 1e6:10.1f} us "
                f"[{took['q1'] * 1e6:.1f}, {took['q3'] * 1e6:.1f}], limit {limit * 1e6:.1f} us "
                f"({touched:.0f} experts), {took['median'] / limit:.2f} x; "
                f"with compiling {time.perf_counter() - start:.1f} s",
                flush=True,
            )
    finish("experts", rows, errors=errors, copy_bytes_per_second=bandwidth, matmul_flops=rate)
    return 0


if __name__ == "__main__":
    sys.exit(main())
