import json
import subprocess
import sys

import pytest
from benchmarking_fakes import TEXTS

from hybridjax import bench_serving
from hybridjax.benchmarking.load import check_target
from hybridjax.benchmarking.protocols import AnswerError, EventParser, parse_object
from hybridjax.errors import ConfigError

IDS = ["--dataset-name", "random-ids", "--vocab-size", "90"]
SIZES = "--num-prompts 4 --random-input-len 6 --random-output-len 5 --random-range-ratio 1".split()


@pytest.fixture
def bench(fake, capsys):
    """Runs the command against the fake; returns status, the closing JSON and everything before it."""

    def run(*flags, ids=True):
        argv = ["--port", str(fake.port), *(IDS if ids else ["--tokenizer", "tiny-sala"]), *SIZES, *flags]
        status = bench_serving.main(argv)
        captured = capsys.readouterr()
        *shown, last = captured.out.rstrip("\n").split("\n")
        record = json.loads(last) if last.startswith("{") else None
        return status, record, "\n".join(shown) + captured.err

    return run


@pytest.mark.parametrize("backend", ["hybridjax", "openai", "openai-chat", "sglang"])
@pytest.mark.parametrize("stream", [True, False])
def test_every_backend_is_asked_and_measured(fake, bench, backend, stream):
    flags = [] if stream else ["--disable-stream"]
    status, record, shown = bench("--backend", backend, *flags, ids=backend != "openai-chat")
    assert status == 0, shown
    assert (record["successful"], record["failed"], record["errors"]) == (4, 0, {})
    assert record["output_tokens"] == 20
    assert record["tokens_counted_by"] == {"usage": 4}
    assert len(fake.bodies) == 5
    body = fake.bodies[-1]
    if backend == "sglang":
        assert record["input_tokens"] == 20
        assert body["sampling_params"] == {"temperature": 0, "max_new_tokens": 5, "ignore_eos": True}
        assert len(body["input_ids"]) == 6
    else:
        assert body["model"] == "fake-model" and body["max_tokens"] == 5 and body["ignore_eos"] is True
        assert ("messages" in body) == (backend == "openai-chat")
        assert body.get("stream_options") == ({"include_usage": True} if stream else None)
    assert body["stream"] is stream
    knows_tokens = backend in ("hybridjax", "sglang")
    if stream:
        assert record["itl_unit"] == ("token" if knows_tokens else "chunk")
        assert ("Inter-chunk latency" in shown) != knows_tokens
        assert record["ttft_ms"]["median"] > 0 and record["tpot_ms"] and record["itl_ms"]
    else:
        assert record["ttft_ms"] is record["tpot_ms"] is record["itl_ms"] is None
    assert record["e2e_ms"]["median"] > 0


@pytest.mark.parametrize(
    ("backend", "field"),
    [("sglang-native", "input_ids"), ("vllm", "prompt"), ("sglang-oai", "prompt"), ("vllm-chat", "messages")],
)
def test_other_tools_names_of_interfaces(fake, bench, backend, field):
    status, record, _ = bench("--backend", backend, ids=field != "messages")
    assert status == 0 and record["settings"]["backend"] == backend
    assert field in fake.bodies[-1]


@pytest.mark.parametrize(
    ("backend", "fields"),
    [
        ("hybridjax", {"logprobs": 2}),
        ("openai-chat", {"logprobs": True, "top_logprobs": 2}),
        ("sglang", {"return_logprob": True, "top_logprobs_num": 2}),
    ],
)
def test_log_probabilities_are_asked_for(fake, bench, backend, fields):
    flags = ["--return-logprob", "--top-logprobs-num", "2"]
    bench("--backend", backend, *flags, ids=backend != "openai-chat")
    assert fields.items() <= fake.bodies[-1].items()


def test_the_cache_is_flushed_between_the_warm_up_and_the_clock(fake, bench):
    assert bench("--warmup-requests", "3", "--flush-cache")[0] == 0
    assert fake.flushed_after == [3]
    fake.fail_all = True
    status, record, shown = bench("--warmup-requests", "0", "--flush-cache")
    assert (status, record) == (1, None) and "flush_cache: HTTP 401: not you" in shown


def test_a_server_that_is_not_ready_is_waited_for(fake, bench, monkeypatch):
    monkeypatch.setattr("hybridjax.benchmarking.load.READY_PAUSE", 0.01)
    fake.not_ready = 3
    assert bench()[0] == 1
    fake.not_ready = 3
    assert bench("--ready-check-timeout-sec", "30")[0] == 0
    fake.not_ready = 10**6
    status, _, shown = bench("--ready-check-timeout-sec", "0.05")
    assert status == 1 and "answers HTTP 503" in shown


