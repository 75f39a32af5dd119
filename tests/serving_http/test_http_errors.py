import json
import logging
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from http_fakes import PATIENCE, ByteTokenizer, FakeEngine, RunningServer, alphabet

from hybridjax.errors import EngineDeadError, GrammarError, RequestError
from hybridjax.serving.api import SamplingParams
from hybridjax.serving.http.protocol import ChatCompletionRequest, CompletionRequest
from hybridjax.serving.request import Limits, make_request

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]
LIMIT = 4096


@pytest.fixture(scope="module")
def shared() -> Iterator[httpx.Client]:
    """One server for the requests that never reach the engine."""
    engine = FakeEngine(context_length=64)
    server = RunningServer(engine, max_request_bytes=LIMIT)
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client
    server.stop()
    engine.shutdown()
    assert engine.submitted == {}


def check(reply: httpx.Response, status: int, param: str | None, message: str, code: str | None = None):
    assert reply.status_code == status, reply.text
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert message in error["message"]
    assert error["param"] == param
    if code is not None:
        assert error["code"] == code
    assert len(error["message"]) < 400


BAD_FIELDS: list[tuple[dict[str, Any], str, str]] = [
    ({"temperature": -1}, "temperature", "temperature is -1: it must be greater than or equal to 0"),
    ({"temperature": 101}, "temperature", "less than or equal to 100"),
    ({"temperature": "hot"}, "temperature", "temperature is 'hot': it must be a valid number"),
    ({"temperature": True}, "temperature", "valid number"),
    ({"temperature": [0.5]}, "temperature", "temperature is [0.5]"),
    ({"top_p": 1.5}, "top_p", "less than or equal to 1"),
    ({"top_k": -2}, "top_k", "greater than or equal to -1"),
    ({"top_k": 1.5}, "top_k", "valid integer"),
    ({"min_p": 2}, "min_p", "less than or equal to 1"),
    ({"n": 0}, "n", "greater than or equal to 1"),
    ({"n": 9}, "n", "n is 9: it must be less than or equal to 8"),
    ({"n": 10**30}, "n", "less than or equal to 8"),
    ({"max_completion_tokens": 0}, "max_completion_tokens", "greater than or equal to 1"),
    ({"max_tokens": 2**31}, "max_tokens", "less than or equal to"),
    ({"max_tokens": 4.0}, "max_tokens", "valid integer"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", "give one of them"),
    ({"max_tokens": 3, "min_tokens": 4}, "min_tokens", "at most max_tokens"),
    ({"min_tokens": -1}, "min_tokens", "greater than or equal to 0"),
    ({"seed": 2**63}, "seed", "less than or equal to"),
    ({"seed": "1"}, "seed", "valid integer"),
    ({"presence_penalty": 3}, "presence_penalty", "less than or equal to 2"),
    ({"frequency_penalty": -3}, "frequency_penalty", "greater than or equal to -2"),
    ({"repetition_penalty": 0.009}, "repetition_penalty", "greater than or equal to 0.01"),
    ({"logit_bias": {"x": 1}}, "logit_bias", "its keys must be token ids, not 'x'"),
    ({"logit_bias": {"1": 101}}, "logit_bias[1]", "less than or equal to 100"),
    ({"logit_bias": {"-1": 1}}, "logit_bias", "token ids"),
    ({"logit_bias": [1]}, "logit_bias", "map token ids"),
    ({"logit_bias": {str(i): 1 for i in range(301)}}, "logit_bias", "at most 300 entries, not 301"),
    ({"stop": ""}, "stop[0]", "at least 1 character"),
    ({"stop": ["a"] * 17}, "stop", "at most 16"),
    ({"stop": ["x" * 1025]}, "stop[0]", "at most 1024"),
    ({"stop": [1]}, "stop[0]", "valid string"),
    ({"stop": 5}, "stop", "valid list"),
    ({"stop_token_ids": [-1]}, "stop_token_ids[0]", "greater than or equal to 0"),
    ({"stop_token_ids": [1] * 65}, "stop_token_ids", "at most 64"),
    ({"ignore_eos": 1}, "ignore_eos", "valid boolean"),
    ({"stream": "yes"}, "stream", "valid boolean"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "needs stream"),
    ({"stream": True, "stream_options": {"include_usage": 2}}, "stream_options.include_usage", "boolean"),
    ({"stream": True, "stream_options": []}, "stream_options", "valid dictionary"),
    ({"model": 7}, "model", "valid string"),
    ({"structural_tag": {}}, "structural_tag", "not supported"),
    ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs", "not supported"),
    ({"response_format": {"type": "yaml"}}, "response_format.type", "json_schema"),
    ({"response_format": {"type": "json_schema"}}, "response_format", "no json_schema"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": 3}}},
        "response_format.json_schema.schema",
        "an object, true or false",
    ),
    ({"response_format": "json"}, "response_format", ""),
    ({"regex": ["a+"]}, "regex", "string"),
    ({"guided_choice": []}, "guided_choice", "1"),
    ({"regex": "a+", "ebnf": 'root ::= "a"'}, "ebnf", "give one"),
    ({"regex": "a+", "response_format": {"type": "json_object"}}, "regex", "give one"),
    ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs", "give one"),
    ({"use_beam_search": True}, "use_beam_search", "not supported"),
    ({"prompt_logprobs": 21}, "prompt_logprobs", "less than or equal to 20"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "needs stream to be false"),
    ({"priority": 1001}, "priority", "less than or equal to 1000"),
    ({"priority": 0.5}, "priority", "valid integer"),
    ({"cache_salt": ""}, "cache_salt", "at least 1 character"),
    ({"cache_salt": "s" * 257}, "cache_salt", "at most 256 characters"),
    ({"timeout": 0}, "timeout", "greater than 0"),
    ({"timeout": 86401}, "timeout", "less than or equal to 86400"),
    ({"timeout": "1s"}, "timeout", "valid number"),
]


@pytest.mark.parametrize(
    ("path", "start"), [(COMPLETIONS, {"prompt": "x"}), (CHAT, {"messages": HELLO})], ids=["text", "chat"]
)
@pytest.mark.parametrize(
    ("fields", "param", "message"), BAD_FIELDS, ids=[repr(row[0])[:50] for row in BAD_FIELDS]
)
def test_a_bad_field_is_named_with_its_value_and_what_is_allowed(
    shared: httpx.Client, path: str, start: dict, fields: dict, param: str, message: str
):
    check(shared.post(path, json=start | fields), 400, param, message)


BAD_COMPLETIONS: list[tuple[dict[str, Any], str, str]] = [
    ({}, "prompt", "prompt is missing"),
    ({"prompt": None}, "prompt", "prompt is missing"),
    ({"prompt": 5}, "prompt", "prompt is 5: it must be a string, a list of token ids, or"),
    ({"prompt": []}, "prompt", "1 to 256"),
    ({"prompt": [[]]}, "prompt", "1 to 256"),
    ({"prompt": [[1], []]}, "prompt", "1 to 256"),
    ({"prompt": ["a", 1]}, "prompt", "1 to 256"),
    ({"prompt": [1.5]}, "prompt", "1 to 256"),
    ({"prompt": [True]}, "prompt", "1 to 256"),
    ({"prompt": [-1]}, "prompt", "1 to 256"),
    ({"prompt": [2**31]}, "prompt", "1 to 256"),
    ({"prompt": {"a": 1}}, "prompt", "1 to 256"),
    ({"prompt": ["a"] * 257}, "prompt", "at most 256 prompts, not 257"),
    ({"prompt": ["a"] * 200, "n": 2}, "prompt", "asks for 400 completions; at most 256"),
    ({"prompt": [258]}, "prompt", "not in the vocabulary"),
    ({"prompt": "x", "max_tokens": 100}, "max_tokens", "exceed 64"),
    ({"prompt": "x", "logprobs": 21}, "logprobs", "less than or equal to 20"),
    ({"prompt": "x", "logprobs": True}, "logprobs", "valid integer"),
    ({"prompt": "x", "max_tokens": 0}, "max_tokens", "max_tokens is 0; that needs echo to be true"),
    ({"prompt": "x", "max_tokens": -1}, "max_tokens", "greater than or equal to 0"),
    ({"prompt": "x", "suffix": "y"}, "suffix", "not supported"),
    ({"prompt": "x", "best_of": 2}, "best_of", "only n (1)"),
    ({"prompt": "x", "top_logprobs": 2}, "top_logprobs", "not supported"),
    ({"prompt": "x", "messages": HELLO}, "messages", "not supported"),
]


@pytest.mark.parametrize(("body", "param", "message"), BAD_COMPLETIONS)
def test_a_bad_completion_request_is_refused(shared: httpx.Client, body: dict, param: str, message: str):
    check(shared.post(COMPLETIONS, json=body), 400, param, message)


def _content(content: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}]}


