import asyncio
import json
import random
import socket
import struct
import threading
from collections.abc import Iterator
from itertools import islice
from typing import Any

import httpx
import pytest
from http_fakes import EOS, PATIENCE, ByteTokenizer, FakeEngine, RunningServer, alphabet

from hybridjax.serving.api import SamplingParams
from hybridjax.serving.http import server as server_module
from hybridjax.serving.http.generation import Generation, Job

ENDLESS = 2**19


def request_bytes(path: str = "/v1/completions", **body: Any) -> bytes:
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(content)}\r\n\r\n".encode() + content


def connect(server: RunningServer, **body: Any) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE)
    sock.sendall(request_bytes(**body))
    return sock


def reset(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


def half_close(sock: socket.socket) -> None:
    sock.shutdown(socket.SHUT_WR)


def read_all(sock: socket.socket) -> bytes:
    received = bytearray()
    while part := sock.recv(2**16):
        received += part
    return bytes(received)


@pytest.mark.parametrize("leave", [socket.socket.close, reset, half_close])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_client_that_leaves_aborts_each_of_its_requests_once(
    server: RunningServer, engine: FakeEngine, leave: Any, stream: bool, path: str
):
    engine.allow(6)
    prompt = {"messages": [{"role": "user", "content": "x"}]} if "chat" in path else {"prompt": "x"}
    sock = connect(server, path=path, **prompt, n=3, stream=stream, max_tokens=ENDLESS)
    engine.wait_until(lambda: engine.emitted == 6)
    assert len(engine.live) == 3
    leave(sock)
    engine.wait_until(lambda: not engine.live)
    server.settle()
    assert len(engine.submitted) == 3
    assert engine.aborts == dict.fromkeys(engine.submitted, 1)
    sock.close()


@pytest.mark.parametrize("stream", [False, True])
def test_what_has_finished_is_not_aborted(server: RunningServer, engine: FakeEngine, stream: bool):
    def by_seed(prompt: Any, params: SamplingParams) -> Iterator[int]:
        return iter([EOS]) if params.seed == 1 else alphabet(prompt, params)

    engine.script = by_seed
    engine.allow(6)
    sock = connect(server, prompt="x", n=3, seed=0, stream=stream, max_tokens=ENDLESS)
    engine.wait_until(lambda: engine.emitted == 6)
    sock.close()
    engine.wait_until(lambda: not engine.live)
    server.settle()
    [finished] = [i for i, (_, params) in engine.submitted.items() if params.seed == 1]
    assert engine.aborts == dict.fromkeys(set(engine.submitted) - {finished}, 1)


def test_a_finished_request_is_never_aborted(http: httpx.Client, server: RunningServer, engine: FakeEngine):
    for stream in (False, True):
        http.post("/v1/completions", json={"prompt": "x", "n": 4, "stream": stream})
    server.settle()
    assert len(engine.submitted) == 8
    assert engine.aborts == {}


class SlowTokenizer(ByteTokenizer):
    """Takes until ``go`` for the text "slow"."""

    def __init__(self):
        self.tokenising, self.go = threading.Event(), threading.Event()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        if text == "slow":
            self.tokenising.set()
            assert self.go.wait(PATIENCE)
        return super().encode(text, add_special_tokens)


def watch(monkeypatch: pytest.MonkeyPatch, method: str) -> threading.Event:
    """An event that tells when a method of some Generation has run."""
    original, called = getattr(Generation, method), threading.Event()

    def wrapped(self: Generation) -> Any:
        result = original(self)
        called.set()
        return result

    monkeypatch.setattr(Generation, method, wrapped)
    return called


def test_a_client_that_leaves_while_its_prompt_is_tokenised_submits_nothing(
    serve, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
):
    tokenizer = SlowTokenizer()
    server = serve(tokenizer=tokenizer)
    closed = watch(monkeypatch, "close")
    sock = connect(server, prompt="slow")
    assert tokenizer.tokenising.wait(PATIENCE)
    # Tokenising does not hold up anybody else.
    assert httpx.get(server.url + "/health").status_code == 200
    sock.close()
    assert closed.wait(PATIENCE)
    tokenizer.go.set()
    server.settle()
    assert engine.submitted == {}


def test_a_prompt_still_being_tokenised_when_the_drain_ends_is_aborted(
    serve, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
):
    tokenizer = SlowTokenizer()
    server = serve(tokenizer=tokenizer, drain_timeout=0.0)
    aborted = watch(monkeypatch, "abort")
    sock = connect(server, prompt="slow", n=2, max_tokens=ENDLESS)
    assert tokenizer.tokenising.wait(PATIENCE)
    server.server.stop()
    assert aborted.wait(PATIENCE)
    tokenizer.go.set()
    assert read_all(sock).count(b'"finish_reason":"abort"') == 2
    sock.close()
    server.thread.join(PATIENCE)
    assert engine.aborts == dict.fromkeys(engine.submitted, 1)


def test_a_client_that_leaves_during_its_upload_leaves_nothing(server: RunningServer, engine: FakeEngine):
    sock = socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE)
    sock.sendall(request_bytes(prompt="x" * 1000)[:-500])
    assert httpx.get(server.url + "/health").status_code == 200
    sock.close()
    server.settle()
    assert engine.submitted == {}


