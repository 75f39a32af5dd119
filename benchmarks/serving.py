"""Time to first token, inter-token latency and tokens per second of the engine, in process.

    python -m benchmarks.serving [--model tiny-sala] [--concurrency 1,8] [--input-len 256] [--output-len 64]
    python -m benchmarks.serving --model full-shape [--layers 32]      # random weights, wants a GPU

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

from benchmarks.common import copy_bandwidth, environment, finish, spread
from hybridjax.configs import EngineConfig, MiniCPMSALAConfig
from hybridjax.serving import Engine, SamplingParams


def full_shape(layers: int, fields: dict) -> Engine:
    """An engine around a random MiniCPM-SALA of the released widths."""
    from benchmarks.model_steps import build, stack
    from hybridjax.serving.runner import ModelRunner
    from hybridjax.serving.sizing import pool_sizes

    config = EngineConfig(model_path="full-shape", **fields)
    model = build(stack(MiniCPMSALAConfig(), layers), jnp.bfloat16)
    return Engine.from_parts(config, ModelRunner(model, config, pool_sizes(config, model)))


def prompts(count: int, length: int, vocab: int, seed: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return rng.integers(5, vocab, (count, length)).tolist()


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
    params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True)
    batch = prompts(concurrency, input_len, engine.info.vocab_size, seed)
    begin = time.perf_counter()
    clocks = []
    for prompt in batch:
        clocks.append(Clocked())
        engine.submit(prompt, params, clocks[-1])
    for clock in clocks:
        clock.done.wait()
    total = time.perf_counter() - begin
    gaps = [(c.arrivals[-1] - c.arrivals[0]) / (len(c.arrivals) - 1) for c in clocks]
    return {
        "first_token": [c.arrivals[0] for c in clocks],
        "inter_token": gaps,
        "tokens_per_second": concurrency * output_len / total,
    }


def check(engine: Engine, count: int, input_len: int) -> int:
    """Requests whose tokens differ between running together and running alone."""
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    batch = prompts(count, input_len, engine.info.vocab_size, 99)
    together = engine.generate(batch, params)
    alone = [engine.generate([prompt], params)[0] for prompt in batch]
    return sum(a.token_ids != b.token_ids for a, b in zip(together, alone))


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
    args = parser.parse_args()
    levels = [int(c) for c in args.concurrency.split(",")]

    fields = {
        "max_running_requests": max(levels),
        "num_continuous_decode_steps": args.steps,
        "context_length": -(-(args.input_len + args.output_len) // 64) * 64,
    }
    start = time.perf_counter()
    make = functools.partial(full_shape, args.layers) if args.model == "full-shape" else None
    engine = make(fields) if make else Engine(args.model, **fields)
    ready = time.perf_counter() - start
    print(environment())
    print(f"{args.model}: ready after {ready:.1f} s")
    differing = check(engine, min(8, max(levels)), args.input_len)
    exact = jax.default_backend() == "cpu"
    print(f"check: {differing} of {min(8, max(levels))} requests differ between together and alone")
    if differing and exact:
        print("the check failed; no times are printed")
        return 1

    bandwidth = copy_bandwidth(2**30 if not exact else 2**26)
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
    finish("serving", rows, settings=vars(args), ready_seconds=ready, differing=differing)
    return 0


if __name__ == "__main__":
    sys.exit(main())