IMAGE = {"type": "image_url", "image_url": {"url": "http://localhost/x.png"}}
BAD_CHATS: list[tuple[dict[str, Any], str, str]] = [
    ({}, "messages", "messages is missing"),
    ({"messages": []}, "messages", "at least 1 item"),
    ({"messages": "hi"}, "messages", "valid list"),
    ({"messages": ["hi"]}, "messages[0]", "messages[0] is 'hi'"),
    ({"messages": [{"content": "x"}]}, "messages[0].role", "missing"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", "'user', 'assistant' or 'tool'"),
    ({"messages": [{"role": "user"}]}, "messages[0].content", "missing"),
    (_content(None), "messages[0].content", "a string or a list of 1 to 1024 text or image parts"),
    (_content([]), "messages[0].content", "1 to 1024 text or image parts"),
    (_content([IMAGE]), "messages", "messages has images; this server's model takes text only"),
    (_content([{"type": "text"}]), "messages[0].content", "part 0 must have a string named 'text'"),
    (_content(["x"]), "messages[0].content", "part 0 must be an object with a type"),
    (_content(7), "messages[0].content", "messages[0].content is 7"),
    ({"messages": HELLO, "top_logprobs": 2}, "top_logprobs", "needs logprobs"),
    ({"messages": HELLO, "logprobs": 2}, "logprobs", "valid boolean"),
    ({"messages": HELLO, "logprobs": True, "top_logprobs": 21}, "top_logprobs", "less than or equal to 20"),
    ({"messages": HELLO, "max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
    ({"messages": HELLO, "functions": [{}]}, "functions", "not supported"),
    ({"messages": HELLO, "audio": {"voice": "x"}}, "audio", "not supported"),
    ({"messages": HELLO, "modalities": ["text", "audio"]}, "modalities", "not supported"),
    ({"messages": HELLO, "reasoning_effort": "much"}, "reasoning_effort", "'none', 'minimal', 'low'"),
    ({"messages": HELLO, "chat_template": "{{ 1 }}"}, "chat_template", "not supported"),
    ({"messages": HELLO, "echo": True}, "echo", "not supported"),
    ({"messages": HELLO, "prompt": "x"}, "prompt", "not supported"),
    ({"messages": HELLO, "max_tokens": 60}, "max_tokens", "exceed 64"),
    ({"messages": HELLO, "chat_template_kwargs": {"x": 1}}, "chat_template_kwargs", "unknown option 'x'"),
    (
        {"messages": HELLO, "chat_template_kwargs": {"self": 1}},
        "chat_template_kwargs",
        "'self' is not allowed",
    ),
    ({"messages": HELLO, "chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs", "not allowed"),
    ({"messages": HELLO, "chat_template_kwargs": {"tools": 1}}, "chat_template_kwargs", "not allowed"),
    (
        {"messages": HELLO, "chat_template_kwargs": {"add_generation_prompt": False}},
        "chat_template_kwargs",
        "not allowed",
    ),
    ({"messages": HELLO, "chat_template_kwargs": {"x": []}}, "chat_template_kwargs", "a string, a number"),
    (
        {"messages": HELLO, "chat_template_kwargs": {f"x{i}": 1 for i in range(17)}},
        "chat_template_kwargs",
        "at most 16",
    ),
]


@pytest.mark.parametrize(("body", "param", "message"), BAD_CHATS)
def test_a_bad_chat_request_is_refused(shared: httpx.Client, body: dict, param: str, message: str):
    check(shared.post(CHAT, json=body), 400, param, message)


BAD_JSON = [
    b"",
    b"{",
    b'{"prompt": "x"} x',
    b'{"prompt": "x", "temperature": NaN}',
    b'{"prompt": "x", "temperature": Infinity}',
    b'{"prompt": "x", "temperature": -Infinity}',
    b'{"prompt": "\\ud800"}',
    b'{"prompt": "\xff"}',
    b'{"prompt": "\xed\xa0\x80"}',
    b"[" * 2000,
    b'{"prompt": ' + b"[" * 1000 + b"]" * 1000 + b"}",
    b'{"a":' * 400 + b"1" + b"}" * 400,
    b'{"seed": ' + b"1" * 4000 + b'0" }',
    '{"prompt": "x"}'.encode("utf-16"),
]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("body", BAD_JSON, ids=[repr(body[:40]) for body in BAD_JSON])
def test_a_body_that_is_not_json_is_refused(shared: httpx.Client, path: str, body: bytes):
    reply = shared.post(path, content=body, headers={"content-type": "application/json"})
    check(reply, 400, None, "the body is not valid JSON", "invalid_json")


@pytest.mark.parametrize("body", ["[]", '"x"', "1", "null", "true"])
def test_a_body_that_is_no_object_is_refused(shared: httpx.Client, body: str):
    reply = shared.post(CHAT, content=body, headers={"content-type": "application/json"})
    check(reply, 400, None, "it must be a JSON object", "invalid_type")


def test_a_number_beyond_floats_is_refused(shared: httpx.Client):
    body = '{"prompt": "x", "temperature": 1e999}'
    reply = shared.post(COMPLETIONS, content=body, headers={"content-type": "application/json"})
    check(reply, 400, "temperature", "finite number")
    body = '{"prompt": "x", "logit_bias": {"1": -1e999}}'
    reply = shared.post(COMPLETIONS, content=body, headers={"content-type": "application/json"})
    check(reply, 400, "logit_bias[1]", "finite number")


def test_a_long_value_is_cut_in_the_message(shared: httpx.Client):
    reply = shared.post(COMPLETIONS, json={"prompt": "x", "temperature": "y" * 3000})
    check(reply, 400, "temperature", "yyy...yyy")


@pytest.mark.parametrize("content_type", [None, "text/plain", "application/x-www-form-urlencoded"])
def test_a_body_not_declared_as_json_is_refused(shared: httpx.Client, content_type: str | None):
    headers = {} if content_type is None else {"content-type": content_type}
    reply = shared.post(COMPLETIONS, content=b'{"prompt": "x"}', headers=headers)
    check(reply, 415, None, "must be application/json", "unsupported_media_type")


def test_an_unknown_model_is_not_found(shared: httpx.Client):
    for reply in (
        shared.post(COMPLETIONS, json={"model": "gpt-4", "prompt": "x"}),
        shared.post(CHAT, json={"model": "gpt-4", "messages": HELLO}),
        shared.get("/v1/models/gpt-4"),
    ):
        check(
            reply, 404, "model", "'gpt-4' does not exist here; this server serves 'fake'", "model_not_found"
        )
    check(shared.get("/v1/models/"), 404, "model", "names no model", "model_not_found")


@pytest.mark.parametrize(
    "path", ["/web", "/v1", "/v1/completion", "/v1/completions/", "/docs", "/%00%ff", "/v1/embeddings"]
)
def test_an_unknown_route_is_not_found(shared: httpx.Client, path: str):
    check(shared.get(path), 404, None, "no such route", "not_found")


def test_a_wrong_method_is_refused(shared: httpx.Client):
    reply = shared.get(COMPLETIONS)
    check(reply, 405, None, "no such method", "method_not_allowed")
    assert reply.headers["allow"] == "POST"
    check(shared.post("/v1/models", json={}), 405, None, "no such method")
    check(shared.delete("/health"), 405, None, "no such method")


def test_a_declared_body_over_the_limit_is_refused(shared: httpx.Client):
    reply = shared.post(COMPLETIONS, json={"prompt": "x" * LIMIT})
    check(reply, 413, None, f"at most {LIMIT} bytes", "request_too_large")


@pytest.mark.parametrize("size", [LIMIT + 1, 3 * LIMIT, 100 * LIMIT])
def test_a_streamed_body_over_the_limit_is_refused(shared: httpx.Client, size: int):
    def chunks() -> Iterator[bytes]:
        yield b'{"prompt": "'
        for _ in range(size // 512):
            yield b"x" * 512
        yield b'"}'

    reply = shared.post(COMPLETIONS, content=chunks(), headers={"content-type": "application/json"})
    check(reply, 413, None, f"at most {LIMIT} bytes", "request_too_large")


def raw_exchange(server: RunningServer, *headers: str, body: bytes) -> bytes:
    lines = [f"POST {COMPLETIONS} HTTP/1.1", "host: x", "content-type: application/json", "connection: close"]
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE) as sock:
        sock.sendall("\r\n".join([*lines, *headers, "\r\n"]).encode() + body)
        reply = bytearray()
        while part := sock.recv(2**16):
            reply += part
    return bytes(reply)


def test_a_client_that_sends_too_much_at_once_still_reads_the_refusal(serve):
    server = serve(max_request_bytes=2**18)
    size = 2**20
    reply = raw_exchange(server, f"content-length: {size}", body=b"x" * size)
    assert reply.startswith(b"HTTP/1.1 413 ")
    assert b"at most 262144 bytes" in reply


def test_a_client_that_asks_first_is_refused_before_it_sends(serve):
    server = serve(max_request_bytes=100)
    reply = raw_exchange(server, "content-length: 101", "expect: 100-continue", body=b"")
    assert reply.startswith(b"HTTP/1.1 413 ")


def test_a_body_of_exactly_the_limit_is_read(shared: httpx.Client):
    body = json.dumps({"prompt": ""})
    body = json.dumps({"prompt": "x" * (LIMIT - len(body))})
    assert len(body) == LIMIT
    reply = shared.post(COMPLETIONS, content=body, headers={"content-type": "application/json"})
    check(reply, 400, "prompt", "prompt has more than 64 tokens", "context_length_exceeded")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (COMPLETIONS, {"prompt": ["x", "y" * 65]}, "prompt"),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 65}]}, "messages"),
        ("/generate", {"text": "x" * 65}, "text"),
    ],
)
def test_a_text_that_no_context_holds_is_not_even_encoded(
    shared: httpx.Client, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any], param: str
):
    encode = ByteTokenizer.encode

    def short_only(self: ByteTokenizer, text: str, add_special_tokens: bool = True) -> list[int]:
        assert len(text) < 65
        return encode(self, text, add_special_tokens)

    monkeypatch.setattr(ByteTokenizer, "encode", short_only)
    reply = shared.post(path, json=body)
    check(reply, 400, param, f"{param} has more than 64 tokens", "context_length_exceeded")


