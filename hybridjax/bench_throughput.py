"""``python -m hybridjax.bench_throughput``: all requests at once, in this process and without HTTP."""

import argparse
import dataclasses
import sys
import time
from collections.abc import Sequence
from typing import Any

from hybridjax.benchmarking import offline, report
from hybridjax.benchmarking.datasets import DatasetConfig, Workload, load_dataset
from hybridjax.benchmarking.statistics import spread
from hybridjax.configs.flags import add_flags, flag, from_flags
from hybridjax.configs.serving import EngineConfig
from hybridjax.configs.validation import check, positive_int
from hybridjax.errors import ConfigError

NAME = "hybridjax.bench_throughput"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ThroughputBenchConfig(EngineConfig):
    """The engine's flags and those of the measurement; the workload's are ``DatasetConfig``."""

    num_iters: int = flag(3, "measured runs of the whole workload, each with prompts of its own seed")
    warmup_iters: int = flag(1, "runs before the first measured one")
    output_file: str | None = flag(None, "append the closing JSON line to this file")

    def __post_init__(self):
        super().__post_init__()
        positive_int("num_iters", self.num_iters)
        check(self.warmup_iters >= 0, "warmup_iters", self.warmup_iters, "0 or more")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark.

    Returns:
      0; 1 if tokens depend on the batch (CPU) or a request fails; 2 if the settings cannot work.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m {NAME}", description="Measures the throughput of the engine.", allow_abbrev=False
    )
    add_flags(parser, ThroughputBenchConfig)
    add_flags(parser, DatasetConfig)
    namespace = parser.parse_args(argv)
    return offline.command(
        NAME,
        lambda: run(from_flags(ThroughputBenchConfig, namespace), from_flags(DatasetConfig, namespace)),
    )


def run(config: ThroughputBenchConfig, dataset: DatasetConfig) -> int:
    """Builds the engine, checks it, measures it."""
    from hybridjax.serving import Engine

    report.check_output(config.output_file)
    with Engine.from_config(offline.engine_fields(config)) as engine:
        workload = _fitting(engine, dataset, 0)
        print(f"{len(workload.items)} requests; left out: {workload.skipped or 'none'}", flush=True)
        passed, counts = offline.check_passes(engine, workload.items)
        if not passed:
            return 1
        runs = [_iteration(engine, dataset, i) for i in range(config.warmup_iters + config.num_iters)]
        engine.check_integrity()
    measured = runs[config.warmup_iters :]
    numbers = {name: spread([row[name] for row in measured]) for name in measured[0]}
    for name, value in numbers.items():
        print(f"{name:<24}{value['median']:>12.2f}  [{value['q1']:.2f}, {value['q3']:.2f}]  n {value['n']}")
    record = {
        "benchmark": "throughput",
        **offline.device(),
        **counts,
        **numbers,
        "skipped": workload.skipped,
        "settings": dataclasses.asdict(config) | dataclasses.asdict(dataset),
    }
    print(report.dumps(record), flush=True)
    report.append_json(config.output_file, record)
    return 0


def _fitting(engine: Any, dataset: DatasetConfig, iteration: int) -> Workload:
    """The workload of one run, without the requests that the context has no room for.

    Random prompts differ from run to run: a prefix cache would otherwise answer from memory. A file's
    prompts stay the same.
    """
    vocab_size = dataset.vocab_size
    if vocab_size is None and engine.tokenizer is None:
        vocab_size = engine.info.vocab_size
    dataset = dataclasses.replace(dataset, seed=dataset.seed + iteration, vocab_size=vocab_size)
    workload = load_dataset(dataset, engine.tokenizer)
    limit = engine.info.context_length
    items = tuple(item for item in workload.items if item.input_len + item.output_len <= limit)
    if not items:
        raise ConfigError(f"no request fits the context length, {limit} tokens")
    left_out = len(workload.items) - len(items)
    skipped = workload.skipped | ({"beyond_context": left_out} if left_out else {})
    return Workload(items, skipped)


def _iteration(engine: Any, dataset: DatasetConfig, iteration: int) -> dict[str, float]:
    items = _fitting(engine, dataset, iteration + 1).items
    start = time.perf_counter()
    results = offline.generate(engine, items)
    seconds = time.perf_counter() - start
    inputs = sum(len(result.prompt_token_ids) for result in results)
    outputs = sum(len(result.token_ids) for result in results)
    return {
        "duration_s": seconds,
        "requests_per_s": len(items) / seconds,
        "output_tokens_per_s": outputs / seconds,
        "total_tokens_per_s": (inputs + outputs) / seconds,
        "input_tokens": inputs,
        "output_tokens": outputs,
    }


if __name__ == "__main__":
    sys.exit(main())
