"""Random requests: the server may refuse them, it may never fail on them."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from http_fakes import fuzzed_server
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hybridjax.serving.http.protocol import ChatCompletionRequest, CompletionRequest

ROUTES = {
    "/v1/completions": (CompletionRequest, {"prompt": "x"}),
    "/v1/chat/completions": (ChatCompletionRequest, {"messages": [{"role": "user", "content": "x"}]}),
}
OTHERS = ["tools", "response_format", "suffix", "functions", "metadata", "tool_choice", "store", "audio"]

numbers = st.integers(-3, 30) | st.integers() | st.floats() | st.sampled_from([2**31, 2**63, -(2**63) - 1])
scalars = st.none() | st.booleans() | numbers | st.text(max_size=8)
keys = st.sampled_from(["role", "content", "type", "text", "1", "97", "include_usage"]) | st.text(max_size=4)
anything = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4),
    max_leaves=12,
)
parts = st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": st.text(max_size=5)}), max_size=2)
messages = st.lists(
    st.fixed_dictionaries(
        {
            "role": st.sampled_from(["system", "user", "assistant", "tool", "developer", "x"]),
            "content": st.text(max_size=9) | parts | anything,
        }
    ),
    max_size=3,
)
token_ids = st.lists(st.integers(-1, 260), max_size=4)
prompts = st.text(max_size=9) | st.lists(st.text(max_size=5), max_size=3) | token_ids | st.lists(token_ids)
likely: dict[str, st.SearchStrategy[Any]] = {
    "model": st.sampled_from(["fake", "", "other"]),
    "prompt": prompts,
    "messages": messages,
    "n": st.integers(0, 9),
    "max_tokens": st.integers(-1, 50),
    "logprobs": st.integers(0, 20) | st.booleans(),
    "top_logprobs": st.integers(0, 20),
    "stop": st.text(max_size=3) | st.lists(st.text(max_size=3), max_size=3),
    "logit_bias": st.dictionaries(st.integers(0, 300).map(str), st.floats(-100, 100), max_size=3),
    "chat_template_kwargs": st.dictionaries(keys | st.just("enable_thinking"), scalars, max_size=2),
    "stream_options": st.fixed_dictionaries({"include_usage": st.booleans()}),
}


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    with fuzzed_server(context_length=64) as (engine, client):
        yield client
    assert len(engine.submitted) > 20


@st.composite
def bodies(draw: st.DrawFn, path: str) -> Any:
    schema, start = ROUTES[path]
    fields = [*schema.model_fields, *OTHERS]
    body = dict(start) if draw(st.integers(0, 9)) else {}
    for name in draw(st.lists(st.sampled_from(fields), max_size=4, unique=True)):
        wild = draw(st.integers(0, 3)) == 0
        body[name] = draw(anything if wild else likely.get(name, scalars))
    return body


def check(reply: httpx.Response) -> None:
    assert reply.status_code in (200, 400, 404), (reply.status_code, reply.text)
    if reply.status_code == 200 and "event-stream" in reply.headers["content-type"]:
        assert reply.text.endswith("data: [DONE]\n\n")
        for event in reply.text.split("\n\n")[:-2]:
            assert "error" not in json.loads(event.removeprefix("data: "))
    elif reply.status_code == 200:
        assert reply.json()["choices"]
    else:
        error = reply.json()["error"]
        assert error["message"] and error["type"] == "invalid_request_error"


@pytest.mark.parametrize("path", list(ROUTES))
@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_near_misses_never_fail_the_server(http: httpx.Client, path: str, data: st.DataObject):
    body = json.dumps(data.draw(bodies(path)))
    check(http.post(path, content=body, headers={"content-type": "application/json"}))


@pytest.mark.parametrize("path", list(ROUTES))
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(value=anything)
def test_any_json_never_fails_the_server(http: httpx.Client, path: str, value: Any):
    check(http.post(path, content=json.dumps(value), headers={"content-type": "application/json"}))


@pytest.mark.parametrize("path", list(ROUTES))
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(body=st.binary(max_size=200))
def test_any_bytes_never_fail_the_server(http: httpx.Client, path: str, body: bytes):
    check(http.post(path, content=body, headers={"content-type": "application/json"}))
