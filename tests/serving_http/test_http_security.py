"""What clients of other servers were able to do; docs/security.md says which test stands for what."""

import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from http_fakes import PATIENCE, FakeEngine, RunningServer
from starlette.routing import Route

from hybridjax.configs.serving import EngineConfig, ServerConfig

API, ADMIN = "api-key-5b1c", "admin-key-99f2"
CODE = {"a": "base64 of a pickled function"}
GENERATING = {
    "/v1/completions": {"prompt": "x"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
    "/generate": {"text": "x"},
}


@pytest.mark.parametrize("path", GENERATING)
@pytest.mark.parametrize("field", ["custom_logit_processor", "lora_path"])
def test_requests_carry_no_code_and_no_places(http: httpx.Client, engine: FakeEngine, path: str, field: str):
    reply = http.post(path, json=GENERATING[path] | {field: CODE})
    assert reply.status_code == 400 and reply.json()["error"]["param"] == field
    assert engine.submitted == {}


@pytest.mark.parametrize(
    ("path", "field"),
    [
        ("/v1/completions", "prompt_embeds"),
        ("/v1/chat/completions", "prompt_embeds"),
        ("/generate", "input_embeds"),
    ],
)
def test_tensors_are_no_prompts(http: httpx.Client, engine: FakeEngine, path: str, field: str):
    reply = http.post(path, json=GENERATING[path] | {field: [[0.5]]})
    assert reply.status_code == 400 and engine.submitted == {}


def names(schema: Any) -> Iterator[str]:
    if isinstance(schema, dict):
        yield from schema.get("properties", {})
        for value in schema.values():
            yield from names(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from names(value)


def test_no_field_names_a_place_of_the_server(http: httpx.Client):
    fields = set(names(http.get("/openapi.json").json()["components"]))
    assert {"prompt", "messages", "rid", "url"} <= fields
    # The address of an image holds the image itself; see tests/images/test_data_url.py.
    suspects = {f for f in fields if any(word in f for word in ("path", "dir", "file", "url", "uri"))}
    assert suspects <= {"url", "image_url"}


def test_no_route_profiles_loads_or_writes(http: httpx.Client, server: RunningServer):
    paths = " ".join(route.path for route in server.app.routes if isinstance(route, Route))
    for word in ("profile", "load_lora", "weights", "update", "dump", "docs"):
        assert word not in paths


def test_no_answer_shows_a_key(serve: Any):
    server = serve(api_key=API, admin_api_key=ADMIN, enable_metrics=True)
    routes = [
        route for route in server.app.routes if isinstance(route, Route) and "GET" in (route.methods or ())
    ]
    assert len(routes) >= 10
    for route in routes:
        path = route.path.replace("{model_id:path}", "fake")
        headers = {"authorization": f"Bearer {ADMIN}"}
        reply = httpx.get(server.url + path, headers=headers, timeout=PATIENCE)
        assert reply.status_code == 200, path
        assert API not in reply.text + str(reply.headers) and ADMIN not in reply.text + str(reply.headers)


@pytest.mark.parametrize(
    ("site", "status"),
    [("cross-site", 403), ("same-site", 403), ("x", 403), ("same-origin", 200), ("none", 200), (None, 200)],
)
def test_pages_of_other_sites_change_nothing(
    http: httpx.Client, engine: FakeEngine, site: str | None, status: int
):
    headers = {} if site is None else {"sec-fetch-site": site}
    assert http.post("/flush_cache", headers=headers).status_code == status
    assert engine.flushes == (status == 200)
    # A link to the page is followed.
    assert http.get("/", headers=headers).status_code == 200


def test_only_this_machine_is_listened_to_by_default():
    assert ServerConfig().host == "127.0.0.1"


def test_no_setting_runs_code_of_a_checkpoint():
    assert not [name for name in EngineConfig.__dataclass_fields__ if "remote" in name or "trust" in name]


def test_a_huge_header_is_refused(http: httpx.Client, server: RunningServer):
    with socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE) as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nX-Long: " + b"y" * 100_000)
        assert sock.recv(2**16).startswith(b"HTTP/1.1 400 ")
    assert http.get("/health").status_code == 200


def test_a_bound_holds_over_all_prompts_of_a_request(http: httpx.Client, engine: FakeEngine):
    assert http.post("/v1/completions", json={"prompt": ["x"] * 64, "n": 8}).status_code == 400
    assert http.post("/generate", json={"text": ["x"] * 64, "sampling_params": {"n": 8}}).status_code == 400
    assert engine.submitted == {}
