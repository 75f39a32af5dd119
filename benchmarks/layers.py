"""Times of one linear mixer with its projections as a serving step, and the kernels it consists of.

    python -m benchmarks.layers [--kinds lightning,gdn] [--rows 1,8] [--chunks 2048] [--copies 12]

A program holds several equal layers with weights of their own, one after the other, each adding to its input
as in a model; it is replayed as one CUDA graph. A layer's time is that of a program over its layers, gaps
between kernels and launches of the whole included; beside it stand the number of its kernels and their own
times. The limit: the bytes of its weights, states and convolution inputs over the rate of a large copy in the
same run, or its products over the matmul rate if that is longer. ``lightning`` is that of MiniCPM-SALA,
``gdn`` that of Qwen4Exp, both at the released shapes.
"""

import argparse
import re
import statistics
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from benchmarks.common import copy_bandwidth, environment, finish, matmul_rate
from benchmarks.profile import kernel_times
from benchmarks.qwen4_exp_common import decode_batch, filled, noise, noise_like, prefill_batch, small_config
from hybridjax.batch import Batch, GatedDeltaCache, RecurrentCache
from hybridjax.configs import MiniCPMSALAConfig, Qwen4ExpConfig
from hybridjax.layers import GatedDeltaNet, LightningAttention
from hybridjax.ops.dispatch import OPS, override

# XLA's own fusions around the recurrences.
FUSIONS = "lightning_decode=xla," + ",".join(
    f"{op}=reference"
    for op in (
        "lightning_rows",
        "lightning_output",
        "gated_delta_inputs",
        "gated_delta_output",
        "gated_delta_net_decode",
    )
)


class Stack:
    """Equal layers of one kind, their caches, and the program over them."""

    def __init__(self, kind: str, copies: int, slots: int, dtype: Any, smoke: bool):
        self.kind, self.copies, self.dtype = kind, copies, jnp.dtype(dtype)
        shared: Any = {"init": nnx.initializers.zeros, "dtype": self.dtype}
        if kind == "gdn":
            gdn = small_config() if smoke else Qwen4ExpConfig()
            heads, self.hidden = gdn.linear_num_value_heads, gdn.hidden_size
            sizes = gdn.linear_key_head_dim, gdn.linear_value_head_dim
            channels = 2 * gdn.linear_num_key_heads * sizes[0] + heads * sizes[1]
            taps = gdn.linear_conv_kernel_dim - 1
            layers = [
                filled(lambda: GatedDeltaNet(gdn, **shared, rngs=nnx.Rngs(0)), i) for i in range(copies)
            ]
            states: Any = jax.ShapeDtypeStruct((slots, heads, *sizes), jnp.float32)
            conv: Any = jax.ShapeDtypeStruct((slots, taps, channels), self.dtype)
            cache = GatedDeltaCache(states, conv)
            self.convolved = 2 * taps * channels * self.dtype.itemsize
        else:
            sala = MiniCPMSALAConfig()
            heads, self.hidden = sala.lightning_nh, sala.hidden_size
            sizes = sala.lightning_head_dim, sala.lightning_head_dim
            layers = [
                # Its vectors are weights of norms.
                filled(lambda: LightningAttention(sala, **shared, rngs=nnx.Rngs(0)), i, vector=lambda _: 1.0)
                for i in range(copies)
            ]
            states = jax.ShapeDtypeStruct((slots, heads, *sizes), jnp.float32)
            cache = RecurrentCache(states)
            self.convolved = 0
        self.states = 2 * 4 * heads * sizes[0] * sizes[1]
        split = [nnx.split(layer) for layer in layers]
        self.graph, self.parameters = split[0][0], [parameters for _, parameters in split]
        self.caches = [noise_like(cache, 0.1, 7 + i) for i in range(copies)]

    def batch(self, mode: str, rows: int) -> Batch:
        return decode_batch(rows, 64, 2**20) if mode == "decode" else prefill_batch(rows, 0, 2**20)

    def input(self, rows: int) -> jax.Array:
        return noise((rows, self.hidden), self.dtype, 1.0, 3)

    def run(self, parameters: list, caches: list, x: jax.Array, batch: Batch) -> tuple[jax.Array, list]:
        after = []
        for mine, cache in zip(parameters, caches):
            y, cache = nnx.merge(self.graph, mine)(x, batch, cache)
            x = (x + y).astype(x.dtype)
            after.append(cache)
        return x, after

    def compiled(self, mode: str, rows: int, copies: int, forced: str | None = None):
        program = jax.jit(self.run, donate_argnums=1)
        with override(forced):
            return program.lower(
                self.parameters[:copies], self.caches[:copies], self.input(rows), self.batch(mode, rows)
            ).compile()

    def limit(self, mode: str, rows: int, bandwidth: float, rate: float) -> tuple[float, float]:
        """Bytes that a layer must move, and the seconds that it needs at least."""
        leaves = jax.tree.leaves(self.parameters[0])
        sequences = rows if mode == "decode" else 1
        moved = sum(x.nbytes for x in leaves) + sequences * (self.states + self.convolved)
        products = 2 * rows * sum(x.size for x in leaves if x.ndim == 2)
        return moved, max(moved / bandwidth, products / rate)

    def error(self, mode: str, rows: int, forced: str | None) -> float:
        """Relative distance of what one layer adds from the definitions, on equal caches."""
        x, batch = self.input(rows), self.batch(mode, rows)
        added = []
        for spec in (",".join(f"{op}=reference" for op in OPS), forced):
            caches = jax.tree.map(jnp.copy, self.caches[:1])
            out, _ = self.compiled(mode, rows, 1, spec)(self.parameters[:1], caches, x, batch)
            added.append((out - x).astype(jnp.float32))
        return float(jnp.linalg.norm(added[1] - added[0]) / jnp.linalg.norm(added[0]))


