"""Time to first token, inter-token latency and tokens per second of the engine, in process.

    python -m benchmarks.serving [--model tiny-sala] [--concurrency 1,8] [--input-len 256] [--output-len 64]
    python -m benchmarks.serving --model full-shape [--layers 32] [--nvfp4]   # random weights, wants a GPU

Before any time is printed, requests that ran together must equal the same requests run alone, token
by token. The limit printed beside the speed is what reading the weights once per step would allow at
the copy bandwidth measured in the same run.
"""

import argparse
import functools
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.common import copy_bandwidth, environment, finish
from hybridjax.benchmarking import offline
from hybridjax.benchmarking.datasets import Item, random_prompts
from hybridjax.benchmarking.statistics import spread
from hybridjax.configs import EngineConfig, MiniCPMSALAConfig
from hybridjax.layers.linear import DenseWeight, Linear
from hybridjax.layers.quantized import NVFP4Weight
from hybridjax.quantization import quantize
from hybridjax.serving import Engine


def quantize_weights(model: nnx.Module) -> None:
    """Rounds all weights of linear layers but the head's to NVFP4, in place."""
    round_to = jax.jit(functools.partial(quantize, rule="static_6"))
    for path, node in list(nnx.iter_graph(model)):
        if not isinstance(node, Linear) or "lm_head" in path:
            continue
        assert isinstance(dense := node.weight, DenseWeight)
        rows, columns = dense.shape
        rounded = round_to(dense.value[...])
        node.weight = weight = NVFP4Weight((rows, columns), axes=dense.axes)
        weight.codes.set_value(rounded.codes)
        weight.scales.set_value(rounded.scales)
        weight.global_scale.set_value(jnp.broadcast_to(rounded.global_scale, (rows,)))


def full_shape(layers: int, nvfp4: bool, fields: dict) -> Engine:
    """An engine around a random MiniCPM-SALA of the released widths."""
    from benchmarks.model_steps import build, stack
    from hybridjax.serving.quantized import prepare
    from hybridjax.serving.runner import ModelRunner
    from hybridjax.serving.sizing import pool_sizes

    config = EngineConfig(model_path="full-shape", **fields)
    model = build(stack(MiniCPMSALAConfig(), layers), jnp.bfloat16)
    if nvfp4:
        quantize_weights(model)
        prepare(config, model)
    return Engine.from_parts(config, ModelRunner(model, config, pool_sizes(config, model)))


class Clocked:
    """Arrival times of one request's tokens, in seconds since submission."""

    def __init__(self):
        self.start = time.perf_counter()
        self.arrivals: list[float] = []
        self.done = threading.Event()

    def __call__(self, event) -> None:
        now = time.perf_counter() - self.start
        self.arrivals += [now] * len(event.token_ids)
        if event.finish_reason is not None:
            self.done.set()


def measure(engine: Engine, concurrency: int, input_len: int, output_len: int, seed: int) -> dict:
    """One wave of ``concurrency`` requests submitted together."""
    batch = items(engine, concurrency, input_len, output_len, seed)
    begin = time.perf_counter()
    clocks = []
    for item in batch:
        clocks.append(Clocked())
        engine.submit(item.prompt, offline.greedy(item.output_len), clocks[-1])
    for clock in clocks:
        clock.done.wait()
    total = time.perf_counter() - begin
    gaps = [(c.arrivals[-1] - c.arrivals[0]) / (len(c.arrivals) - 1) for c in clocks]
    return {
        "first_token": [c.arrivals[0] for c in clocks],
        "inter_token": gaps,
        "tokens_per_second": concurrency * output_len / total,
    }


def items(engine: Engine, count: int, input_len: int, output_len: int, seed: int) -> list[Item]:
    """Random prompts of a wave."""
    drawn = random_prompts(np.random.default_rng(seed), [input_len] * count, engine.info.vocab_size)
    return [Item(prompt, input_len, output_len) for prompt in drawn]


def weight_bytes(engine: Engine) -> int:
    # The engine keeps its parameters to itself; a benchmark may look.
    parameters = engine._loop._runner._parameters  # pyright: ignore[reportAttributeAccessIssue]
    return sum(x.nbytes for x in jax.tree.leaves(parameters))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="tiny-sala")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--concurrency", default="1,8")
    parser.add_argument("--input-len", type=int, default=256)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--waves", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4, help="decode steps per dispatch")
    parser.add_argument("--nvfp4", action="store_true", help="quantised weights, of full-shape")
    parser.add_argument("--deterministic", action="store_true", help="every step in the largest shape")
    args = parser.parse_args()
    if args.nvfp4 and args.model != "full-shape":
        parser.error(f"--nvfp4 rounds the weights of full-shape; {args.model} is as its checkpoint")
    if min(args.waves, args.input_len, args.steps) < 1 or args.output_len < 2:
        parser.error("--waves, --input-len and --steps are at least 1, --output-len at least 2")
    levels = [int(c) for c in args.concurrency.split(",")]

    fields = {
        "max_running_requests": max(levels),
        "num_continuous_decode_steps": args.steps,
        "enable_deterministic_inference": args.deterministic,
        "context_length": -(-(args.input_len + args.output_len) // 64) * 64,
    }
    start = time.perf_counter()
    make = functools.partial(full_shape, args.layers, args.nvfp4) if args.model == "full-shape" else None
    engine = make(fields) if make else Engine(args.model, **fields)
    ready = time.perf_counter() - start
    print(environment())
    print(f"{args.model}: ready after {ready:.1f} s")
    passed, counts = offline.check_passes(
        engine,
        items(engine, max(levels), args.input_len, args.output_len, seed=99),
        deterministic=args.deterministic,
    )
    if not passed:
        return 1

    bandwidth = copy_bandwidth(2**26 if jax.default_backend() == "cpu" else 2**30)
    limit = weight_bytes(engine) / bandwidth
    print(f"copy {bandwidth / 1e9:.0f} GB/s; reading the weights once takes {limit * 1e3:.2f} ms")
    rows = []
    for level in levels:
        waves = [
            measure(engine, level, args.input_len, args.output_len, seed) for seed in range(args.waves + 1)
        ][1:]
        row = {
            "concurrency": level,
            "time_to_first_token": spread([x for w in waves for x in w["first_token"]]),
            "inter_token_latency": spread([x for w in waves for x in w["inter_token"]]),
            "tokens_per_second": spread([w["tokens_per_second"] for w in waves]),
            "limit_inter_token_latency": limit,
        }
        rows.append(row)
        first, gap, speed = row["time_to_first_token"], row["inter_token_latency"], row["tokens_per_second"]
        print(
            f"concurrency {level:3d}: first token {first['median'] * 1e3:8.1f} ms [{first['q1'] * 1e3:.1f}, "
            f"{first['q3'] * 1e3:.1f}], between tokens {gap['median'] * 1e3:7.2f} ms "
            f"({gap['median'] / limit:.1f} x limit), {speed['median']:8.1f} tokens/s",
            flush=True,
        )
    engine.check_integrity()
    engine.shutdown()
    finish("serving", rows, settings=vars(args), ready_seconds=ready, **counts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
