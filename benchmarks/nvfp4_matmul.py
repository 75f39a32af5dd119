"""Times of products with NVFP4 weights, dense and of routed experts, beside XLA's with bfloat16 weights.

    python -m benchmarks.nvfp4_matmul [--shapes 4096x32768,...] [--tokens 1,8] [--parts dense] [--tune]

Shapes are K x N. Each implementation is first compared with float64; a wrong one is not timed. A time is that
of one call among many in one program, which XLA replays as a CUDA graph, with other inputs each time, and
weights (or routings) in turn, more of them than the second-level cache holds. Beside it stands the time that
the program's kernels run. Limit: the bytes of a call over the copy bandwidth of this run; a ratio is the time
of the faster bfloat16 form over the time of the best NVFP4 form.
"""

import argparse
import dataclasses
import functools
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import profiler

from benchmarks.common import copy_bandwidth, environment, finish
from hybridjax.ops import experts, nvfp4_experts, nvfp4_w4a16, route
from hybridjax.ops.dispatch import einsum_f32
from hybridjax.pallas_kernels import catalog
from hybridjax.quantization import NVFP4, decode

_CACHE = 3 * 52428800  # bytes that the weights of a program have at least
_TARGETS = {(4096, 32768): 2.3, (16384, 4096): 2.2, (4096, 4096): 1.4}  # up to 16 tokens
_TARGET_OF_EXPERTS = 2.5  # one token


@dataclasses.dataclass(frozen=True)
class Measured:
    """Microseconds of a call within a program, and of its kernels alone."""

    program: float
    kernels: float


