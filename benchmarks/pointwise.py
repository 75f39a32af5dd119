"""Times of what the linear mixers do around their recurrences, at the released shapes.

    python -m benchmarks.pointwise [--ops lightning_rows,...] [--sizes 1,64,8192] [--torch]

Each implementation is first compared with a float64 formula; a wrong one is not timed. A time is the sum of
the kernels of one call (CUPTI), beside their number. The limit: the bytes that a call must move over the rate
of a large copy in the same run; what a call at few rows moves stays in the cache. ``gated_delta_inputs`` is a
prefill of one sequence, but up to a tile of 64 rows a decode step, of which only the whole is a kernel. With
--torch the same formulas, compiled by torch.compile, are timed at the largest size as replayed CUDA graphs.
"""

import argparse
import dataclasses
import functools
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import profiler

from benchmarks.common import copy_bandwidth, environment, finish
from benchmarks.qwen4_exp_common import decode_batch, prefill_batch
from hybridjax.batch import TILE, Batch
from hybridjax.ops.dispatch import OPS

SIZE, HEADS, KEY_HEADS, VALUE_HEADS, TAPS = 128, 32, 16, 48, 4
WIDTH, VALUES = HEADS * SIZE, VALUE_HEADS * SIZE
CHANNELS = 2 * KEY_HEADS * SIZE + VALUES
EPS, THETA = 1e-6, 10000.0


@dataclasses.dataclass(frozen=True)
class Case:
    """A call at a number of rows.

    Attributes:
      operands: of the op.
      options: its static ones.
      exact: the same in float64: called with the operands as float64 arrays.
      moved: bytes that must be read and written.
    """

    operands: tuple[Any, ...]
    options: dict[str, Any]
    exact: Callable[..., tuple[np.ndarray, ...]]
    moved: int