def test_a_slow_reader_blocks_nobody_and_misses_nothing(server: RunningServer, engine: FakeEngine):
    tokens = 60_000
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.settimeout(PATIENCE)
    sock.connect(("127.0.0.1", server.port))
    sock.sendall(request_bytes(prompt="x", stream=True, max_tokens=tokens))
    # The engine gets to the end although nobody reads.
    engine.wait_until(lambda: engine.emitted == tokens)
    body = {"prompt": "y", "max_tokens": 3}
    reply = httpx.post(server.url + "/v1/completions", json=body)
    assert reply.json()["choices"][0]["text"] == "abc"
    received = bytearray()
    while not received.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
        received += sock.recv(2**16)
    sock.close()
    lines = [line for line in bytes(received).split(b"\n") if line.startswith(b"data: {")]
    chunks = [json.loads(line[6:])["choices"][0] for line in lines]
    letters = "abcdefghijklmnopqrstuvwxyz"
    assert "".join(chunk["text"] for chunk in chunks) == (letters * (tokens // 26 + 1))[:tokens]
    # Events that found no room were merged, not queued.
    assert len(chunks) < tokens
    assert chunks[-1]["finish_reason"] == "length"


def test_64_clients_with_random_aborts_leave_nothing(server: RunningServer, engine: FakeEngine):
    rng = random.Random(0)
    # Bytes after which a client leaves; None: it stays to the end.
    plans = [(rng.random() < 0.5, rng.randint(1, 3), rng.choice([0, 1, 2000, None])) for _ in range(192)]

    async def client(stream: bool, n: int, leave_after: int | None) -> str:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        stays = leave_after is None
        body = {"prompt": "x", "n": n, "seed": 0, "max_tokens": 40 if stays else ENDLESS, "stream": stream}
        writer.write(request_bytes(**body).replace(b"host: x", b"host: x\r\nconnection: close"))
        await writer.drain()
        reply = b""
        if stays:
            reply = await reader.read()
        elif stream and leave_after:
            reply = await reader.readexactly(leave_after)
        writer.transport.abort()
        return reply.decode()

    async def run() -> list[str]:
        at_once = asyncio.Semaphore(64)

        async def limited(plan: tuple) -> str:
            async with at_once:
                return await client(*plan)

        return await asyncio.gather(*map(limited, plans))

    replies = asyncio.run(run())
    engine.wait_until(lambda: not engine.live)
    server.settle()
    assert engine.ends == dict.fromkeys(engine.submitted, 1)
    endless = {i for i, (_, params) in engine.submitted.items() if params.max_tokens == ENDLESS}
    assert len(endless) > 40
    assert engine.aborts == dict.fromkeys(endless, 1)
    stayed = [(n, reply) for (_, n, leave_after), reply in zip(plans, replies) if leave_after is None]
    assert len(stayed) > 20
    letters = "abcdefghijklmnopqrstuvwxyz" * 2
    for n, reply in stayed:
        assert texts_of(reply) == {i: letters[i : i + 40] for i in range(n)}


def texts_of(reply: str) -> dict[int, str]:
    """Choice -> text of a raw reply, streamed or not."""
    texts: dict[int, str] = {}
    head, _, body = reply.partition("\r\n\r\n")
    lines = [line[6:] for line in body.split("\n") if line.startswith("data: {")]
    for line in lines if "event-stream" in head else [body]:
        for choice in json.loads(line)["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    return texts


def test_a_drain_lets_running_requests_finish_and_refuses_new_ones(serve, engine: FakeEngine):
    server = serve(drain_timeout=PATIENCE)
    engine.allow(2)
    sock = connect(server, prompt="x", max_tokens=5, stream=True)
    engine.wait_until(lambda: engine.emitted == 2)
    server.server.stop()
    with httpx.Client(base_url=server.url, timeout=PATIENCE) as http:
        refused = http.post("/v1/completions", json={"prompt": "x"})
        health = http.get("/health")
    for reply in (refused, health):
        assert reply.status_code == 503
        assert reply.json()["error"]["code"] == "draining"
        assert reply.headers["retry-after"] == "5"
    engine.allow(None)
    reply = read_all(sock).decode()
    sock.close()
    assert texts_of(reply) == {0: "abcde"}
    assert "data: [DONE]" in reply
    server.thread.join(PATIENCE)
    assert not server.thread.is_alive()
    assert engine.aborts == {}
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE)


def test_a_drain_that_takes_too_long_aborts_the_rest(serve, engine: FakeEngine):
    server = serve(drain_timeout=0.0)
    engine.allow(4)
    streamed = connect(server, prompt="x", max_tokens=ENDLESS, stream=True)
    whole = connect(server, prompt="x", max_tokens=ENDLESS)
    engine.wait_until(lambda: engine.emitted == 4 and len(engine.live) == 2)
    server.server.stop()
    assert b'"finish_reason":"abort"' in read_all(streamed)
    assert b'"finish_reason":"abort"' in read_all(whole)
    streamed.close()
    whole.close()
    server.thread.join(PATIENCE)
    assert not server.thread.is_alive()
    assert engine.aborts == dict.fromkeys(engine.submitted, 1)


def test_a_client_that_never_reads_cannot_hold_up_the_end(
    serve, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("hybridjax.serving.http.generation.ABORT_GRACE", 0.05)
    monkeypatch.setattr(server_module, "SHUTDOWN_GRACE", 0.05)
    server = serve(drain_timeout=0.0)
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.connect(("127.0.0.1", server.port))
    sock.sendall(request_bytes(prompt="x", stream=True, max_tokens=60_000))
    engine.wait_until(lambda: engine.emitted == 60_000)
    server.server.stop()
    server.thread.join(PATIENCE)
    assert not server.thread.is_alive()
    assert server.lifecycle.running == set()
    sock.close()


def test_an_engine_that_outruns_the_loop_is_merged(engine: FakeEngine):
    async def run() -> list:
        generation = Generation(engine, "r", incremental=True)
        engine.allow(0)
        generation.submit([Job([1], SamplingParams(max_tokens=30)), Job([1], SamplingParams(max_tokens=3))])
        engine.allow(None)
        # Nothing is taken until the engine is through.
        engine.wait_until(lambda: sum(engine.ends.values()) == 2)
        first = await generation.next()
        assert await generation.next() == []
        generation.close()
        return first

    outputs = dict(asyncio.run(run()))
    assert outputs[1].text == "abc"
    assert len(outputs[0].token_ids) == 30
    assert outputs[0].token_ids == tuple(islice(alphabet([], SamplingParams()), 30))
    assert outputs[0].finish_reason == "length"
    assert engine.aborts == {}


def test_events_after_the_loop_has_closed_do_no_harm(engine: FakeEngine):
    async def start() -> Generation:
        generation = Generation(engine, "r", incremental=True)
        engine.allow(0)
        generation.submit([Job([1], SamplingParams(max_tokens=3))])
        return generation

    asyncio.run(start())
    engine.allow(None)
    engine.wait_until(lambda: engine.ends["r-0"] == 1)