def measure(stack: Stack, mode: str, rows: int, forced: str | None, rates: tuple, repeats: int) -> dict:
    """Times one program, prints its lines and returns its row."""
    x, batch, copies = stack.input(rows), stack.batch(mode, rows), stack.copies
    program = stack.compiled(mode, rows, copies, forced)

    def launch() -> jax.Array:
        out, stack.caches = program(stack.parameters, stack.caches, x, batch)
        return out

    jax.block_until_ready([launch() for _ in range(3)])
    samples = []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(6):
            out = launch()
        jax.block_until_ready(out)
        samples.append((time.perf_counter() - start) / 6 / copies)
    took = statistics.median(samples)
    moved, limit = stack.limit(mode, rows, *rates)
    found = kernel_times(lambda: jax.block_until_ready(launch()))
    own = sum(seconds for seconds, _ in found.values()) / copies
    count = sum(number for _, number in found.values()) / copies
    name = f"{stack.kind:10s} {mode:7s} rows {rows:4d}" + (", XLA" if forced else "")
    print(
        f"{name}: {took * 1e6:8.1f} us a layer "
        f"({count:.1f} kernels, {own * 1e6:.1f} us in them), limit {limit * 1e6:7.1f} us "
        f"({moved / 1e6:.0f} MB), {took / limit:.2f} x",
        flush=True,
    )
    # Equal kernels of other layers differ by a number at the end of their names.
    kinds: dict[str, list[float]] = {}
    for name, (seconds, number) in found.items():
        sums = kinds.setdefault(re.sub(r"[_.]?\d+$", "", name), [0.0, 0.0])
        sums[0] += seconds
        sums[1] += number
    for name, (seconds, number) in sorted(kinds.items(), key=lambda item: -item[1][0]):
        print(f"    {seconds / copies * 1e6:8.1f} us {number / copies:5.2f} x {name[:90]}", flush=True)
    return {
        "kind": stack.kind,
        "mode": mode,
        "rows": rows,
        "forced": forced,
        "seconds": took,
        "bytes": moved,
        "limit_seconds": limit,
        "times_limit": took / limit,
        "kernels": count,
        "kernel_seconds": own,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kinds", default="lightning,gdn")
    parser.add_argument("--rows", default="1,8", help="of decode steps")
    parser.add_argument("--chunks", default="2048", help="tokens of prefills; may be empty")
    parser.add_argument("--copies", type=int, default=12)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument(
        "--compare", action="store_true", help="also with XLA's fusions around the recurrences"
    )
    parser.add_argument("--smoke", action="store_true", help="small shapes of gdn, for any machine")
    options = parser.parse_args()
    large = jax.default_backend() != "cpu"
    dtype = jnp.bfloat16 if large else jnp.float32
    rows, chunks = ([int(x) for x in text.split(",") if x] for text in (options.rows, options.chunks))
    rates = copy_bandwidth(2**31 if large else 2**24), matmul_rate(8192 if large else 512, dtype)
    print(
        f"{environment()}\ncopy {rates[0] / 1e12:.2f} TB/s, matmul {rates[1] / 1e12:.0f} TFLOP/s", flush=True
    )
    out, errors = [], {}
    for kind in options.kinds.split(","):
        stack = Stack(kind, options.copies, max(rows, default=1) + 2, dtype, options.smoke)
        for mode, sizes in (("decode", rows), ("prefill", chunks)):
            for forced in [None, FUSIONS] if options.compare else [None]:
                if not sizes:
                    continue
                label = f"{kind} {mode}" + (", XLA" if forced else "")
                wrong = errors[label] = stack.error(mode, min(sizes[-1], 64), forced)
                print(f"{label}: relative error against the definitions {wrong:.1e}", flush=True)
                if wrong < 0.02:
                    out += [measure(stack, mode, n, forced, rates, options.repeats) for n in sizes]
    finish("layers", out, errors=errors, copy_bytes_per_second=rates[0], matmul_flops=rates[1])
    return 0 if all(error < 0.02 for error in errors.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