def test_every_reply_has_a_request_id(shared: httpx.Client):
    ids = {shared.get("/health").headers["x-request-id"], shared.get("/nope").headers["x-request-id"]}
    assert len(ids) == 2


def test_health(serve, engine: FakeEngine):
    server = serve()
    assert httpx.get(server.url + "/health").json() == {"status": "ok"}
    assert httpx.head(server.url + "/health").status_code == 200
    engine.is_healthy = False
    check(httpx.get(server.url + "/health"), 503, None, "not healthy", "engine_dead")


def test_the_schema_documents_the_bounds(shared: httpx.Client):
    schema = shared.get("/openapi.json").json()
    assert set(schema["paths"]) >= {COMPLETIONS, CHAT, "/v1/models", "/v1/models/{model_id}", "/health"}
    reference = schema["paths"][CHAT]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    chat = schema["components"]["schemas"][reference.rpartition("/")[2]]
    assert chat["properties"]["n"]["maximum"] == 8
    assert chat["properties"]["messages"]["maxItems"] == 4096
    assert chat["required"] == ["messages"]
    assert "anyOf" in schema["components"]["schemas"]["CompletionRequest"]["properties"]["prompt"]


@pytest.mark.parametrize("schema", [CompletionRequest, ChatCompletionRequest])
def test_the_documented_bounds_are_the_engines(schema: type):
    fields = schema.model_json_schema()["properties"]
    for name in (
        "temperature", "top_p", "top_k", "min_p", "seed", "repetition_penalty", "presence_penalty",
        "frequency_penalty", "min_tokens", "max_tokens",
    ):  # fmt: skip
        bounds = fields[name] if "maximum" in fields[name] else fields[name]["anyOf"][0]
        SamplingParams(**{name: bounds["maximum"]})
        with pytest.raises(RequestError):
            SamplingParams(**{name: bounds["maximum"] + 1})
        # 0 tokens are for echo, without a token of the engine's in the answer.
        if (name, bounds["minimum"]) != ("max_tokens", 0):
            SamplingParams(**{name: bounds["minimum"]})
            with pytest.raises(RequestError):
                SamplingParams(**{name: bounds["minimum"] - 1})
    limits = Limits(context_length=64, vocab_size=8)
    low, high = (fields["priority"][bound] for bound in ("minimum", "maximum"))
    for priority in (low, high):
        make_request("r", [1], SamplingParams(), limits, seed=0, priority=priority)
    for priority in (low - 1, high + 1):
        with pytest.raises(RequestError, match="priority is"):
            make_request("r", [1], SamplingParams(), limits, seed=0, priority=priority)
    longest = fields["cache_salt"]["anyOf"][0]["maxLength"]
    make_request("r", [1], SamplingParams(), limits, seed=0, cache_salt="s" * longest)
    with pytest.raises(RequestError, match="cache_salt must"):
        make_request("r", [1], SamplingParams(), limits, seed=0, cache_salt="s" * (longest + 1))