def _draw(key: int, *shape: int, dtype: Any = jnp.bfloat16) -> jax.Array:
    return jax.random.normal(jax.random.key(key), shape, dtype)


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def _normed(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * weight


def lightning_rows(rows: int) -> Case:
    """QK norm and RoPE of one fused projection, which also holds values and gates."""
    weights = [1 + 0.1 * _draw(i, SIZE) for i in (1, 2)]
    operands = (_draw(0, rows, 4 * WIDTH), *weights, jnp.arange(rows, dtype=jnp.int32) + 1000)
    options = {"heads": HEADS, "size": SIZE, "eps": EPS, "theta": THETA}

    def exact(projected, q_norm, k_norm, positions):
        q, k, v = (projected[:, i * WIDTH : (i + 1) * WIDTH].reshape(-1, HEADS, SIZE) for i in range(3))
        angle = positions[:, None, None] * THETA ** (-np.arange(SIZE // 2) / (SIZE // 2))

        def turned(x):
            low, high = x[..., : SIZE // 2], x[..., SIZE // 2 :]
            cos, sin = np.cos(angle), np.sin(angle)
            return np.concatenate([low * cos - high * sin, high * cos + low * sin], -1)

        return turned(_normed(q, q_norm)), turned(_normed(k, k_norm)), v

    return Case(operands, options, exact, rows * WIDTH * 2 * 2 * 3)


def lightning_output(rows: int) -> Case:
    """Norm over all heads and gate; what comes in is float32."""
    operands = (
        _draw(0, rows, HEADS, SIZE, dtype=jnp.float32),
        _draw(1, rows, 4 * WIDTH),
        1 + 0.1 * _draw(2, WIDTH),
    )

    def exact(out, projected, o_norm):
        return (_normed(out.reshape(rows, -1), o_norm) * _sigmoid(projected[:, -WIDTH:]),)

    return Case(operands, {"eps": EPS, "gate": True}, exact, rows * WIDTH * (4 + 2 + 2))


def gated_delta_output(rows: int) -> Case:
    """Norm per head and gate."""
    operands = (
        _draw(0, rows, VALUE_HEADS, SIZE, dtype=jnp.float32),
        _draw(1, rows, CHANNELS + VALUES + 2 * VALUE_HEADS),
        1 + 0.1 * _draw(2, SIZE),
    )

    def exact(out, projected, weight):
        z = projected[:, CHANNELS : CHANNELS + VALUES].reshape(out.shape)
        return (_normed(out, weight) * _sigmoid(z),)

    options = {"first": CHANNELS, "eps": EPS, "activation": "sigmoid"}
    return Case(operands, options, exact, rows * VALUES * (4 + 2 + 2))


def _batch(rows: int) -> Batch:
    """A decode step, or one prompt from its start."""
    return prefill_batch(rows, 0, 2**20) if rows > TILE else decode_batch(rows, 8, 2**20)


def gated_delta_inputs(rows: int) -> Case:
    """Convolution, SiLU and split of q, k and v, gates, and the convolution's own state."""
    batch = _batch(rows)
    operands = (
        _draw(0, rows, CHANNELS + VALUES + 2 * VALUE_HEADS),
        0.5 * _draw(1, CHANNELS, 1, TAPS),
        0.1 * _draw(2, VALUE_HEADS, dtype=jnp.float32),
        0.1 * _draw(3, VALUE_HEADS, dtype=jnp.float32),
        batch,
        _draw(4, 8 + (0 if rows > TILE else rows), TAPS - 1, CHANNELS),
    )

    def exact(projected, weight, A_log, dt_bias, batch, pool):
        x, weight = projected[:, :CHANNELS], weight[:, 0]
        if rows > TILE:
            padded = np.concatenate([np.zeros((TAPS - 1, CHANNELS)), x])
            past = np.stack([padded[j : j + rows] for j in range(TAPS)])
        else:
            slot = np.asarray(batch.slot)
            past = np.stack([*(pool[slot, j] for j in range(TAPS - 1)), x])
        mixed = np.einsum("jnc,cj->nc", past, weight)
        mixed = mixed * _sigmoid(mixed)
        keys = KEY_HEADS * SIZE
        q, k = (mixed[:, i * keys : (i + 1) * keys].reshape(rows, -1, SIZE) for i in range(2))
        b, a = projected[:, -2 * VALUE_HEADS : -VALUE_HEADS], projected[:, -VALUE_HEADS:]
        g = -np.exp(A_log) * np.logaddexp(0, a + dt_bias)
        kept = pool.copy()
        if rows > TILE:
            kept[1] = x[-(TAPS - 1) :]
        else:
            kept[np.asarray(batch.slot)] = np.swapaxes(past[1:], 0, 1)
        return q, k, mixed[:, 2 * keys :].reshape(rows, -1, SIZE), g, _sigmoid(b), kept[1:]

    moved = rows * CHANNELS * 2 * 2 + CHANNELS * TAPS * 2
    if rows < TILE:
        moved += rows * CHANNELS * (TAPS - 1) * 2 * 2
    options = {"key_heads": KEY_HEADS, "key_size": SIZE, "value_size": SIZE}
    return Case(operands, options, exact, moved)


CASES = {f.__name__: f for f in (lightning_rows, lightning_output, gated_delta_output, gated_delta_inputs)}


def implementations(name: str) -> dict[str, Callable]:
    """What computes an op, by name."""
    # XLA's form of these is the definition.
    names = [item for item in OPS[name].names if item != "xla"]
    return {item: functools.partial(OPS[name], implementation=item) for item in names}


def supported(function: Callable, name: str, sizes: tuple[int, ...] | list[int]) -> list[int]:
    """The numbers of rows that an implementation takes."""
    found = []
    for size in sizes:
        case = CASES[name](size)
        try:
            jax.eval_shape(functools.partial(function, **case.options), *case.operands)
        except NotImplementedError:
            continue
        found.append(size)
    return found


def error(name: str, function: Callable, rows: int) -> float:
    """Largest difference from float64 over the largest value, of any output; two runs must be equal."""
    case = CASES[name](rows)
    run = jax.jit(functools.partial(function, **case.options))
    wide = [
        x if isinstance(x, Batch) else np.asarray(x.astype(jnp.float32), np.float64) for x in case.operands
    ]
    wanted = case.exact(*wide)

    def results() -> list[np.ndarray]:
        """Outputs; of a pool all but slot 0, in which anything may be."""
        got = [np.asarray(x.astype(jnp.float32)) for x in jax.tree.leaves(run(*case.operands))]
        return [x[len(x) - len(want) :] for x, want in zip(got, wanted, strict=True)]

    got, again = results(), results()
    assert all((a == b).all() for a, b in zip(got, again)), "two runs differ"
    return max(float(np.abs(mine - want).max() / np.abs(want).max()) for mine, want in zip(got, wanted))


def kernels(function: Callable, case: Case, calls: int) -> list[tuple[str, float]]:
    """Names and microseconds of the kernels of one call, each the median over ``calls``."""
    run = jax.jit(functools.partial(function, **case.options))
    found: Any = profiler.measure(run, aggregate=False, iterations=calls)(*case.operands)[1]
    names = [name for name, _ in found[0]]
    return [(name, 1e3 * float(np.median([one[i][1] for one in found]))) for i, name in enumerate(names)]


def measure(name: str, label: str, function: Callable, sizes: list[int], options: Any, rate: float) -> list:
    """Checks an implementation of an op and times it at each size."""
    rows = []
    try:
        wrong = max(error(name, function, size) for size in supported(function, name, (5, 3 * TILE)))
        print(f"{name} {label}: largest error {wrong:.1e} of the largest value", flush=True)
        if not wrong < 0.02:
            return []
        for size in supported(function, name, sizes):
            case = CASES[name](size)
            parts = kernels(function, case, options.calls)
            took, limit = sum(us for _, us in parts), case.moved / rate * 1e6
            each = ", ".join(f"{part[:34]} {us:.1f}" for part, us in parts)
            print(
                f"{name:18s} {size:5d} {label:12s} {took:8.1f} us in {len(parts)} kernels, "
                f"limit {limit:6.1f} us ({limit / took:4.0%}): {each}",
                flush=True,
            )
            rows.append(
                {
                    "op": name,
                    "rows": size,
                    "implementation": label,
                    "us": took,
                    "limit_us": limit,
                    "kernels": parts,
                }
            )
    except (NotImplementedError, ValueError, AssertionError, jax.errors.JaxRuntimeError) as failure:
        print(f"{name} {label}: {type(failure).__name__}: {str(failure)[:400]}", flush=True)
    return rows


def torch_times(names: list[str], rows: int) -> list[dict]:
    """The same formulas by torch.compile, each the median of replayed CUDA graphs of 5 calls."""
    import torch  # pyright: ignore[reportMissingImports]

    def draw(*shape, dtype=torch.bfloat16):
        return torch.randn(*shape, device="cuda", dtype=dtype)

    def normed(x, weight):
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype) * weight

    def lightning_rows(projected, q_norm, k_norm, cos, sin):
        q, k, v = (projected[:, i * WIDTH : (i + 1) * WIDTH].view(rows, HEADS, SIZE) for i in range(3))

        def turned(x):
            low, high = x.float().chunk(2, -1)
            return torch.cat([low * cos - high * sin, high * cos + low * sin], -1).to(x.dtype)

        return turned(normed(q, q_norm)), turned(normed(k, k_norm)), v.contiguous()

    def lightning_output(out, projected, weight):
        return normed(out.to(torch.bfloat16).view(rows, -1), weight) * torch.sigmoid(projected[:, -WIDTH:])

    def gated_delta_output(out, projected, weight):
        z = projected[:, CHANNELS : CHANNELS + VALUES].view(rows, VALUE_HEADS, SIZE).float()
        scale = torch.rsqrt(out.pow(2).mean(-1, keepdim=True) + EPS)
        return (out * scale * weight.float() * torch.sigmoid(z)).to(torch.bfloat16)

    angle = torch.arange(rows, device="cuda")[:, None, None] * THETA ** (
        -torch.arange(SIZE // 2, device="cuda") / (SIZE // 2)
    )
    gdn = CHANNELS + VALUES + 2 * VALUE_HEADS
    work: dict[str, tuple[Callable, tuple]] = {
        "lightning_rows": (
            lightning_rows,
            (draw(rows, 4 * WIDTH), draw(SIZE), draw(SIZE), angle.cos(), angle.sin()),
        ),
        "lightning_output": (
            lightning_output,
            (draw(rows, HEADS, SIZE, dtype=torch.float32), draw(rows, 4 * WIDTH), draw(WIDTH)),
        ),
        "gated_delta_output": (
            gated_delta_output,
            (draw(rows, VALUE_HEADS, SIZE, dtype=torch.float32), draw(rows, gdn), draw(SIZE)),
        ),
    }
    found = []
    for name in names:
        if name not in work:
            continue
        function, operands = torch.compile(work[name][0], dynamic=False), work[name][1]
        with torch.no_grad():
            for _ in range(3):
                function(*operands)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for _ in range(5):
                    function(*operands)
            samples = []
            for _ in range(12):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                start.record()
                graph.replay()
                end.record()
                torch.cuda.synchronize()
                samples.append(start.elapsed_time(end) / 5 * 1e3)
        took = float(np.median(samples))
        print(f"{name:18s} {rows:5d} {'torch.compile':12s} {took:8.1f} us", flush=True)
        found.append({"op": name, "rows": rows, "implementation": "torch.compile", "us": took})
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ops", default=",".join(CASES))
    parser.add_argument("--sizes", default="1,64,8192")
    parser.add_argument("--calls", type=int, default=15)
    parser.add_argument(
        "--torch", action="store_true", help="also time torch.compile, where torch is installed"
    )
    options = parser.parse_args()
    if jax.default_backend() != "gpu":
        print("kernels' times are read from a GPU; this machine has none")
        return 1
    names, sizes = options.ops.split(","), [int(size) for size in options.sizes.split(",")]
    rate = copy_bandwidth(2**31)
    print(f"{environment()}\ncopy {rate / 1e12:.2f} TB/s", flush=True)
    rows = []
    for name in names:
        for label, function in implementations(name).items():
            rows += measure(name, label, function, sizes, options, rate)
    if options.torch:
        try:
            rows += torch_times(names, max(sizes))
        except ImportError as missing:
            print(f"no torch here: {missing}")
    finish("pointwise", rows, copy_bytes_per_second=rate)
    return 0


if __name__ == "__main__":
    sys.exit(main())
