import json
import logging
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from http_fakes import PATIENCE, FakeEngine, RunningServer, saying
from prometheus_client.parser import text_string_to_metric_families
from test_http_serve_command import HERE, Process

from hybridjax.serving.api import EngineStats, RequestOutput
from hybridjax.serving.http.telemetry import RATE_SECONDS, Histogram, Telemetry

COMPLETIONS = "/v1/completions"


def scrape(server: RunningServer) -> dict[str, float]:
    """Values by name and labels other than the model's, e.g. ``num_requests_total stop``."""
    reply = httpx.get(server.url + "/metrics", timeout=PATIENCE)
    assert reply.status_code == 200
    values = {}
    for family in text_string_to_metric_families(reply.text):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("model_name") == "fake"
            key = " ".join([sample.name.removeprefix("hybridjax:"), *labels.values()])
            values[key] = sample.value
    return values


@pytest.fixture
def measured(serve: Any) -> RunningServer:
    return serve(enable_metrics=True)


def test_metrics_are_off_unless_asked_for(http: httpx.Client):
    reply = http.get("/metrics")
    assert reply.status_code == 404
    assert reply.json()["error"]["message"] == "this server was started without --enable-metrics"
    assert reply.json()["error"]["code"] == "metrics_disabled"


def test_a_fresh_server_has_done_nothing(measured: RunningServer):
    values = scrape(measured)
    assert set(values.values()) == {0}
    names = {name.split()[0] for name in values}
    histograms = "time_to_first_token", "inter_token_latency", "e2e_request_latency", "queue_time"
    assert names == {
        *("num_running_reqs", "num_queue_reqs", "token_usage", "mamba_usage", "gen_throughput"),
        *("cache_hit_rate", "num_retracted_reqs_total"),
        *("prompt_tokens_total", "generation_tokens_total", "cached_tokens_total"),
        *("num_aborted_requests_total", "num_requests_total"),
        *(f"{name}_seconds_{part}" for name in histograms for part in ("bucket", "count", "sum")),
    }


def test_requests_add_up(measured: RunningServer, engine: FakeEngine):
    engine.cached_tokens, engine.queue_seconds = 2, 0.25
    body = {"prompt": [1, 2, 3], "max_tokens": 5, "n": 2}
    assert httpx.post(measured.url + COMPLETIONS, json=body).status_code == 200
    engine.script = saying("xy")
    assert httpx.post(measured.url + COMPLETIONS, json={"prompt": "p", "stream": True}).status_code == 200
    engine.script = lambda prompt, params: iter([RuntimeError("no")])
    assert httpx.post(measured.url + COMPLETIONS, json={"prompt": "p"}).status_code == 500
    values = scrape(measured)
    assert values["prompt_tokens_total"] == 3 + 3 + 2
    assert values["generation_tokens_total"] == 5 + 5 + 3
    assert values["cached_tokens_total"] == 6
    statuses = {status: values[f"num_requests_total {status}"] for status in ("stop", "length", "error")}
    assert statuses == {"stop": 1, "length": 2, "error": 1}
    assert values["cache_hit_rate"] == 6 / 8
    # Each completion waited once, however many events it had, also the one that failed.
    assert values["queue_time_seconds_count"] == 4
    assert values["queue_time_seconds_bucket 0.2"] == 0
    assert values["queue_time_seconds_bucket 0.5"] == 4
    assert values["queue_time_seconds_sum"] == 1
    assert values["time_to_first_token_seconds_count"] == 3
    assert values["inter_token_latency_seconds_count"] == 4 + 4 + 2
    assert values["e2e_request_latency_seconds_count"] == 4
    assert values["e2e_request_latency_seconds_bucket +Inf"] == 4
    assert values["e2e_request_latency_seconds_sum"] >= values["time_to_first_token_seconds_sum"] > 0


def test_a_client_that_leaves_is_an_abort(measured: RunningServer, engine: FakeEngine):
    engine.allow(3)
    with httpx.stream(
        "POST", measured.url + COMPLETIONS, json={"prompt": "p", "stream": True, "max_tokens": 9}
    ) as stream:
        engine.wait_until(lambda: engine.emitted == 3)
        next(stream.iter_lines())
    engine.wait_until(lambda: not engine.live)
    engine.allow(None)
    # The engine's events come one after the other, so after this one the abort has been counted.
    assert httpx.post(measured.url + COMPLETIONS, json={"prompt": "p", "max_tokens": 1}).status_code == 200
    values = scrape(measured)
    assert values["num_aborted_requests_total"] == values["num_requests_total abort"] == 1
    assert values["generation_tokens_total"] == 3 + 1