@functools.partial(jax.jit, static_argnums=1)
def draw(key: jax.Array, shape: tuple[int, ...]) -> NVFP4:
    """Random codes as the kernel wants them, scales around 1, global scales that make sums of about 1."""
    codes, scales, factors = jax.random.split(key, 3)
    low, high = 0x30, 0x40  # 0.5 to 2
    drawn = jax.random.randint(scales, (*shape[:-1], shape[-1] // 16), low, high, jnp.uint8)
    return NVFP4(
        codes=jax.random.bits(codes, (*shape[:-1], shape[-1] // 8), jnp.uint32),
        scales=jax.lax.bitcast_convert_type(drawn, jnp.float8_e4m3fn),
        global_scale=jax.random.uniform(factors, shape[:-1], minval=0.5, maxval=1.5) / (3 * shape[-1] ** 0.5),
    )


def exact(weight: NVFP4) -> np.ndarray:
    """float64 values of some rows."""
    values = np.asarray(decode(weight.codes, weight.scales), np.float64)
    return values * np.asarray(weight.global_scale, np.float64)[..., None]


def measure(function: Callable, weights: list, inputs: list, repeats: int) -> Measured:
    """The time of one call ``function(weights, input)``: one program, every input once, weights in turn."""

    def calls(weights, inputs):
        return [function(weights[i % len(weights)], x) for i, x in enumerate(inputs)]

    many = jax.jit(calls)
    jax.block_until_ready(many(weights, inputs))
    samples = []
    for sample in range(repeats + 2):
        start = time.perf_counter()
        jax.block_until_ready(many(weights, inputs))
        if sample > 1:
            samples.append((time.perf_counter() - start) / len(inputs))
    program = 1e6 * statistics.median(samples)
    if jax.default_backend() == "cpu":
        return Measured(program, float("nan"))
    kernels = profiler.measure(many, aggregate=False)(weights, inputs)[1] or []
    return Measured(program, 1e3 * sum(ms for _, ms in kernels) / len(inputs))


def dense_error(function: Callable, weight: NVFP4, x: jax.Array) -> float:
    """Largest relative error of a token's results in float32; two runs must agree."""
    run = jax.jit(lambda x, w: function(x, w.codes, w.scales, w.global_scale, out_dtype=jnp.float32))
    got, again = (np.asarray(run(x, weight)) for _ in range(2))
    assert (got == again).all(), "two runs differ"
    some = np.random.default_rng(0).choice(weight.codes.shape[0], 64, replace=False)
    want = np.asarray(x.astype(jnp.float32), np.float64) @ exact(jax.tree.map(lambda y: y[some], weight)).T
    return float((np.linalg.norm(got[:, some] - want, axis=1) / np.linalg.norm(want, axis=1)).max())


def dense(options: argparse.Namespace, bandwidth: float) -> list[dict]:
    rows = []
    tunings = [v["tuning"] for v in catalog.by_name("nvfp4_w4a16").variants] if options.tune else []
    candidates = {name: functools.partial(nvfp4_w4a16, implementation=name) for name in nvfp4_w4a16.names}
    del candidates["reference"]
    for tuning in tunings:
        label = f"kernel[{tuning.rows},{tuning.splits},{tuning.stages}]"
        candidates[label] = functools.partial(catalog.by_name("nvfp4_w4a16").function(), tuning=tuning)
    for columns, features in options.shapes:
        size = features * columns * 9 // 16 + 4 * features
        count = max(2, -(-_CACHE // size))
        weights = [draw(jax.random.key(i), (features, columns)) for i in range(count)]
        # One bfloat16 matrix is more than the cache holds, or there are as many as of the others.
        plain = [
            jax.random.normal(jax.random.key(i), (columns, features), jnp.bfloat16)
            for i in range(max(2, -(-_CACHE // (2 * columns * features))))
        ]
        turned = [w.T + 0 for w in plain]
        for tokens in options.tokens:
            inputs = [
                jax.random.normal(jax.random.key(i), (tokens, columns), jnp.bfloat16)
                for i in range(options.calls)
            ]
            limit = (size + 2 * tokens * (columns + features)) / bandwidth * 1e6
            took = {
                "bfloat16 [K, N]": measure(
                    lambda w, x: einsum_f32("mk,kn->mn", x, w).astype(x.dtype), plain, inputs, options.repeats
                ),
                "bfloat16 [N, K]": measure(
                    lambda w, x: einsum_f32("mk,nk->mn", x, w).astype(x.dtype),
                    turned,
                    inputs,
                    options.repeats,
                ),
            }
            for name, function in candidates.items():
                if not name.startswith(options.implementations):
                    continue
                try:
                    wrong = dense_error(function, weights[0], inputs[0])
                    if not wrong < 1e-4:
                        print(
                            f"{columns}x{features} M={tokens} {name}: error {wrong:.1e}, not timed",
                            flush=True,
                        )
                        continue

                    def call(w, x, function=function):
                        return function(x, w.codes, w.scales, w.global_scale)

                    took[name] = measure(call, weights, inputs, options.repeats)
                except (
                    NotImplementedError,
                    ValueError,
                    AssertionError,
                    jax.errors.JaxRuntimeError,
                ) as failure:
                    print(f"{columns}x{features} M={tokens} {name}: {str(failure)[:200]}", flush=True)
            target = _TARGETS.get((columns, features)) if tokens <= 16 else 1.0
            rows += report(f"{columns}x{features}", tokens, took, limit, target)
        del weights, plain, turned
    return rows


def routed(options: argparse.Namespace, bandwidth: float) -> list[dict]:
    count, k, hidden, width = options.experts, options.k, options.hidden, options.width
    shapes = (count, 2 * width, hidden), (count, hidden, width)
    gate_up, down = (draw(jax.random.key(i), shape) for i, shape in enumerate(shapes))
    plain = [
        jax.random.normal(jax.random.key(i), shape, jnp.bfloat16) * 0.02 for i, shape in enumerate(shapes)
    ]
    each = sum(s[1] * s[2] * 9 // 16 + 4 * s[1] for s in shapes)
    rows = []
    for tokens in options.tokens:
        items = []
        for i in range(options.calls):
            one, two = jax.random.split(jax.random.key(i))
            ids, weights = route(jax.random.normal(one, (tokens, count)), k, True)
            items.append((jax.random.normal(two, (tokens, hidden), jnp.bfloat16), ids, weights))
        touched = float(np.mean([len(np.unique(np.asarray(item[1]))) for item in items]))
        took = {}
        forms: dict[str, tuple[Callable, Any]] = {
            f"bfloat16 {name}": (functools.partial(experts, implementation=name), tuple(plain))
            for name in ("gather", "mosaic_gpu")
        }
        for name in nvfp4_experts.names:
            if name not in ("reference", "xla"):
                forms[name] = (functools.partial(nvfp4_experts, implementation=name), (gate_up, down))
        if options.tune:
            kernel = catalog.by_name("nvfp4_experts")
            for variant in (*kernel.variants, {"alone": True}, {"alone": False}):
                label = f"kernel[{variant}]".replace("Tuning", "")
                forms[label] = (functools.partial(kernel.function(), **variant), (gate_up, down))
        for name, (function, matrices) in forms.items():
            wanted = name.startswith(("bfloat16", *options.implementations))
            if not wanted or ("gather" in name and tokens > options.most_gathered):
                continue
            try:
                if not name.startswith("bfloat16"):
                    wrong = experts_error(function, items[0], gate_up, down)
                    if not wrong < 0.02:
                        print(f"experts M={tokens} {name}: error {wrong:.1e}, not timed", flush=True)
                        continue
                call = functools.partial(lambda m, item, f: f(*item, *m), f=function)
                took[name] = measure(call, [matrices], items, options.repeats)
            except (NotImplementedError, ValueError, AssertionError, jax.errors.JaxRuntimeError) as failure:
                print(f"experts M={tokens} {name}: {str(failure)[:200]}", flush=True)
        limit = touched * each / bandwidth * 1e6
        rows += report(
            f"{k} of {count} experts", tokens, took, limit, _TARGET_OF_EXPERTS if tokens == 1 else 1.0
        )
    return rows


def experts_error(function: Callable, item: tuple, gate_up: NVFP4, down: NVFP4) -> float:
    """Largest relative error of the first and the last token against float64; two runs must agree."""
    x, ids, weights = item
    got, again = (np.asarray(jax.jit(function)(*item, gate_up, down), np.float64) for _ in range(2))
    assert (got == again).all(), "two runs differ"
    worst = 0.0
    for n in {0, x.shape[0] - 1}:
        row, want = np.asarray(x[n].astype(jnp.float32), np.float64), 0.0
        for weight, e in zip(np.asarray(weights[n], np.float64), np.asarray(ids[n])):
            wide, narrow = (exact(jax.tree.map(lambda y, e=e: y[e], m)) for m in (gate_up, down))
            gate, up = np.split(wide @ row, 2)
            want = want + weight * (narrow @ (gate / (1 + np.exp(-gate)) * up))
        worst = max(worst, float(np.linalg.norm(got[n] - want) / np.linalg.norm(want)))
    return worst


def report(
    case: str, tokens: int, took: dict[str, Measured], limit: float, target: float | None
) -> list[dict]:
    """Prints a line per form and the ratio of the best ones."""
    rows = []
    for name, time_of in took.items():
        print(
            f"{case:18s} M={tokens:3d} {name:24s} {time_of.program:8.1f} us "
            f"({time_of.kernels:.1f} in kernels), limit {limit:6.1f} us ({limit / time_of.kernels:4.0%})",
            flush=True,
        )
        rows.append(
            {"case": case, "tokens": tokens, "implementation": name, **vars(time_of), "limit_us": limit}
        )
    plain = [t for name, t in took.items() if name.startswith("bfloat16")]
    own = {name: t for name, t in took.items() if not name.startswith("bfloat16")}
    if plain and own:
        best = min(own, key=lambda name: own[name].program)
        ratios = [
            min(getattr(t, field) for t in plain) / getattr(own[best], field)
            for field in ("program", "kernels")
        ]
        print(
            f"{case:18s} M={tokens:3d} {best} is {ratios[0]:.2f} x as fast as bfloat16 "
            f"(kernels {ratios[1]:.2f} x), target {target}",
            flush=True,
        )
        rows.append(
            {
                "case": case,
                "tokens": tokens,
                "best": best,
                "ratio": ratios[0],
                "kernel_ratio": ratios[1],
                "target": target,
            }
        )
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", default=",".join(f"{k}x{n}" for k, n in _TARGETS))
    parser.add_argument("--tokens", default="1,2,4,8,16,32,64")
    parser.add_argument("--parts", default="dense,experts")
    parser.add_argument("--implementations", default="mosaic_gpu,kernel", help="beginnings of names")
    parser.add_argument("--experts", type=int, default=512)
    parser.add_argument("--k", type=int, default=10)
    parser.add_argument("--hidden", type=int, default=2560)
    parser.add_argument("--width", type=int, default=640)
    parser.add_argument("--most-gathered", type=int, default=8, help="tokens up to which gathers are timed")
    parser.add_argument("--calls", type=int, default=96, help="per program")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--tune", action="store_true")
    options = parser.parse_args()
    options.implementations = tuple(options.implementations.split(","))
    options.tokens = [int(n) for n in options.tokens.split(",")]
    options.shapes = [tuple(map(int, shape.split("x"))) for shape in options.shapes.split(",")]
    bandwidth = copy_bandwidth(2**31 if jax.default_backend() != "cpu" else 2**24)
    print(f"{environment()}\ncopy {bandwidth / 1e12:.2f} TB/s", flush=True)
    rows = []
    for part in options.parts.split(","):
        rows += {"dense": dense, "experts": routed}[part](options, bandwidth)
    finish("nvfp4_matmul", rows, copy_bytes_per_second=bandwidth)
    return 0


if __name__ == "__main__":
    sys.exit(main())
