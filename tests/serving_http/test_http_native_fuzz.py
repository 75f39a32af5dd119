"""Random requests to the native routes: the server may refuse them, it may never fail on them."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from http_fakes import fuzzed_server
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_http_fuzz import anything, likely, prompts, scalars

from hybridjax.serving.http import native_protocol as protocol

ROUTES = {
    "/generate": (protocol.GenerateRequest, {"text": "x"}),
    "/tokenize": (protocol.TokenizeRequest, {"prompt": "x"}),
    "/detokenize": (protocol.DetokenizeRequest, {"tokens": [1]}),
    "/abort_request": (protocol.AbortRequest, {"rid": "x"}),
}
SAMPLING = [*protocol.NativeSampling.model_fields, "regex", "stop_regex"]
names = st.text(max_size=3)
sampling = st.dictionaries(st.sampled_from(SAMPLING), st.integers(0, 9) | scalars, max_size=4)
native = likely | {
    **{"text": prompts, "input_ids": prompts, "prompt": prompts, "tokens": prompts},
    **{"rid": names | st.lists(names, max_size=3), "top_logprobs_num": st.integers(0, 21)},
    "sampling_params": sampling | st.lists(sampling, max_size=3),
}


TRIED: set[str] = set()  # paths whose test ran in this process


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    with fuzzed_server(context_length=256) as (engine, client):
        yield client
    if "/generate" in TRIED:
        assert len(engine.submitted) > 20


@st.composite
def bodies(draw: st.DrawFn, path: str) -> Any:
    schema, start = ROUTES[path]
    body = dict(start) if draw(st.integers(0, 9)) else {}
    for name in draw(st.lists(st.sampled_from([*schema.model_fields, "lora_path"]), max_size=3, unique=True)):
        wild = draw(st.integers(0, 3)) == 0
        body[name] = draw(anything if wild else native.get(name, scalars))
    return body


def check(reply: httpx.Response) -> None:
    assert reply.status_code in (200, 400), (reply.status_code, reply.text)
    if reply.status_code == 200 and "event-stream" in reply.headers["content-type"]:
        assert reply.text.endswith("data: [DONE]\n\n")
        for event in reply.text.split("\n\n")[:-2]:
            assert "error" not in json.loads(event.removeprefix("data: "))
    elif reply.status_code == 200:
        assert reply.json()
    else:
        error = reply.json()["error"]
        assert error["message"] and error["type"] == "invalid_request_error"


@pytest.mark.parametrize("path", list(ROUTES))
@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_near_misses_never_fail_the_server(http: httpx.Client, path: str, data: st.DataObject):
    TRIED.add(path)
    body = json.dumps(data.draw(bodies(path)))
    check(http.post(path, content=body, headers={"content-type": "application/json"}))


@pytest.mark.parametrize("path", list(ROUTES))
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(value=anything)
def test_any_json_never_fails_the_server(http: httpx.Client, path: str, value: Any):
    check(http.post(path, content=json.dumps(value), headers={"content-type": "application/json"}))
