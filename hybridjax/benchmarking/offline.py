"""What the two benchmarks inside one process share: the check that comes before any speed, and the end."""

import dataclasses
import sys
from collections.abc import Callable, Sequence
from typing import Any

from hybridjax.benchmarking import report
from hybridjax.benchmarking.datasets import Item
from hybridjax.configs.serving import EngineConfig
from hybridjax.errors import HybridJaxError
from hybridjax.serving.api import GenerationResult, SamplingParams

CHECKED_REQUESTS = 8
CHECKED_TOKENS = 24


class FailedRequestError(HybridJaxError):
    """The engine gave up on a request."""


def greedy(output_len: int) -> SamplingParams:
    """Exactly ``output_len`` most likely tokens."""
    return SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)


def generate(engine: Any, items: Sequence[Item]) -> list[GenerationResult]:
    """Runs the items together; raises FailedRequestError unless each got the tokens it asked for."""
    results = engine.generate([item.prompt for item in items], [greedy(item.output_len) for item in items])
    for item, result in zip(items, results):
        if result.finish_reason != "length" or len(result.token_ids) != item.output_len:
            got = f"{len(result.token_ids)} of {item.output_len} tokens, {result.finish_reason}"
            raise FailedRequestError(f"a request ended early ({got})")
    return results


def count_differing(engine: Any, items: Sequence[Item]) -> tuple[int, int]:
    """Runs as many items together as the engine takes, and some of them alone.

    Returns:
      How many of those run alone gave other tokens, and how many were run alone.
    """
    batch = [
        dataclasses.replace(item, output_len=min(item.output_len, CHECKED_TOKENS))
        for item in items[: engine.info.max_running_requests]
    ]
    together = generate(engine, batch)
    step = -(-len(batch) // CHECKED_REQUESTS)
    pairs = [(r, generate(engine, [item])[0]) for r, item in zip(together[::step], batch[::step])]
    return sum(a.token_ids != b.token_ids for a, b in pairs), len(pairs)


def check_passes(
    engine: Any, items: Sequence[Item], *, deterministic: bool = False
) -> tuple[bool, dict[str, int]]:
    """Whether speeds may be shown, and the counts that go with them.

    On a CPU, or where inference is ``deterministic``, no request may differ. Elsewhere the shape of a batch
    may choose another kernel, whose rounding can tip a greedy choice, so differences are reported beside the
    speeds.
    """
    import jax

    differing, checked = count_differing(engine, items)
    print(f"check: {differing} of {checked} requests differ between together and alone", flush=True)
    passed = not differing or not (deterministic or jax.default_backend() == "cpu")
    if not passed:
        print("the check failed; no speeds are shown", flush=True)
    return passed, {"checked": checked, "differing": differing}


def device() -> dict[str, Any]:
    """The accelerator and the versions that matter for its speed."""
    import jax

    first = jax.devices()[0]
    found = {"device": first.device_kind, "platform": first.platform, "devices": jax.device_count()}
    return found | report.environment("jax", "jaxlib", "flax", "numpy")


def engine_fields(config: EngineConfig) -> EngineConfig:
    """The engine's part of a configuration that extends it."""
    return EngineConfig(**{f.name: getattr(config, f.name) for f in dataclasses.fields(EngineConfig)})


def command(name: str, run: Callable[[], int]) -> int:
    """Runs a command; its own errors become a line on stderr and the exit status 2."""
    try:
        return run()
    except FailedRequestError as error:
        print(f"{name}: error: {error}", file=sys.stderr)
        return 1
    except HybridJaxError as error:
        print(f"{name}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