def test_names_headers_and_tags(fake, bench, monkeypatch):
    monkeypatch.setenv("HYBRIDJAX_API_KEY", "sesame")
    flags = ["--model", "long/path", "--served-model-name", "short", "--header", "X-Team=a=b", "X-Two=2"]
    status, record, shown = bench(*flags, "--tag", "nightly", "--disable-tqdm")
    assert status == 0 and record["tag"] == "nightly"
    assert fake.bodies[-1]["model"] == "short"
    assert (fake.headers[-1]["x-team"], fake.headers[-1]["x-two"]) == ("a=b", "2")
    assert fake.authorizations[-1] == "Bearer sesame"
    assert "sesame" not in shown + json.dumps(record)


def test_percentiles_are_those_asked_for(bench):
    _, record, shown = bench("--metric-percentiles", "99.9,50")
    assert [*record["e2e_ms"]] == ["mean", "std", "median", "p50", "p99.9", "max"]
    assert "     p99.9" in shown and "p90" not in shown


def test_failures_are_counted_by_what_they_said(fake, bench):
    fake.failures = {1: "http", 3: "event", 4: "cut"}
    status, record, shown = bench("--goodput", "e2e:3600000", "ttft:3600000")
    assert status == 0
    assert (record["successful"], record["failed"]) == (1, 3)
    assert record["errors"] == {
        "HTTP 503: the fake is full": 1,
        "the fake broke": 1,
        "the stream ended before the completion did": 1,
    }
    assert record["output_tokens"] == 5
    assert record["goodput_share"] == 0.25
    assert all(f"error (1 x): {message}" in shown for message in record["errors"])


def test_an_abort_is_a_failure(fake, bench):
    fake.failures = {1: "abort"}
    _, record, _ = bench("--backend", "sglang")
    assert record["errors"] == {"aborted: the fake gave up": 1}


def test_the_status_is_1_if_everything_fails(fake, bench):
    fake.fail_all = True
    status, record, shown = bench()
    assert status == 1 and record is None and "every warm-up request failed" in shown
    status, record, _ = bench("--warmup-requests", "0")
    assert status == 1
    assert (record["successful"], record["failed"]) == (0, 4)


def test_concurrency_reaches_its_limit_and_stays_there(fake, bench):
    fake.meet = 3
    status, record, _ = bench(
        "--max-concurrency", "3", "--num-prompts", "9", "--warmup-requests", "0", "--request-rate", "1e6"
    )
    assert status == 0 and record["successful"] == 9
    assert fake.most_in_flight == 3


def test_the_warm_up_shares_no_prefix_with_what_is_measured(fake, bench):
    bench("--warmup-requests", "2")
    warm, measured = fake.bodies[:2], fake.bodies[2:]
    assert len(measured) == 4
    assert all(w["prompt"][0] != m["prompt"][0] for w in warm for m in measured)


def test_the_same_seed_sends_the_same_prompts(fake, bench):
    sent = []
    for seed in ("3", "3", "4"):
        fake.bodies.clear()
        bench("--seed", seed, "--warmup-requests", "0", "--max-concurrency", "1")
        sent.append([body["prompt"] for body in fake.bodies])
    assert sent[0] == sent[1] != sent[2]


def test_extra_fields_replace_those_sent(fake, bench):
    extra = {"temperature": 0.5, "sampling_params": {"top_k": 3}}
    bench("--extra-request-body", json.dumps(extra), "--api-key", "sesame", "--disable-ignore-eos")
    assert fake.bodies[-1]["temperature"] == 0.5
    assert "ignore_eos" not in fake.bodies[-1]
    assert fake.authorizations[-1] == "Bearer sesame"
    status, record, shown = bench("--backend", "sglang", "--extra-request-body", json.dumps(extra))
    assert fake.bodies[-1]["sampling_params"]["top_k"] == 3
    assert fake.bodies[-1]["sampling_params"]["max_new_tokens"] == 5
    assert status == 0 and "api_key" not in record["settings"] and "sesame" not in shown


def test_without_usage_tokens_are_counted_otherwise(fake, bench, tokenizer):
    fake.usage = False
    _, record, _ = bench()
    assert record["tokens_counted_by"] == {"chunks": 4} and record["output_tokens"] == 20
    _, record, _ = bench("--backend", "openai", ids=False)
    text = "".join(TEXTS[i % len(TEXTS)] for i in range(5))
    assert record["tokens_counted_by"] == {"tokenizer": 4}
    assert record["output_tokens"] == 4 * len(tokenizer.encode(text, add_special_tokens=False))
    status, record, _ = bench("--backend", "openai", "--warmup-requests", "0")
    assert status == 1 and list(record["errors"].values()) == [4]


