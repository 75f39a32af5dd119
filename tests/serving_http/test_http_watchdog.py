"""The command with an engine that hangs: clients are told, and a supervisor sees a status of its own."""

import threading

import httpx
import pytest
from http_fakes import PATIENCE
from test_http_serve_command import Process

from hybridjax.configs.serving import ServerConfig
from hybridjax.errors import ConfigError
from hybridjax.serve import EXIT_HUNG

HANGS = {"prompt": [0, 0, 7], "max_tokens": 9}


def test_a_hung_engine_ends_the_process_after_telling_everybody():
    server = Process("--watchdog-timeout", "0.5")
    try:
        with httpx.Client(base_url=server.url, timeout=PATIENCE) as client:
            with client.stream("POST", "/v1/completions", json=HANGS | {"stream": True}) as stream:
                lines = stream.iter_lines()
                assert next(lines).startswith('data: {"id"')
                whole: list[httpx.Response] = []
                other = {"prompt": "x", "max_tokens": 9}
                ask = threading.Thread(
                    target=lambda: whole.append(
                        httpx.post(server.url + "/v1/completions", json=other, timeout=PATIENCE)
                    )
                )
                ask.start()
                last = [line for line in lines if line][-1]
                assert '"error"' in last and '"code":"internal_error"' in last
                reply = client.get("/health")
                assert (reply.status_code, reply.json()["error"]["code"]) == (503, "engine_dead")
            ask.join(PATIENCE)
            assert [reply.status_code for reply in whole] == [500]
        code, out, err = server.end()
    finally:
        server.kill()
    assert code == EXIT_HUNG == 75
    assert "the engine has made no progress for 0.5 seconds; what every thread is doing:" in err
    assert "Thread 'fake-engine':" in err
    assert "ending the process with status 75" in err
    # The ordinary way out was not taken.
    assert out == ""


def test_without_a_timeout_nothing_is_watched():
    server = Process("--watchdog-timeout", "0")
    try:
        with httpx.stream(
            "POST", server.url + "/v1/completions", json=HANGS | {"stream": True}, timeout=PATIENCE
        ) as stream:
            next(stream.iter_lines())
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(server.url + "/v1/completions", json={"prompt": "x"}, timeout=1.5)
            assert httpx.get(server.url + "/health", timeout=PATIENCE).status_code == 200
    finally:
        server.kill()


def test_the_timeout_is_not_negative():
    with pytest.raises(ConfigError, match="watchdog_timeout is -1"):
        ServerConfig(watchdog_timeout=-1)
