"""From outcomes to numbers, and from numbers to a table."""

import collections
import importlib.metadata
import json
import math
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hybridjax.benchmarking.load import Outcome
from hybridjax.benchmarking.statistics import PERCENTILES, meets, summarize
from hybridjax.errors import ConfigError

LABELS = {"ttft": "Time to first token", "tpot": "Time per output token", "itl": "Inter-token latency"}
LABELS |= {"e2e": "End-to-end latency"}
MAX_ERRORS = 10


def environment(*packages: str) -> dict[str, Any]:
    """Host, Python and versions, and how busy the machine is."""
    return {
        "host": platform.processor() or platform.machine(),
        "cpu_count": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        **{name: _version(name) for name in ("hybridjax", *packages)},
    }


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def measure(
    outcomes: Sequence[Outcome],
    duration: float,
    goodput: dict[str, float],
    percentiles: Sequence[float] = PERCENTILES,
) -> dict[str, Any]:
    """The numbers of a run. Only successful requests count, except that failed ones are never good."""
    done = [o for o in outcomes if o.error is None]
    inputs, outputs = sum(o.input_len for o in done), sum(o.output_len for o in done)
    ends = [o.latencies for o in done]
    numbers: dict[str, Any] = {
        "successful": len(done),
        "failed": len(outcomes) - len(done),
        "duration_s": duration,
        "input_tokens": inputs,
        "output_tokens": outputs,
        "request_throughput": len(done) / duration,
        "input_throughput": inputs / duration,
        "output_throughput": outputs / duration,
        "total_throughput": (inputs + outputs) / duration,
        "concurrency": sum(x.e2e for x in ends) / duration,
        "ttft_ms": summarize([x.ttft for x in ends if x.ttft is not None], percentiles),
        "tpot_ms": summarize([x.tpot for x in ends if x.tpot is not None], percentiles),
        "itl_ms": summarize([gap for x in ends for gap in x.itl], percentiles),
        "e2e_ms": summarize([x.e2e for x in ends], percentiles),
        "send_delay_ms": summarize([o.late for o in done], percentiles),
        "itl_unit": "token" if all(o.itl_per_token for o in done) else "chunk",
        "tokens_counted_by": dict(collections.Counter(o.counted_by for o in done)),
        "errors": dict(collections.Counter(o.error for o in outcomes if o.error is not None).most_common()),
    }
    if goodput:
        good = sum(meets(x, goodput) for x in ends)
        numbers["goodput_limits_ms"] = goodput
        numbers["goodput_share"] = good / len(outcomes)
        numbers["goodput_throughput"] = good / duration
    return numbers


def table(numbers: dict[str, Any]) -> str:
    """The numbers for people."""
    lines = ["============ Serving benchmark ============"]

    def add(label: str, value: float, digits: int = 2) -> None:
        lines.append(f"{label + ':':<40}{value:>12.{digits}f}" if digits else f"{label + ':':<40}{value:>12}")

    add("Successful requests", numbers["successful"], 0)
    add("Failed requests", numbers["failed"], 0)
    add("Duration (s)", numbers["duration_s"])
    add("Total input tokens", numbers["input_tokens"], 0)
    add("Total output tokens", numbers["output_tokens"], 0)
    add("Request throughput (req/s)", numbers["request_throughput"])
    add("Input token throughput (tok/s)", numbers["input_throughput"])
    add("Output token throughput (tok/s)", numbers["output_throughput"])
    add("Total token throughput (tok/s)", numbers["total_throughput"])
    add("Concurrency", numbers["concurrency"])
    if "goodput_share" in numbers:
        add("Good requests (%)", 100 * numbers["goodput_share"])
        add("Goodput (req/s)", numbers["goodput_throughput"])
    columns = [name for name in numbers["e2e_ms"] or ("mean", "median") if name not in ("std", "max")]
    lines.append(f"{'Milliseconds':<26}" + "".join(f"{c:>11}" for c in columns))
    for name, label in LABELS.items():
        summary = numbers[name + "_ms"]
        if name == "itl" and numbers["itl_unit"] == "chunk":
            label = "Inter-chunk latency"
        cells = [f"{summary[c]:11.2f}" if summary else f"{'n/a':>11}" for c in columns]
        lines.append(f"{label:<26}" + "".join(cells))
    errors = list(numbers["errors"].items())
    lines += [f"error ({count} x): {message}" for message, count in errors[:MAX_ERRORS]]
    if len(errors) > MAX_ERRORS:
        lines.append(f"and {len(errors) - MAX_ERRORS} other errors; the JSON line has them all")
    return "\n".join(lines)


def details(outcomes: Sequence[Outcome]) -> dict[str, list[Any]]:
    """Every request's own numbers, times in seconds, for --output-details."""
    return {
        "input_lens": [o.input_len for o in outcomes],
        "output_lens": [o.output_len for o in outcomes],
        "ttfts": [o.latencies.ttft for o in outcomes],
        "itls": [list(o.latencies.itl) for o in outcomes],
        "e2es": [o.latencies.e2e for o in outcomes],
        "errors_by_request": [o.error for o in outcomes],
        "generated_texts": [o.text for o in outcomes],
    }


def check_output(path: str | None) -> None:
    """Raises ConfigError now if the results could not be written at the end."""
    if path is not None:
        _append(path, "")


def append_json(path: str | None, record: dict[str, Any]) -> None:
    """Appends one line to a JSON Lines file; without a path, nothing."""
    if path is not None:
        _append(path, dumps(record) + "\n")


def _append(path: str, text: str) -> None:
    try:
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise ConfigError(f"output_file: cannot write {path}: {error}") from error


def dumps(record: dict[str, Any]) -> str:
    """One line of JSON, in ASCII as generated text may hold other ends of lines; inf becomes the word."""
    return json.dumps({name: _finite(value) for name, value in record.items()}, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(entry) for name, entry in value.items()}
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