def test_the_official_client_raises_its_own_errors(client: openai.OpenAI, engine: FakeEngine):
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model="fake", prompt="x", temperature=-1)
    assert (bad.value.param, bad.value.code, bad.value.type) == (
        "temperature",
        "invalid_value",
        "invalid_request_error",
    )
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="other", messages=[{"role": "user", "content": "x"}])
    assert missing.value.code == "model_not_found"
    engine.submit_error = EngineDeadError("the engine has stopped")
    with pytest.raises(openai.InternalServerError) as dead:
        client.completions.create(model="fake", prompt="x")
    assert (dead.value.status_code, dead.value.code) == (503, "engine_dead")
    assert engine.submitted == {}


def test_a_full_queue_says_when_to_come_back(serve):
    small = FakeEngine(max_queued=3)
    small.allow(0)
    server = RunningServer(small)
    # The fourth completion finds the queue full; the three before it must not stay.
    for stream in (False, True):
        body = {"prompt": ["a", "b"], "n": 2, "stream": stream}
        reply = httpx.post(server.url + COMPLETIONS, json=body)
        check(reply, 503, None, "the queue is full", "queue_full")
        assert reply.headers["retry-after"] == "7"
        small.wait_until(lambda: not small.live)
    assert len(small.submitted) == 6
    assert small.aborts == dict.fromkeys(small.submitted, 1)
    server.stop()
    small.shutdown()


