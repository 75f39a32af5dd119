"""Requests made from the server's own OpenAPI schema, valid ones and near misses: none may give a 5xx."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from http_fakes import EOS, FakeEngine, RunningServer
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

PATHS = {
    *("/v1/completions", "/v1/chat/completions", "/generate", "/tokenize", "/detokenize"),
    *("/abort_request", "/flush_cache", "/v1/models", "/v1/models/{model_id}", "/health"),
}
# What no schema can say: which model there is, which tokens, what belongs together. With it put right, the
# other fields are looked at.
SOUND = {
    "/v1/completions": {"model": "fake", "prompt": "x", "n": 1},
    "/v1/chat/completions": {"model": "fake", "messages": [{"role": "user", "content": "x"}], "n": 1},
    "/generate": {"text": "x", "input_ids": None},
    "/detokenize": {"tokens": [65, 66]},
}
NARROWER = ("logit_bias", "tools", "tool_choice", "sampling_params", "max_tokens", "max_completion_tokens")


@pytest.fixture(scope="module")
def fuzzed() -> Iterator[tuple[Any, FakeEngine]]:
    """The schema of a running server, and its engine; healthy to the end, every request ended once."""
    engine = FakeEngine(context_length=256)
    engine.script = lambda prompt, params: iter([*b"ab", EOS])
    server = RunningServer(engine)
    yield schemathesis.openapi.from_url(server.url + "/openapi.json"), engine
    assert httpx.get(server.url + "/health").status_code == 200
    server.settle()
    server.stop()
    engine.shutdown()
    assert engine.ends == dict.fromkeys(engine.submitted, 1)
    # Not all was refused.
    assert len(engine.submitted) > 20, len(engine.submitted)


@pytest.mark.parametrize("path", sorted(PATHS))
@settings(
    max_examples=80,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(data=st.data())
def test_no_request_of_the_schema_fails_the_server(
    fuzzed: tuple[Any, FakeEngine], path: str, data: st.DataObject
):
    schema, _ = fuzzed
    method = "POST" if "POST" in {m.upper() for m in schema[path]} else "GET"
    modes = list(schemathesis.GenerationMode)
    mode = data.draw(st.sampled_from(modes))
    case = data.draw(schema[path][method].as_strategy(generation_mode=mode))
    if isinstance(case.body, dict) and path in SOUND and data.draw(st.integers(0, 3)):
        case.body |= SOUND[path]
        for name in NARROWER:
            case.body.pop(name, None)
    reply = case.call()
    assert reply.status_code < 500, (case.as_curl_command(), reply.text)
    if reply.status_code >= 400:
        assert reply.json()["error"]["message"]


def test_the_schema_describes_every_route_that_clients_use(fuzzed: tuple[Any, FakeEngine]):
    schema, _ = fuzzed
    assert set(schema) >= PATHS
