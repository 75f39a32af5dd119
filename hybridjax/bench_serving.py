"""``python -m hybridjax.bench_serving``: sends load to a running server and reports how it fared.

Works with hybridjax, any other server with OpenAI's completions or chat completions, and SGLang's
native interface. Needs httpx, which the server itself does not: ``pip install httpx``.
"""

import argparse
import asyncio
import dataclasses
import functools
import json
import math
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from hybridjax.benchmarking import report
from hybridjax.benchmarking.datasets import DatasetConfig, Workload, as_text, load_dataset
from hybridjax.benchmarking.load import Client, Outcome, check_target, import_httpx, run_load, warmup_item
from hybridjax.benchmarking.protocols import ALIASES, PATHS, AnswerError, logprob_fields
from hybridjax.benchmarking.statistics import arrival_times, parse_goodput, parse_percentiles
from hybridjax.configs.flags import add_flags, flag, from_flags
from hybridjax.configs.validation import check, positive_int
from hybridjax.errors import ConfigError, HybridJaxError


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServingBenchConfig(DatasetConfig):
    """The workload's flags and those of the load; names follow SGLang's benchmark."""

    backend: str = flag("hybridjax", "interface to use", choices=[*PATHS, *ALIASES])
    base_url: str | None = flag(None, "server, e.g. http://127.0.0.1:30000 (default: from host and port)")
    host: str = flag("127.0.0.1", "server's address")
    port: int = flag(30000, "server's port")
    allow_remote: bool = flag(False, "allow a server on another machine")
    model: str | None = flag(None, "model to ask for (default: the first in /v1/models)")
    served_model_name: str | None = flag(None, "its name in requests, if that is not --model")
    tokenizer: str | None = flag(
        None, "directory with tokenizer.json (default: that of a bundled model, or of --model if a directory)"
    )
    api_key: str | None = flag(
        None, "sent as bearer token; not part of the results (default: the environment's HYBRIDJAX_API_KEY)"
    )
    ready_check_timeout_sec: float = flag(0.0, "seconds to wait for a server that does not answer yet")
    flush_cache: bool = flag(False, "make the server forget cached prefixes before the clock starts")
    request_rate: float = flag(math.inf, "requests per second, arriving as a Poisson process; inf: at once")
    max_concurrency: int | None = flag(None, "requests in flight at most")
    warmup_requests: int = flag(1, "requests before the clock starts")
    disable_stream: bool = flag(False, "ask for whole answers; only end-to-end latency is known then")
    disable_ignore_eos: bool = flag(False, "let the model end its completions")
    return_logprob: bool = flag(False, "ask for log probabilities")
    top_logprobs_num: int = flag(0, "with those of this many best tokens")
    extra_request_body: str | None = flag(None, "JSON object: fields to add to each request or replace")
    timeout: float = flag(600.0, "seconds without a byte after which a request has failed")
    metric_percentiles: str = flag("90,95,99", "percentiles of latencies to report, separated by commas")
    disable_tqdm: bool = flag(False, "show no progress bar")
    tag: str | None = flag(None, "any text, to find the results by")
    output_file: str | None = flag(None, "append the closing JSON line to this file")
    output_details: bool = flag(False, "with each request's numbers in the file")

    def __post_init__(self):
        super().__post_init__()
        check(self.request_rate > 0, "request_rate", self.request_rate, "positive, or inf")
        check(self.timeout > 0, "timeout", self.timeout, "a positive number of seconds")
        parse_percentiles(self.metric_percentiles)
        wait = self.ready_check_timeout_sec
        check(wait >= 0, "ready_check_timeout_sec", wait, "0 or more seconds")
        check(self.top_logprobs_num >= 0, "top_logprobs_num", self.top_logprobs_num, "0 or more")
        check(self.warmup_requests >= 0, "warmup_requests", self.warmup_requests, "0 or more")
        check(0 < self.port < 65536, "port", self.port, "in 1..65535")
        if self.max_concurrency is not None:
            positive_int("max_concurrency", self.max_concurrency)

    @property
    def interface(self) -> str:
        """The backend by its own name."""
        return ALIASES.get(self.backend, self.backend)

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return check_target(self.base_url or f"http://{host}:{self.port}", self.allow_remote)


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m hybridjax.bench_serving",
        description="Sends load to a running server and measures its answers.",
        allow_abbrev=False,
    )
    add_flags(parser, ServingBenchConfig)
    parser.add_argument(
        "--goodput",
        nargs="+",
        default=[],
        metavar="KEY:MS",
        help="limits that make a request good: ttft, tpot, itl (the longest gap), e2e in milliseconds",
    )
    parser.add_argument(
        "--header", nargs="+", default=[], metavar="NAME=VALUE", help="headers to add to each request"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark.

    Returns:
      0; 1 if every request failed or the server does not answer; 2 if the settings cannot work.
    """
    namespace = build_parser().parse_args(argv)
    try:
        config = from_flags(ServingBenchConfig, namespace)
        goodput, headers = parse_goodput(namespace.goodput), _headers(namespace.header)
        if config.disable_stream and goodput.keys() - {"e2e"}:
            raise ConfigError("goodput: without streaming only e2e is known")
        return asyncio.run(run(config, goodput, headers))
    except HybridJaxError as error:
        print(f"hybridjax.bench_serving: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1 if isinstance(error, AnswerError) else 2
    except KeyboardInterrupt:
        return 130


async def run(config: ServingBenchConfig, goodput: dict[str, float], headers: dict[str, str]) -> int:
    """Everything from the first contact with the server to the closing JSON line."""
    url, extra = config.url, _json_object(config.extra_request_body)
    if config.return_logprob:
        extra = logprob_fields(config.interface, config.top_logprobs_num) | extra
    import_httpx()
    report.check_output(config.output_file)
    connect = functools.partial(_client, config, url, extra, headers)
    async with connect("", None) as probe:
        if config.ready_check_timeout_sec:
            await probe.wait_until_ready(config.ready_check_timeout_sec)
        model = config.model or (await probe.models())[0]["id"]
    tokenizer = _tokenizer(config.tokenizer, model, given=config.model is not None)
    workload = load_dataset(config, tokenizer)
    if config.interface == "openai-chat":
        workload = as_text(workload, tokenizer)
    _describe(config, url, model, workload)
    async with connect(config.served_model_name or model, tokenizer) as client:
        await _warm_up(client, workload, config.warmup_requests)
        if config.flush_cache:
            await client.flush_cache()
        outcomes, duration = await _timed(client, workload, config)
    numbers = report.measure(outcomes, duration, goodput, parse_percentiles(config.metric_percentiles))
    print(report.table(numbers))
    if numbers["itl_unit"] == "chunk" and numbers["successful"] and not config.disable_stream:
        print("The server does not say how many tokens a chunk has: gaps are between chunks.")
    _finish(config, url, model, workload, numbers, outcomes)
    return 0 if numbers["successful"] else 1


def _client(
    config: ServingBenchConfig,
    url: str,
    extra: dict[str, Any],
    headers: dict[str, str],
    model: str,
    tokenizer: Any,
) -> Client:
    return Client(
        config.interface,
        url,
        model=model,
        stream=not config.disable_stream,
        ignore_eos=not config.disable_ignore_eos,
        extra=extra,
        api_key=config.api_key or os.environ.get("HYBRIDJAX_API_KEY"),
        timeout=config.timeout,
        tokenizer=tokenizer,
        headers=headers,
    )


def _headers(pairs: Sequence[str]) -> dict[str, str]:
    """``["X-Team=a"]`` as a mapping."""
    headers = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not re.fullmatch("[!#-'*+.^_`|~0-9A-Za-z-]+", name) or not value.isprintable():
            raise ConfigError(f"header has {pair!r}; it must be NAME=VALUE")
        headers[name] = value
    return headers


def _json_object(text: str | None) -> dict[str, Any]:
    try:
        value = json.loads(text or "{}")
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ConfigError(f"extra_request_body is {text!r}; it must be a JSON object")
    if "stream" in value:
        raise ConfigError("extra_request_body must not hold stream; use --disable-stream")
    return value


def _tokenizer(path: str | None, model: str, given: bool) -> Any:
    """The tokenizer asked for, else the model's own where it is at hand, else None."""
    from hybridjax.checkpoints.bundled import bundled_models, resolve
    from hybridjax.text import load_tokenizer

    if path is not None:
        return load_tokenizer(path if Path(path).is_file() else resolve(path))
    # Only the user's word may name a directory here, never the server's.
    if model in bundled_models() or given and Path(model, "tokenizer.json").is_file():
        return load_tokenizer(resolve(model))
    return None


def _describe(config: ServingBenchConfig, url: str, model: str, workload: Workload) -> None:
    rate = "all at once" if math.isinf(config.request_rate) else f"{config.request_rate:g} per second"
    skipped = "".join(f", {count} rows {reason}" for reason, count in workload.skipped.items())
    print(f"{model} at {url} ({config.backend}): {len(workload.items)} requests, {rate}{skipped}", flush=True)


async def _warm_up(client: Client, workload: Workload, count: int) -> None:
    if not count:
        return
    item = warmup_item(workload.items[0])
    outcomes = await asyncio.gather(*(client.ask(item) for _ in range(count)))
    errors = [o.error for o in outcomes if o.error is not None]
    if len(errors) == count:
        raise AnswerError(f"every warm-up request failed: {errors[0]}")
    if errors:
        print(f"{len(errors)} of {count} warm-up requests failed: {errors[0]}", file=sys.stderr)


async def _timed(
    client: Client, workload: Workload, config: ServingBenchConfig
) -> tuple[list[Outcome], float]:
    arrivals = arrival_times(len(workload.items), config.request_rate, config.seed)
    # On a pipe or in a log file a bar would be noise.
    hidden = True if config.disable_tqdm else None
    with tqdm(total=len(workload.items), disable=hidden, file=sys.stderr) as bar:
        return await run_load(client.ask, workload.items, arrivals, config.max_concurrency, bar.update)


def _finish(
    config: ServingBenchConfig,
    url: str,
    model: str,
    workload: Workload,
    numbers: dict[str, Any],
    outcomes: list[Outcome],
) -> None:
    settings = dataclasses.asdict(config) | {"base_url": url, "model": model}
    del settings["api_key"]
    record = {
        "benchmark": "serving",
        "tag": config.tag,
        "client": report.environment("httpx"),
        **numbers,
        "skipped_rows": workload.skipped,
        "settings": settings,
    }
    more = report.details(outcomes) if config.output_details else {}
    # The results are shown even if the file cannot be written now.
    print(report.dumps(record), flush=True)
    report.append_json(config.output_file, record | more)


if __name__ == "__main__":
    sys.exit(main())
