"""Long prompts: what a cached prefix saves, what a long prefill costs others, and what memory it takes.

    python -m benchmarks.long_context [--model tiny-sala] [--length 32768] [--only hit,latency,memory]
    python -m benchmarks.long_context --model full-shape --length 131072 --only memory   # wants a GPU

- hit: time to first token of a prompt that is known but for its last tokens, against that of the unknown one.
- latency: seconds per token of a decoding request while a long prompt is computed, against those when alone.
- memory: prompts of that length and some tokens behind each; peak memory before and after each (two at most).

The bundled models were trained for a context of 4,096 tokens; beyond it only times mean anything. Before a
time is printed, the tokens of both ways are compared. What models find in a long text: benchmarks/needle.py.
"""

import argparse
import dataclasses
import resource
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.common import environment, finish
from hybridjax.benchmarking.statistics import spread
from hybridjax.checkpoints import load_model, resolve
from hybridjax.configs import EngineConfig, MiniCPMSALAConfig
from hybridjax.serving import Engine, SamplingParams
from hybridjax.serving.runner import ModelRunner
from hybridjax.serving.sizing import pool_sizes


def make_engine(
    name: str, length: int, layers: int, share: float, *, deterministic: bool = False
) -> tuple[Engine, int]:
    """An engine for prompts of this length, whatever length the model was trained for.

    deterministic: all steps have the largest shape, so there are two programs to compile.

    Returns:
      the engine, and the bytes of its weights and state pools.
    """
    config = EngineConfig(
        model_path=name,
        context_length=length,
        max_running_requests=2,
        max_total_tokens=2 * length,
        max_prefill_share=share,
        num_continuous_decode_steps=4,
        enable_deterministic_inference=deterministic,
    )
    if name == "full-shape":
        from benchmarks.model_steps import build, stack

        model = build(stack(MiniCPMSALAConfig(), layers), jnp.bfloat16)
    else:
        model = load_model(resolve(name), "float32" if jax.default_backend() == "cpu" else "bfloat16")
        longest = max(length, model.config.max_position_embeddings)
        model.config = dataclasses.replace(model.config, max_position_embeddings=longest)
    sizes = pool_sizes(config, model)
    print(sizes.summary, flush=True)
    weights = sum(x.nbytes for x in jax.tree.leaves(nnx.state(model, nnx.Param)))
    pools = sizes.num_slots * sizes.bytes_per_request
    pools += int(sizes.num_pages * sizes.page_size * sizes.bytes_per_token)
    return Engine.from_parts(config, ModelRunner(model, config, sizes)), weights + pools


class Clocked:
    """Arrival times and tokens of one request."""

    def __init__(self, engine: Engine, prompt: np.ndarray, count: int):
        self.arrivals: list[float] = []
        self.tokens: list[int] = []
        self.cached = 0
        self.done = threading.Event()
        self.start = time.perf_counter()
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        engine.submit(prompt, params, self)

    def __call__(self, event) -> None:
        now = time.perf_counter()
        self.arrivals += [now] * len(event.token_ids)
        self.tokens += event.token_ids
        self.cached = event.cached_tokens
        if event.finish_reason is not None:
            self.done.set()

    def wait(self) -> "Clocked":
        assert self.done.wait(3600), "no answer within an hour"
        return self

    @property
    def first(self) -> float:
        return self.arrivals[0] - self.start