def test_gauges_are_the_engines(measured: RunningServer, engine: FakeEngine):
    engine.stats = EngineStats(
        running=3, waiting=2, used_pages=10, total_pages=40, used_slots=3, total_slots=8, preempted=9
    )
    values = scrape(measured)
    names = "num_running_reqs", "num_queue_reqs", "token_usage", "mamba_usage", "num_retracted_reqs_total"
    assert [values[name] for name in names] == [3, 2, 0.25, 0.375, 9]


def test_the_names_are_the_same_whatever_a_scraper_accepts(measured: RunningServer):
    accept = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"
    reply = httpx.get(measured.url + "/metrics", headers={"accept": accept})
    assert reply.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert reply.text == httpx.get(measured.url + "/metrics").text
    assert "# TYPE hybridjax:token_usage gauge\n" in reply.text


def test_nothing_is_told_about_the_process(measured: RunningServer):
    text = httpx.get(measured.url + "/metrics").text
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    assert all(line.startswith("hybridjax:") for line in lines)


def test_clients_make_no_labels(measured: RunningServer):
    before = set(scrape(measured))
    for body in ({"prompt": "x", "user": "somebody"}, {"prompt": "x", "model": "other"}, {"prompt": 1}):
        httpx.post(measured.url + COMPLETIONS, json=body)
    httpx.get(measured.url + "/some/path")
    assert set(scrape(measured)) == before


def output(tokens: int, reason: Any = None) -> RequestOutput:
    return RequestOutput(
        request_id="r", token_ids=(1,) * tokens, prompt_tokens=7, cached_tokens=3, finish_reason=reason
    )


def test_latencies_are_between_events_and_per_token():
    now = 100.0
    telemetry = Telemetry(lambda: now)
    timing = telemetry.start()
    assert telemetry.seconds_since_token == float("inf")
    now = 102.0
    telemetry.record(timing, output(1))
    now = 102.5
    telemetry.record(timing, output(0))
    now = 103.0
    telemetry.record(timing, output(4))
    now = 103.25
    telemetry.record(timing, output(0, "stop"))
    assert (telemetry.first_token.total, sum(telemetry.first_token.counts)) == (2, 1)
    assert (telemetry.between_tokens.total, sum(telemetry.between_tokens.counts)) == (1, 4)
    assert telemetry.between_tokens.counts[telemetry.between_tokens.bounds.index(0.4)] == 4
    assert (telemetry.request.total, sum(telemetry.request.counts)) == (3.25, 1)
    assert (telemetry.prompt_tokens, telemetry.cached_tokens, telemetry.generated_tokens) == (7, 3, 5)
    assert telemetry.finished == {"stop": 1}
    assert telemetry.seconds_since_token == 0.25


def test_throughput_is_over_the_last_whole_seconds():
    now = 10.9
    telemetry = Telemetry(lambda: now)
    timing = telemetry.start()
    telemetry.record(timing, output(20))
    assert telemetry.tokens_per_second() == 0
    now = 11.0
    telemetry.record(timing, output(10))
    assert telemetry.tokens_per_second() == 20 / RATE_SECONDS
    now = 15.9
    assert telemetry.tokens_per_second() == 30 / RATE_SECONDS
    now = 16.0
    assert telemetry.tokens_per_second() == 10 / RATE_SECONDS
    for second in range(100, 200):
        now = float(second)
        telemetry.record(timing, output(2))
    assert telemetry.tokens_per_second() == 2
    assert len(telemetry._by_second) == RATE_SECONDS + 1


@pytest.mark.parametrize(("value", "bucket"), [(0, 0), (1, 0), (1.5, 1), (2, 1), (9, 2)])
def test_a_bucket_includes_its_upper_bound(value: float, bucket: int):
    histogram = Histogram((1, 2))
    histogram.add(value, 3)
    assert histogram.counts[bucket] == sum(histogram.counts) == 3


