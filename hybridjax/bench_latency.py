"""``python -m hybridjax.bench_latency``: how long one batch takes, in this process and without HTTP."""

import argparse
import dataclasses
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from hybridjax.benchmarking import offline, report
from hybridjax.benchmarking.datasets import Item, random_prompts
from hybridjax.benchmarking.statistics import spread
from hybridjax.configs.flags import add_flags, flag, from_flags
from hybridjax.configs.serving import EngineConfig
from hybridjax.configs.validation import check, positive_int

NAME = "hybridjax.bench_latency"


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatencyBenchConfig(EngineConfig):
    """The engine's flags and those of the batch."""

    batch_size: int = flag(8, "requests that run together")
    input_len: int = flag(256, "prompt tokens of each")
    output_len: int = flag(32, "tokens to generate for each")
    num_iters: int = flag(5, "measured batches")
    warmup_iters: int = flag(1, "batches before the first measured one")
    seed: int = flag(1, "of the prompts")
    output_file: str | None = flag(None, "append the closing JSON line to this file")

    def __post_init__(self):
        super().__post_init__()
        for name in ("batch_size", "input_len", "output_len", "num_iters"):
            positive_int(name, getattr(self, name))
        check(self.warmup_iters >= 0, "warmup_iters", self.warmup_iters, "0 or more")
        check(self.seed >= 0, "seed", self.seed, "0 or more")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark.

    Returns:
      0; 1 if tokens depend on the batch (CPU) or a request fails; 2 if the settings cannot work.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m {NAME}", description="Measures the latency of one batch.", allow_abbrev=False
    )
    add_flags(parser, LatencyBenchConfig)
    namespace = parser.parse_args(argv)
    return offline.command(NAME, lambda: run(from_flags(LatencyBenchConfig, namespace)))


def run(config: LatencyBenchConfig) -> int:
    """Builds the engine, checks it, measures it."""
    from hybridjax.serving import Engine

    report.check_output(config.output_file)
    with Engine.from_config(offline.engine_fields(config)) as engine:
        check(
            config.batch_size <= engine.info.max_running_requests,
            "batch_size",
            config.batch_size,
            f"at most max_running_requests, {engine.info.max_running_requests}",
        )
        rng = np.random.default_rng(config.seed)
        passed, counts = offline.check_passes(engine, _batch(config, engine, rng))
        if not passed:
            return 1
        rows = [_iteration(config, engine, rng) for _ in range(config.warmup_iters + config.num_iters)]
        engine.check_integrity()
    numbers: dict[str, Any] = {
        name: spread([row[name] for row in rows[config.warmup_iters :]]) for name in rows[0]
    }
    for name, value in numbers.items():
        print(f"{name:<24}{value['median']:>12.2f}  [{value['q1']:.2f}, {value['q3']:.2f}]  n {value['n']}")
    record = {
        "benchmark": "latency",
        **offline.device(),
        **counts,
        **numbers,
        "settings": dataclasses.asdict(config),
    }
    print(report.dumps(record), flush=True)
    report.append_json(config.output_file, record)
    return 0


def _batch(config: LatencyBenchConfig, engine: Any, rng: np.random.Generator) -> list[Item]:
    special = engine.tokenizer.special_ids if engine.tokenizer is not None else frozenset()
    lengths = [config.input_len] * config.batch_size
    prompts = random_prompts(rng, lengths, engine.info.vocab_size, special)
    return [Item(prompt, config.input_len, config.output_len) for prompt in prompts]


def _iteration(config: LatencyBenchConfig, engine: Any, rng: np.random.Generator) -> dict[str, float]:
    """Times a batch to its first token, and another one to its end.

    New prompts each time: a prefix cache would otherwise answer with what it remembers.
    """
    first = _seconds(engine, [dataclasses.replace(i, output_len=1) for i in _batch(config, engine, rng)])
    whole = _seconds(engine, _batch(config, engine, rng))
    numbers = {"first_token_ms": first * 1e3, "latency_ms": whole * 1e3}
    if config.output_len > 1:
        numbers["per_output_token_ms"] = (whole - first) * 1e3 / (config.output_len - 1)
    total = config.batch_size * (config.input_len + config.output_len)
    return numbers | {"total_tokens_per_s": total / whole}


def _seconds(engine: Any, items: list[Item]) -> float:
    start = time.perf_counter()
    offline.generate(engine, items)
    return time.perf_counter() - start


if __name__ == "__main__":
    sys.exit(main())