def test_results_are_appended_to_the_file(bench, tmp_path):
    file = tmp_path / "results.jsonl"
    _, record, _ = bench("--output-file", str(file))
    bench("--output-file", str(file), "--output-details")
    first, second = map(json.loads, file.read_text().splitlines())
    assert first == record
    assert second["generated_texts"] == ["".join(TEXTS[i % len(TEXTS)] for i in range(5))] * 4
    assert second["output_lens"] == [5] * 4 and all(len(itl) == 4 for itl in second["itls"])
    assert second["settings"]["request_rate"] == "inf"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--base-url", "http://192.0.2.1:1"], "allow-remote"),
        (["--base-url", "ftp://127.0.0.1"], "base_url"),
        (["--goodput", "ttft:x"], "goodput"),
        (["--goodput", "ttft:1", "--disable-stream"], "only e2e"),
        (["--extra-request-body", "[]"], "extra_request_body"),
        (["--extra-request-body", '{"stream": true}'], "disable-stream"),
        (["--request-rate", "0"], "request_rate"),
        (["--metric-percentiles", "9,x"], "metric_percentiles"),
        (["--header", "a:b"], "header"),
        (["--header", "a=b\nc"], "header"),
        (["--ready-check-timeout-sec", "-1"], "ready_check_timeout_sec"),
        (["--apply-chat-template"], "a tokenizer is needed"),
        (["--output-file", "/nonexistent/x"], "output_file"),
        (["--dataset-name", "sharegpt"], "dataset-path"),
        (["--tokenizer", "/nonexistent"], "nonexistent"),
    ],
)
def test_settings_that_cannot_work_give_2_and_a_reason(bench, flags, message):
    status, record, shown = bench(*flags)
    assert status == 2 and record is None
    assert message in shown and shown.strip().startswith("hybridjax.bench_serving: error:")


def test_no_server_gives_1_and_a_reason(fake, bench):
    fake.stop()
    status, _, shown = bench()
    assert status == 1 and "does not answer" in shown
    status, _, shown = bench("--model", "given")
    assert status == 1 and "ConnectError" in shown


def test_httpx_is_asked_for_by_name(bench, monkeypatch):
    monkeypatch.setitem(sys.modules, "httpx", None)
    status, _, shown = bench()
    assert status == 2 and "pip install httpx" in shown


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:1", "http://localhost", "http://[::1]:30000/", "https://127.9.9.9"]
)
def test_this_machine_is_allowed(url):
    assert check_target(url, False) == url.rstrip("/")


@pytest.mark.parametrize(
    "url", ["http://0.0.0.0:1", "http://localhost.example", "http://127.0.0.1@example.com"]
)
def test_other_machines_need_a_flag(url):
    with pytest.raises(ConfigError, match="allow-remote"):
        check_target(url, False)
    assert check_target(url, True) == url


def test_events_do_not_depend_on_how_bytes_are_cut():
    data = ': note\n\ndata: {"a": "\u2028€"}\r\n\r\nevent: x\ndata:two\n\ndata: [DONE]\n\n'.encode()
    for size in range(1, 12):
        parser = EventParser()
        cut = [data[i : i + size] for i in range(0, len(data), size)]
        events = [event for piece in cut for event in parser.feed(piece)]
        assert events == ['{"a": "\u2028€"}', "two", "[DONE]"]


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000])
def test_what_is_no_object_is_an_error(text):
    with pytest.raises(AnswerError, match="not a JSON object"):
        parse_object(text)


def test_help_names_every_flag_of_sglang_that_is_kept():
    command = [sys.executable, "-m", "hybridjax.bench_serving", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    flags = "backend base-url dataset-name dataset-path num-prompts random-input-len random-output-len"
    flags += " random-range-ratio request-rate max-concurrency gsp-num-groups gsp-prompts-per-group"
    flags += " gsp-system-prompt-len gsp-question-len gsp-output-len seed output-file warmup-requests goodput"
    flags += " disable-stream extra-request-body host port model tokenizer served-model-name flush-cache"
    flags += " disable-tqdm return-logprob top-logprobs-num tag header ready-check-timeout-sec random-input"
    flags += " gsp-range-ratio gsp-ordered apply-chat-template prompt-suffix tokenize-prompt output-details"
    assert all(f"--{flag}" in done.stdout for flag in flags.split())
