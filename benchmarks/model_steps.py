"""Times of prefill and decode steps of a MiniCPM-SALA stack at the released shapes, random weights.

    python -m benchmarks.model_steps [--layers 32] [--contexts 1024,32768] [--rows 1,8,64]

The limits are measured in the same run: a decode step must at least read the weights, the selected K/V
blocks and read and write the recurrent states (bytes over copy bandwidth); a prefill chunk must at
least do its matrix products (operations over the matmul rate).
"""

import argparse
import dataclasses
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.common import copy_bandwidth, environment, finish, matmul_rate
from benchmarks.qwen4_exp_common import filled
from hybridjax.batch import TILE, Batch, Mode
from hybridjax.benchmarking.statistics import spread
from hybridjax.configs import EngineConfig, MiniCPMSALAConfig
from hybridjax.configs.minicpm_sala import SPARSE
from hybridjax.models.minicpm_sala import MiniCPMSALA
from hybridjax.serving.api import SamplingParams
from hybridjax.serving.plan import DecodePlan, DecodeRow, PrefillPlan, PrefillRow
from hybridjax.serving.request import Request
from hybridjax.serving.runner import ModelRunner
from hybridjax.serving.sizing import PoolSizes


def stack(config: MiniCPMSALAConfig, layers: int) -> MiniCPMSALAConfig:
    """The first ``layers`` layers."""
    kept = config.mixer_types[:layers]
    return dataclasses.replace(config, num_hidden_layers=layers, mixer_types=kept)


def build(config: MiniCPMSALAConfig, dtype) -> MiniCPMSALA:
    """A model of random matrices; its vectors are weights of norms."""
    return filled(lambda: MiniCPMSALA(config, dtype=dtype, rngs=nnx.Rngs(0)), 0, vector=lambda _: 1.0)