def test_more_completions_than_the_queue_holds_are_never_accepted(serve):
    server = serve(max_queued_requests=3)
    reply = httpx.post(server.url + COMPLETIONS, json={"prompt": ["a", "b"], "n": 2})
    check(reply, 400, "prompt", "asks for 4 completions; at most 3")


def test_an_engine_error_is_a_500_without_internals(
    http: httpx.Client, engine: FakeEngine, caplog: pytest.LogCaptureFixture
):
    engine.script = lambda prompt, params: iter([97, RuntimeError("0xdeadbeef")])
    with caplog.at_level(logging.ERROR, "hybridjax.http"):
        reply = http.post(COMPLETIONS, json={"prompt": "x", "n": 2})
    check(reply, 500, None, "log has the details", "internal_error")
    assert "deadbeef" not in reply.text
    assert reply.headers["x-request-id"] in reply.text
    assert "0xdeadbeef" in caplog.text and reply.headers["x-request-id"] in caplog.text


@pytest.mark.parametrize("stream", [False, True])
def test_a_grammar_beyond_a_limit_is_the_requests_fault(
    http: httpx.Client, engine: FakeEngine, caplog: pytest.LogCaptureFixture, stream: bool
):
    engine.script = lambda prompt, params: iter([97, GrammarError("2034 items; max is 2000")])
    reply = http.post(COMPLETIONS, json={"prompt": "x", "regex": "a+", "stream": stream})
    if stream:
        error = json.loads(reply.text.rpartition("data: ")[2])["error"]
        assert (error["code"], error["message"]) == ("grammar_too_complex", "2034 items; max is 2000")
    else:
        check(reply, 400, None, "2034 items; max is 2000", "grammar_too_complex")
    assert not any(record.exc_info for record in caplog.records)


