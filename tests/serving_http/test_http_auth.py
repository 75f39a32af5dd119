import hashlib
import logging
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from http_fakes import PATIENCE, FakeEngine, RunningServer
from starlette.routing import Route

from hybridjax import serve as command
from hybridjax.configs.serving import ServerConfig
from hybridjax.errors import ConfigError
from hybridjax.serving.http.auth import ORDINARY, PUBLIC, Keys, bearer_token

API, ADMIN = "api-key-5b1c", "admin-key-99f2"
BOTH = {"api_key": API, "admin_api_key": ADMIN}


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.fixture(scope="module")
def locked() -> Iterator[RunningServer]:
    """One server with both keys."""
    engine = FakeEngine()
    server = RunningServer(engine, **BOTH)
    yield server
    server.stop()
    engine.shutdown()


def refused(reply: httpx.Response) -> bool:
    if reply.status_code != 401:
        return False
    error = reply.json()["error"]
    assert (error["type"], error["code"], error["param"]) == ("authentication_error", "invalid_api_key", None)
    assert reply.headers["www-authenticate"] == "Bearer"
    assert API not in reply.text and ADMIN not in reply.text
    return True


def test_every_route_is_public_or_refuses_without_a_key(locked: RunningServer):
    routes = [route for route in locked.app.routes if isinstance(route, Route)]
    assert {"/health", "/v1/completions", "/v1/models/{model_id:path}", "/openapi.json"} <= {
        route.path for route in routes
    }
    public = set()
    for route in routes:
        path = re.sub(r"{.*?}", "fake", route.path)
        for method in route.methods or ():
            for headers in ({}, bearer("wrong")):
                reply = httpx.request(method, locked.url + path, headers=headers, timeout=PATIENCE)
                if method == "HEAD" and reply.status_code == 401:
                    continue
                if not refused(reply):
                    public.add(path)
    assert public == PUBLIC == {"/health", "/"}


@pytest.mark.parametrize(
    "path", ["/web", "/nope", "/health/", "/healthy", "/health%2f", "/HEALTH", "//health"]
)
def test_what_is_no_route_refuses_too(locked: RunningServer, path: str):
    assert refused(httpx.get(locked.url + path))
    assert refused(httpx.get(locked.url + path, headers=bearer(API)))
    assert httpx.get(locked.url + path, headers=bearer(ADMIN)).status_code == 404


def test_every_ordinary_path_is_a_route(locked: RunningServer):
    paths = {route.path for route in locked.app.routes if isinstance(route, Route)}
    assert paths >= ORDINARY


@pytest.mark.parametrize(
    "values",
    [
        [],
        [API],
        ["Basic " + API],
        ["Bearer"],
        ["Bearer " + API[:-1]],
        ["Bearer " + API + "x"],
        ["Bearer " + API.upper()],
        ["Bearer " + hashlib.sha256(API.encode()).hexdigest()],
        ["Bearer " + API, "Bearer " + API],
        ["Bearer wrong", "Bearer " + API],
    ],
)
def test_what_is_not_the_key(locked: RunningServer, values: list[str]):
    headers = [("authorization", value) for value in values]
    assert refused(httpx.get(locked.url + "/v1/models", headers=headers))


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER", "Bearer  "])
def test_the_key_opens(locked: RunningServer, scheme: str):
    for key in (API, ADMIN):
        reply = httpx.get(locked.url + "/v1/models", headers={"authorization": f"{scheme} {key}"})
        assert reply.json()["data"][0]["id"] == "fake"


def test_the_official_client_sends_the_key(locked: RunningServer):
    with openai.OpenAI(base_url=locked.url + "/v1", api_key=API, max_retries=0) as client:
        assert client.completions.create(model="fake", prompt="x", max_tokens=3).choices[0].text == "abc"
    with openai.OpenAI(base_url=locked.url + "/v1", api_key="wrong", max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError) as error:
            client.completions.create(model="fake", prompt="x")
    assert error.value.code == "invalid_api_key"


def raw(port: int, request: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as sock:
        sock.sendall(request)
        sock.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: sock.recv(2**16), b""))


HOSTS = [b"/health", b"x/health?", b"127.0.0.1:99999/health#", b"", b"@/health", b"\xff", b"a b", b"x:y"]


@pytest.mark.parametrize("host", HOSTS)
def test_a_malformed_host_is_refused(http: httpx.Client, server: RunningServer, host: bytes):
    reply = raw(server.port, b"GET /v1/models HTTP/1.1\r\nHost: " + host + b"\r\n\r\n")
    assert reply.startswith(b"HTTP/1.1 400 ") and b"owned_by" not in reply


@pytest.mark.parametrize("host", [b"localhost", b"localhost:80", b"[::1]:80", b"10.0.0.1", b"a-b.example_.c"])
def test_a_proper_host_is_any_name(http: httpx.Client, server: RunningServer, host: bytes):
    asking = b"GET /v1/models HTTP/1.1\r\nConnection: close\r\nHost: " + host + b"\r\n\r\n"
    assert raw(server.port, asking).startswith(b"HTTP/1.1 200 ")
    assert raw(server.port, b"GET /v1/models HTTP/1.0\r\n\r\n").startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("host", HOSTS)