def check(config: MiniCPMSALAConfig) -> float:
    """Largest relative error of cached prefill + decode against the teacher-forced call, float32."""
    model = build(dataclasses.replace(stack(config, 10), vocab_size=1024, eos_token_id=(2,)), jnp.float32)
    length, cut = 320, 256
    ids = np.random.default_rng(0).integers(0, 1024, (1, length)).astype(np.int32)
    wanted = np.asarray(jax.jit(lambda m, x: m(x))(model, ids)[0])
    state = model.init_state(length // TILE + 2, 2)
    table = jnp.arange(1, length // TILE + 1, dtype=jnp.int32)[None]
    forward = nnx.jit(lambda m, b, s: _logits(m, b, s))
    got = []
    pieces = [(0, 128), (128, cut)] + [(i, i + 1) for i in range(cut, length)]
    for start, end in pieces:
        n = end - start
        batch = Batch(
            tokens=jnp.asarray(ids[0, start:end]),
            positions=jnp.arange(start, end, dtype=jnp.int32),
            tile_sequence=jnp.zeros((n // TILE,), jnp.int32),
            context_length=jnp.array([end], jnp.int32),
            slot=jnp.ones((1,), jnp.int32),
            page_table=table,
            logit_rows=jnp.zeros((1,), jnp.int32),
            mode=Mode.PREFILL if n > 1 else Mode.DECODE,
        )
        logits, state = forward(model, batch, state)
        got.append(np.asarray(logits))
    got = np.concatenate(got)
    return float((np.linalg.norm(got - wanted, axis=1) / np.linalg.norm(wanted, axis=1)).max())


def _logits(model, batch, state):
    hidden, state = model.forward(batch, state)
    return model.logits(hidden), state


def request(slot: int, pages: list[int], length: int, new: int) -> Request:
    ids = np.random.default_rng(slot).integers(3, 1000, length).astype(np.int32)
    params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
    made = Request(str(slot), ids, params, new, 0)
    made.slot, made.pages = slot, pages
    return made


def decode_limit(config: MiniCPMSALAConfig, weights: int, rows: int, context: int) -> int:
    """Bytes that one decode step must move."""
    sparse = sum(kind == SPARSE for kind in config.mixer_types)
    linear = config.num_hidden_layers - sparse
    blocks = min(-(-context // 64), config.sparse_config.selected_blocks)
    if context < config.sparse_config.dense_len:
        blocks = -(-context // 64)
    row = 2 * config.num_key_value_heads * config.head_dim * 2
    kv = rows * sparse * blocks * 64 * row
    compressed = 0
    if context >= config.sparse_config.dense_len:
        compressed = rows * sparse * (context // 16 + context // 64) * row // 2
    state = 2 * rows * linear * config.lightning_nh * config.lightning_head_dim**2 * 4
    return weights + kv + compressed + state


def run_decode(runner: ModelRunner, rows: int, context: int, steps: int, repeats: int) -> dict:
    pages = -(-(context + steps * (repeats + 3)) // 64)
    reqs = [
        request(i + 1, list(range(1 + i * pages, 1 + (i + 1) * pages)), context, steps * (repeats + 3))
        for i in range(rows)
    ]
    position, samples = context, []
    for i in range(repeats + 2):
        start = time.perf_counter()
        plan = DecodePlan(tuple(DecodeRow(r, position, steps) for r in reqs), steps)
        runner.read(runner.launch(plan))
        if i >= 2:
            samples.append((time.perf_counter() - start) / steps)
        position += steps
    return spread(samples)


def run_prefill(runner: ModelRunner, start: int, chunk: int, repeats: int) -> dict:
    made = request(1, list(range(1, 1 + (start + chunk) // 64)), start + chunk, 1)
    samples = []
    for i in range(repeats + 1):
        begin = time.perf_counter()
        runner.read(runner.launch(PrefillPlan((PrefillRow(made, start, start + chunk, True),))))
        if i:
            samples.append(time.perf_counter() - begin)
    return spread(samples)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--contexts", default="1024,32768")
    parser.add_argument("--rows", default="1,8,64")
    parser.add_argument("--chunk", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=12)
    args = parser.parse_args()
    contexts = [int(c) for c in args.contexts.split(",")]
    row_counts = [int(r) for r in args.rows.split(",")]
    full = MiniCPMSALAConfig()

    error = check(full)
    print(f"cached against teacher-forced, float32: largest relative error {error:.2e}")
    if not error < 2e-4:
        print("the check failed; no times are printed")
        return 1

    bandwidth, rate = copy_bandwidth(2**30), matmul_rate(8192, jnp.bfloat16)
    print(f"{environment()}\ncopy {bandwidth / 1e12:.2f} TB/s, bf16 matmul {rate / 1e12:.0f} TFLOP/s")
    config = stack(full, args.layers)
    model = build(config, jnp.bfloat16)
    weights = sum(x.nbytes for x in jax.tree.leaves(nnx.state(model, nnx.Param)))
    longest = max(contexts)
    pages_each = -(-(longest + args.steps * (args.repeats + 3)) // 64)
    total = max(max(row_counts) * (-(-(min(contexts) + 1024) // 64)), 8 * pages_each) + 1
    sizes = PoolSizes(total, 64, max(row_counts) + 1, max(row_counts), pages_each * 64, 0, 0)
    engine = EngineConfig(
        chunked_prefill_size=args.chunk,
        skip_server_warmup=True,
        num_continuous_decode_steps=args.steps,
    )
    runner = ModelRunner(model, engine, sizes)
    rows = []
    for count in row_counts:
        for context in contexts:
            if count * pages_each > total and context == longest:
                continue
            start = time.perf_counter()
            took = run_decode(runner, count, context, args.steps, args.repeats)
            limit = decode_limit(config, weights, count, context) / bandwidth
            row = {
                "step": "decode",
                "rows": count,
                "context": context,
                "seconds": took,
                "limit_seconds": limit,
                "times_limit": took["median"] / limit,
                "with_compile_seconds": time.perf_counter() - start,
            }
            rows.append(row)
            print(
                f"decode rows {count:3d} context {context:6d}: {took['median'] * 1e3:8.2f} ms "
                f"[{took['q1'] * 1e3:.2f}, {took['q3'] * 1e3:.2f}], limit {limit * 1e3:.2f} ms, "
                f"{row['times_limit']:.1f} x; with compiling {row['with_compile_seconds']:.0f} s",
                flush=True,
            )
    matrices = sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param)) if x.ndim == 2)
    matrices -= 2 * config.vocab_size * config.hidden_size
    for start in [0] + [c - args.chunk for c in contexts if c > args.chunk]:
        took = run_prefill(runner, start, args.chunk, 4)
        limit = 2 * matrices * args.chunk / rate
        row = {
            "step": "prefill",
            "start": start,
            "chunk": args.chunk,
            "seconds": took,
            "limit_seconds": limit,
            "tokens_per_second": args.chunk / took["median"],
        }
        rows.append(row)
        print(
            f"prefill {args.chunk} tokens after {start:6d}: {took['median'] * 1e3:8.1f} ms, "
            f"limit {limit * 1e3:.1f} ms, {row['tokens_per_second']:.0f} tokens/s",
            flush=True,
        )
    finish("model_steps", rows, check_error=error, copy_bytes_per_second=bandwidth, matmul_flops=rate)
    return 0


if __name__ == "__main__":
    sys.exit(main())