@pytest.mark.parametrize("stream", [False, True])
def test_a_choice_that_fails_ends_the_others(http: httpx.Client, engine: FakeEngine, stream: bool):
    def by_seed(prompt: Any, params: SamplingParams) -> Iterator[Any]:
        return iter([RuntimeError("no")]) if params.seed == 1 else alphabet(prompt, params)

    engine.script = by_seed
    body = {"prompt": "x", "n": 2, "seed": 0, "max_tokens": 2**19, "stream": stream}
    reply = http.post(COMPLETIONS, json=body)
    assert reply.status_code == (200 if stream else 500)
    assert "log has the details" in reply.text
    engine.wait_until(lambda: not engine.live)
    [endless] = [i for i, (_, params) in engine.submitted.items() if params.seed == 0]
    assert engine.aborts == {endless: 1}


def test_an_engine_error_ends_a_stream_with_an_error_event(
    client: openai.OpenAI, http: httpx.Client, engine: FakeEngine
):
    engine.script = lambda prompt, params: iter([97, 98, RuntimeError("0xdeadbeef")])
    text = ""
    with pytest.raises(openai.APIError) as failed:
        for chunk in client.completions.create(model="fake", prompt="x", stream=True):
            text += chunk.choices[0].text
    assert text in ("a", "ab", "")
    assert "log has the details" in failed.value.message
    reply = http.post(COMPLETIONS, json={"prompt": "x", "stream": True})
    last = reply.text.removesuffix("\n\n").rpartition("\n\n")[2]
    assert json.loads(last.removeprefix("data: "))["error"]["type"] == "server_error"
    assert "[DONE]" not in reply.text


def test_a_bug_is_a_500_without_internals(
    http: httpx.Client, engine: FakeEngine, caplog: pytest.LogCaptureFixture
):
    engine.submit_error = ZeroDivisionError("secret")
    with caplog.at_level(logging.ERROR, "hybridjax.http"):
        for body in ({"prompt": "x"}, {"prompt": "x", "stream": True}):
            reply = http.post(COMPLETIONS, json=body)
            check(reply, 500, None, "log has the details", "internal_error")
            assert "secret" not in reply.text
    assert "ZeroDivisionError: secret" in caplog.text