def test_a_malformed_host_opens_nothing(locked: RunningServer, host: bytes):
    for target in (b"/v1/models", b"http://x/health/../v1/models"):
        reply = raw(locked.port, b"GET " + target + b" HTTP/1.1\r\nHost: " + host + b"\r\n\r\n")
        assert re.match(rb"HTTP/1.1 40[01] ", reply), reply
        assert b"owned_by" not in reply


def test_a_refused_client_that_still_sends_reads_the_refusal(locked: RunningServer):
    reply = httpx.post(locked.url + "/v1/completions", content=b"x" * 2**19, timeout=PATIENCE)
    assert refused(reply)
    asking = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\nExpect: 100-continue\r\n\r\n"
    assert raw(locked.port, asking).startswith(b"HTTP/1.1 401 ")


def test_without_keys_everything_is_open(http: httpx.Client):
    assert http.get("/v1/models").status_code == 200
    assert http.get("/v1/models", headers=bearer("any")).status_code == 200


def test_who_may_do_what():
    api, admin, none = API.encode(), ADMIN.encode(), None
    both = Keys(ServerConfig(**BOTH))
    assert [both.allows_ordinary(token) for token in (api, admin, none, b"")] == [True, True, False, False]
    assert [both.allows_admin(token) for token in (api, admin, none, b"")] == [False, True, False, False]
    only_api = Keys(ServerConfig(api_key=API))
    assert [only_api.allows_admin(token) for token in (api, admin, none)] == [True, False, False]
    only_admin = Keys(ServerConfig(admin_api_key=ADMIN))
    assert [only_admin.allows_ordinary(token) for token in (api, admin, none)] == [True, True, True]
    assert [only_admin.allows_admin(token) for token in (api, admin, none)] == [False, True, False]
    neither = Keys(ServerConfig())
    assert neither.allows_ordinary(none) and neither.allows_admin(none)


def test_a_token_is_read_from_one_header_only():
    header = (b"authorization", b"Bearer a b")
    assert bearer_token({"headers": [header]}) == b"a b"
    assert bearer_token({"headers": [header, header]}) is None


def test_an_admin_key_alone_leaves_the_ordinary_routes_open(serve: Any):
    server = serve(admin_api_key=ADMIN)
    assert httpx.get(server.url + "/v1/models").status_code == 200
    assert refused(httpx.get(server.url + "/nope"))
    assert httpx.get(server.url + "/nope", headers=bearer(ADMIN)).status_code == 404


def test_keys_are_not_logged(serve: Any, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.DEBUG):
        server = serve(**BOTH)
        for key in (API, ADMIN, "wrong-key"):
            httpx.post(server.url + "/v1/completions", json={"prompt": 5}, headers=bearer(key))
    ours = "".join(record.getMessage() for record in caplog.records if record.name.startswith("hybridjax"))
    assert "POST /v1/completions 401" in ours
    assert not any(key in ours for key in (API, ADMIN, "wrong-key"))


def test_keys_are_not_shown_by_the_settings():
    assert API not in repr(ServerConfig(**BOTH)) and ADMIN not in repr(ServerConfig(**BOTH))


@pytest.mark.parametrize("key", ["", "two words", "line\n", "sch\u00fcssel", "\x7f"])
def test_a_key_that_no_header_can_carry_is_refused_without_showing_it(key: str):
    with pytest.raises(ConfigError) as error:
        ServerConfig(api_key=key)
    assert str(error.value) == "api_key must be one or more printable ASCII characters without spaces"


def test_keys_come_from_flags_or_the_environment(monkeypatch: pytest.MonkeyPatch):
    seen: list[ServerConfig] = []
    monkeypatch.setattr(command, "run", lambda config, build: seen.append(config))
    monkeypatch.setenv("HYBRIDJAX_API_KEY", API)
    monkeypatch.setenv("HYBRIDJAX_ADMIN_API_KEY", "")
    command.main([])
    command.main(["--api-key", "flag", "--admin-api-key", ADMIN])
    assert [(config.api_key, config.admin_api_key) for config in seen] == [(API, None), ("flag", ADMIN)]


def test_the_help_does_not_show_a_key_of_the_environment():
    line = [sys.executable, "-m", "hybridjax.serve", "--help"]
    environment = {"HYBRIDJAX_API_KEY": API, "PATH": "/usr/bin", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(line, capture_output=True, text=True, env=environment, check=True)
    assert "--api-key" in done.stdout and "HYBRIDJAX_API_KEY" in done.stdout
    assert API not in done.stdout


def test_the_example_names_the_key_without_showing_it(capsys: pytest.CaptureFixture[str]):
    with socket.create_server(("127.0.0.1", 0)) as sock:
        command._announce(sock, "fake", None, ServerConfig(**BOTH))
    shown = capsys.readouterr().out
    assert '-H "Authorization: Bearer $HYBRIDJAX_API_KEY" -d' in shown
    assert API not in shown and ADMIN not in shown


def test_an_open_server_that_others_can_reach_is_warned_of(caplog: pytest.LogCaptureFixture):
    with socket.create_server(("0.0.0.0", 0)) as sock, caplog.at_level(logging.WARNING, "hybridjax.serve"):
        command._announce(sock, "fake", None, ServerConfig(api_key=API))
        assert caplog.text == ""
        command._announce(sock, "fake", None, ServerConfig())
    assert "anybody who can reach 0.0.0.0 may use this server" in caplog.text
