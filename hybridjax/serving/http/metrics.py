"""GET /metrics: SGLang's metric names under ``hybridjax:``, made when somebody asks for them."""

import itertools
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from hybridjax.serving.api import FrontDoor
from hybridjax.serving.http.telemetry import RECENT, Histogram, Telemetry

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "hybridjax:"
STATUSES = ("stop", "length", "abort", "timeout", "error")


class Metrics(Collector):
    """The engine's statistics and the front's telemetry. No label comes from a client."""

    def __init__(self, engine: FrontDoor, telemetry: Telemetry, model_name: str):
        self._engine = engine
        self._telemetry = telemetry
        self._model = model_name
        # A registry of its own: the global one tells about the process and the interpreter.
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def render(self) -> bytes:
        """The metrics in Prometheus' text format; in OpenMetrics the library would rename them."""
        return generate_latest(self._registry)

    def collect(self) -> Iterable[Metric]:
        yield from self._gauges()
        yield from self._counters()
        t = self._telemetry
        yield self._histogram("time_to_first_token_seconds", "request to first token", t.first_token)
        yield self._histogram("inter_token_latency_seconds", "token to next token", t.between_tokens)
        yield self._histogram("queue_time_seconds", "acceptance to memory for it", t.queue)
        yield self._histogram("e2e_request_latency_seconds", "request to last token", t.request)

    def _gauges(self) -> Iterable[Metric]:
        stats = self._engine.stats
        values = {
            "num_running_reqs": (stats.running, "requests that hold memory, in prefill or decoding"),
            "num_queue_reqs": (stats.waiting, "requests that wait for memory"),
            "token_usage": (_share(stats.used_pages, stats.total_pages), "share of the K/V pages in use"),
            "mamba_usage": (_share(stats.used_slots, stats.total_slots), "share of recurrent slots in use"),
            "gen_throughput": (self._telemetry.tokens_per_second(), "generated tokens per second"),
            "cache_hit_rate": (
                self._telemetry.cache_hit_rate(),
                f"share of the last {RECENT} prompts' tokens taken from the prefix cache",
            ),
        }
        for name, (value, description) in values.items():
            yield self._add(GaugeMetricFamily(PREFIX + name, description, labels=["model_name"]), value)

    def _counters(self) -> Iterable[Metric]:
        t, stats = self._telemetry, self._engine.stats
        values = {
            "prompt_tokens": (t.prompt_tokens, "prompt tokens of completions that have begun"),
            "generation_tokens": (t.generated_tokens, "generated tokens"),
            "cached_tokens": (t.cached_tokens, "prompt tokens taken from the prefix cache"),
            "num_aborted_requests": (t.finished["abort"], "completions that ended early"),
            "num_retracted_reqs": (stats.preempted, "times a request gave its memory back to another"),
        }
        for name, (value, description) in values.items():
            yield self._add(CounterMetricFamily(PREFIX + name, description, labels=["model_name"]), value)
        requests = CounterMetricFamily(
            PREFIX + "num_requests", "completions by finish reason", labels=["model_name", "status"]
        )
        for status in STATUSES:
            requests.add_metric([self._model, status], t.finished[status])
        yield requests

    def _add[M: (GaugeMetricFamily, CounterMetricFamily)](self, family: M, value: float) -> M:
        family.add_metric([self._model], value)
        return family

    def _histogram(self, name: str, description: str, histogram: Histogram) -> Metric:
        bounds = [*map(str, map(float, histogram.bounds)), "+Inf"]
        buckets = list(zip(bounds, itertools.accumulate(map(float, histogram.counts))))
        family = HistogramMetricFamily(PREFIX + name, description, labels=["model_name"])
        family.add_metric([self._model], buckets, histogram.total)
        return family


def _share(used: int, total: int) -> float:
    return used / total if total else 0.0