def text(engine: Engine, length: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(4, engine.info.vocab_size - 16, length).astype(np.int32)


def peak_bytes() -> int:
    stats = jax.local_devices()[0].memory_stats() if jax.default_backend() != "cpu" else None
    if stats:
        return stats["peak_bytes_in_use"]
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def hit(engine: Engine, length: int, repeats: int) -> dict:
    prompt = text(engine, length - 32, 0)
    cold, warm, tokens = [], [], []
    for _ in range(repeats):
        engine.flush_cache()
        one = Clocked(engine, prompt, 16).wait()
        two = Clocked(engine, prompt, 16).wait()
        assert one.cached == 0 and two.cached > length - 200, (one.cached, two.cached)
        cold.append(one.first)
        warm.append(two.first)
        tokens += [one.tokens, two.tokens]
    if any(t != tokens[0] for t in tokens):
        raise SystemExit("a cached prefix changed the tokens")
    row = {"cold": spread(cold), "warm": spread(warm), "cached_tokens": two.cached}
    row["ratio"] = row["cold"]["median"] / row["warm"]["median"]
    print(
        f"prompt of {len(prompt)}: first token after {row['cold']['median'] * 1e3:.0f} ms, known "
        f"{row['warm']['median'] * 1e3:.1f} ms: {row['ratio']:.1f} x (must: 10)",
        flush=True,
    )
    return row


def latency(engine: Engine, length: int, count: int) -> dict:
    short, long = text(engine, 100, 1), text(engine, length - 32, 2)
    engine.flush_cache()
    Clocked(engine, short, 8).wait()
    alone = Clocked(engine, short, count).wait()
    Clocked(engine, long, 1).wait()  # shapes and paces are known from here on
    engine.flush_cache()
    decoding = Clocked(engine, short, 20 * count)
    while len(decoding.arrivals) < 8:
        time.sleep(0.001)
    prefill = Clocked(engine, long, 1)
    prefill.wait()
    until = prefill.arrivals[0]
    engine.flush_cache()
    idle = Clocked(engine, long, 1).wait()
    decoding.wait()
    if decoding.tokens[:count] != alone.tokens:
        raise SystemExit("a prefill changed the tokens of a decoding request")
    busy = [t for t in decoding.arrivals if prefill.start <= t <= until]
    row = {
        "alone": (alone.arrivals[-1] - alone.arrivals[0]) / (count - 1),
        "busy": (busy[-1] - busy[0]) / (len(busy) - 1),
        "longest_gap": float(np.diff(busy).max()),
        "tokens_meanwhile": len(busy),
        "first_token_busy": prefill.first,
        "first_token_idle": idle.first,
    }
    row["ratio"] = row["busy"] / row["alone"]
    print(
        f"decoding alone {row['alone'] * 1e3:.2f} ms a token, while {len(long)} tokens are computed "
        f"{row['busy'] * 1e3:.2f} ms: {row['ratio']:.2f} x (must: 2), longest gap "
        f"{row['longest_gap'] * 1e3:.1f} ms over {len(busy)} tokens; the prompt took {prefill.first:.2f} s, "
        f"{idle.first:.2f} s alone",
        flush=True,
    )
    return row


def memory(engine: Engine, known: int, length: int, prompts: int) -> dict:
    peaks = [peak_bytes()]
    seconds = []
    for seed in range(3, 3 + prompts):
        one = Clocked(engine, text(engine, length - 32, seed), 16).wait()
        assert len(one.tokens) == 16
        seconds.append(one.first)
        peaks.append(peak_bytes())
        engine.check_integrity()
    print(
        f"prompt of {length - 32}: {', '.join(f'{s:.1f}' for s in seconds)} s; peak memory "
        + ", ".join(f"{p / 2**30:.2f} GiB" for p in peaks)
        + f" before and after each, of which weights and state pools {known / 2**30:.2f} GiB",
        flush=True,
    )
    return {"seconds": seconds, "peak_bytes": peaks, "weights_and_pools_bytes": known}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="tiny-sala")
    parser.add_argument("--layers", type=int, default=32, help="of full-shape")
    parser.add_argument("--length", type=int, default=32768)
    parser.add_argument("--only", default="hit,latency,memory")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--max-prefill-share", type=float, default=EngineConfig.max_prefill_share)
    parser.add_argument("--deterministic", action="store_true", help="every step in the largest shape")
    args = parser.parse_args()
    print(environment(), flush=True)
    out: dict = {}
    engine, known = make_engine(
        args.model, args.length, args.layers, args.max_prefill_share, deterministic=args.deterministic
    )
    with engine:
        parts = args.only.split(",")
        if "hit" in parts:
            out["hit"] = hit(engine, args.length, args.repeats)
        if "latency" in parts:
            out["latency"] = latency(engine, args.length, args.tokens)
        if "memory" in parts:
            out["memory"] = memory(engine, known, args.length, min(2, args.repeats))
    finish("long_context", [out], model=args.model, length=args.length)
    return 0


if __name__ == "__main__":
    sys.exit(main())