def logged(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    records = [record for record in caplog.records if record.name == "hybridjax.requests"]
    return [json.loads(record.getMessage()) for record in records]


def test_finished_requests_are_logged_without_their_text(
    serve: Any, engine: FakeEngine, caplog: pytest.LogCaptureFixture
):
    engine.cached_tokens, engine.queue_seconds = 1, 0.5
    server = serve(log_requests=True)
    with caplog.at_level(logging.INFO, "hybridjax.requests"):
        body = {"prompt": "secret", "max_tokens": 3, "n": 2, "user": "somebody"}
        first = httpx.post(server.url + COMPLETIONS, json=body)
        chat = {"messages": [{"role": "user", "content": "secret"}], "max_tokens": 2, "stream": True}
        httpx.post(server.url + "/v1/chat/completions", json=chat)
        engine.script = lambda prompt, params: iter([97, RuntimeError("no")])
        httpx.post(server.url + COMPLETIONS, json={"prompt": [1, 2]})
        httpx.post(server.url + COMPLETIONS, json={"prompt": []})
        httpx.post(server.url + COMPLETIONS, json={"prompt": "x"}, headers={"host": "no/host"})
        httpx.get(server.url + "/health")
        server.settle()
    lines = logged(caplog)
    for line in lines[:3]:
        assert 0 < line.pop("time_to_first_token") <= line["latency"]
        assert line.pop("queue_time") == 0.5
    for line in lines:
        assert 0 <= line.pop("latency") < PATIENCE
        assert len(line.pop("id")) == 32
        assert line.pop("model") == "fake"
    counts = {"prompt_tokens": 14, "completion_tokens": 6, "cached_tokens": 2}
    fine = {"route": COMPLETIONS, "status": 200, "error": None}
    assert lines[0] == {**fine, **counts, "finish_reasons": ["length", "length"]}
    assert lines[1]["route"] == "/v1/chat/completions"
    assert (lines[1]["completion_tokens"], lines[1]["finish_reasons"]) == (2, ["length"])
    assert lines[2]["finish_reasons"] == ["error"]
    assert (lines[2]["status"], lines[2]["error"]) == (500, "internal_error")
    assert lines[3] == {"route": COMPLETIONS, "status": 400, "error": "invalid_value"}
    assert lines[4] == {"route": COMPLETIONS, "status": 400, "error": "bad_host"}
    assert len(lines) == 5
    assert "secret" not in caplog.text and "somebody" not in caplog.text and "abc" not in caplog.text
    assert first.headers["x-request-id"] in caplog.text


def test_a_client_that_leaves_is_logged_as_an_abort(
    serve: Any, engine: FakeEngine, caplog: pytest.LogCaptureFixture
):
    server = serve(log_requests=True)
    engine.allow(2)
    with caplog.at_level(logging.INFO, "hybridjax.requests"):
        body = {"prompt": "p", "stream": True, "max_tokens": 9}
        with httpx.stream("POST", server.url + COMPLETIONS, json=body) as stream:
            engine.wait_until(lambda: engine.emitted == 2)
            next(stream.iter_lines())
        engine.wait_until(lambda: not engine.live)
        server.settle()
    [line] = logged(caplog)
    assert (line["finish_reasons"], line["completion_tokens"]) == (["abort"], 2)
    assert line["status"] == 200 and line["queue_time"] is None


def test_requests_are_not_logged_unless_asked_for(http: httpx.Client, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.INFO, "hybridjax.requests"):
        http.post(COMPLETIONS, json={"prompt": "x"})
    assert logged(caplog) == []


@pytest.fixture
def quiet() -> Iterator[Process]:
    process = Process("--log-requests", "--log-level", "error")
    yield process
    process.kill()


def test_the_commands_request_log_is_bare_json_whatever_the_log_level(quiet: Process):
    httpx.post(quiet.url + COMPLETIONS, json={"prompt": "x", "max_tokens": 4}, timeout=PATIENCE)
    quiet.process.send_signal(signal.SIGTERM)
    code, _, err = quiet.end()
    assert code == 0
    [line] = err.splitlines()
    assert json.loads(line)["completion_tokens"] == 4


def test_importing_the_metrics_registers_nothing_globally():
    code = (
        "import prometheus_client as p\n"
        "before = set(p.REGISTRY._names_to_collectors)\n"
        "import hybridjax.serving.http.metrics\n"
        "print(set(p.REGISTRY._names_to_collectors) == before)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=HERE)
    assert done.stdout == "True\n"
