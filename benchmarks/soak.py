"""``python -m benchmarks.soak``: a server under clients of every kind, and what is left of them afterwards.

Engine, HTTP server and clients share this process, so that pages, slots, sockets, threads and memory can
be counted before and after. The clients finish, hang up, read slowly, abort by name and send what no
server can want. What must hold: each accepted request has exactly one last event and none after it, every
client that stays gets a proper answer, and nothing stays behind.
"""

import argparse
import asyncio
import collections
import dataclasses
import gc
import json
import os
import random
import re
import socket
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from hybridjax.configs.serving import ServerConfig
from hybridjax.serving.engine import Engine
from hybridjax.serving.http.app import create_app
from hybridjax.serving.http.server import HttpServer, listen, reserve

PATIENCE = 120.0
CONTEXT = 384
ENGINE = {
    "context_length": CONTEXT,
    "max_running_requests": 4,
    # A third of what four whole contexts take: requests queue, evict each other's prefixes, give way.
    "max_total_tokens": 512,
    "max_mamba_cache_size": 3,
    "max_queued_requests": 20,
    "enable_priority_scheduling": True,
    "chunked_prefill_size": 128,
    "skip_server_warmup": True,
}
CLIENTS = 24
KINDS = ("Request", "Entry", "OutputProcessor", "Generation", "_Choice", "GenerationResponse")
MIB = 2**20


class SoakError(Exception):
    """What must hold did not."""


def require(condition: Any, what: str) -> None:
    if not condition:
        raise SoakError(what)


class Ledger:
    """An engine's front door that counts the events of every request that was accepted."""

    def __init__(self, engine: Engine):
        self.engine = engine
        self.events: collections.Counter[str] = collections.Counter()
        self.ends: dict[str, list[str]] = {}
        self.late: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def submit(self, prompt: Any, params: Any, on_output: Callable[[Any], None], **how: Any) -> str:
        name = how["request_id"]

        def counted(event: Any) -> None:
            ends = self.ends.setdefault(name, [])
            if ends:
                self.late.append(name)
            self.events[name] += 1
            if event.finish_reason is not None:
                ends.append(event.finish_reason)
            on_output(event)

        accepted = self.engine.submit(prompt, params, counted, **how)
        self.ends.setdefault(name, [])
        return accepted


class Server:
    """The application on a thread."""

    def __init__(self, engine: Any, config: ServerConfig):
        ready = threading.Event()
        app = create_app(engine, engine.tokenizer, config)
        self.lifecycle = app.state.lifecycle
        self._server = HttpServer(app, config, on_ready=ready.set)
        sock = reserve("127.0.0.1", 0)
        listen(sock)
        self.port = sock.getsockname()[1]
        self._thread = threading.Thread(target=self._server.run, args=([sock],), name="server")
        self._thread.start()
        require(ready.wait(PATIENCE), "the server has not started")

    def stop(self) -> None:
        self._server.stop()
        self._thread.join(PATIENCE)
        require(not self._thread.is_alive(), "the server has not stopped")


@dataclasses.dataclass
class Reply:
    status: int
    headers: bytes
    body: bytes


class Clients:
    """Every kind of client, by name. Each runs one request and raises SoakError if it is answered badly."""

    def __init__(self, port: int, vocab_size: int, seed: int):
        self._port = port
        self._vocab = vocab_size
        self._random = random.Random(seed)
        self._trunk = [self._random.randrange(5, vocab_size) for _ in range(CONTEXT)]
        self._count = 0
        self.outcomes: collections.Counter[str] = collections.Counter()
        # Ids of requests that nobody waited for, long before they could have ended by themselves.
        self.left: set[str] = set()
        kinds = (
            (self.whole, 20),
            (self.stream, 18),
            (self.leaves_a_stream, 18),
            (self.leaves_before_the_answer, 10),
            (self.reads_slowly, 6),
            (self.aborts_by_name, 6),
            (self.malformed, 16),
            (self.breaks_off_its_body, 6),
            (self.runs_out_of_time, 6),
            (self.is_held_to_a_grammar, 6),
            (self.asks_about_its_prompt, 6),
        )
        self._kinds: list[Callable[[], Awaitable[None]]] = [kind for kind, _ in kinds]
        self._weights = [weight for _, weight in kinds]

    async def each(self) -> None:
        """One client of every kind."""
        await asyncio.gather(*map(self.one, self._kinds))

    async def one(self, kind: Any = None) -> None:
        """A client of this kind, or of any."""
        kind = kind or self._random.choices(self._kinds, self._weights)[0]
        async with asyncio.timeout(PATIENCE):
            await kind()
        self.outcomes[kind.__name__] += 1

    async def whole(self) -> None:
        body = self._body()
        reply = await self._insist("/v1/completions", body)
        require(reply.status == 200, f"HTTP {reply.status}: {reply.body[:300]!r}")
        choices = json.loads(reply.body)["choices"]
        require(len(choices) == body["n"], "choices are missing")
        require(all(choice["finish_reason"] in ("stop", "length") for choice in choices), "no finish reason")

    async def stream(self) -> None:
        body = self._body() | {"stream": True}
        reply = await self._insist("/v1/completions", body)
        self._check_stream(reply, body["n"])

    async def reads_slowly(self) -> None:
        body = self._body(longest=60) | {"stream": True, "logprobs": 5}
        reply = await self._insist("/v1/completions", body, pause=0.002)
        self._check_stream(reply, body["n"])

    async def leaves_a_stream(self) -> None:
        body = self._body() | {"stream": True, "max_tokens": 200, "ignore_eos": True}
        reader, writer = await self._open()
        await self._send(writer, "/v1/completions", json.dumps(body).encode())
        while (line := await reader.readline()).strip():
            if line.startswith(b"x-request-id: "):
                self.left.add(line.split()[1].decode())
        for _ in range(self._random.randrange(1, 6)):
            await reader.readline()
        await self._leave(writer)

    async def leaves_before_the_answer(self) -> None:
        _, writer = await self._open()
        await self._send(writer, "/v1/completions", json.dumps(self._body(longest=200)).encode())
        await asyncio.sleep(self._random.random() * 0.05)
        await self._leave(writer)

    async def aborts_by_name(self) -> None:
        self._count += 1
        rid = f"soak-{self._count}"
        params = {"max_new_tokens": 200, "ignore_eos": True}
        body = {"input_ids": self._prompt(), "sampling_params": params, "rid": rid}
        asking = asyncio.create_task(self._ask("/generate", body))
        await asyncio.sleep(self._random.random() * 0.05)
        aborted = await self._ask("/abort_request", {"rid": rid})
        require(aborted.status == 200, f"abort_request: HTTP {aborted.status}")
        reply = await asking
        if not self._busy(reply):
            reason = json.loads(reply.body)["meta_info"]["finish_reason"]["type"]
            require(reason in ("abort", "length"), f"an aborted request ended by {reason}")

    async def runs_out_of_time(self) -> None:
        body = self._body(longest=200) | {"timeout": 0.02 + 0.2 * self._random.random(), "n": 1}
        reply = await self._insist("/v1/completions", body)
        if reply.status == 504:
            return
        require(reply.status == 200, f"HTTP {reply.status}: {reply.body[:300]!r}")
        [choice] = json.loads(reply.body)["choices"]
        require(choice["finish_reason"] in ("stop", "length", "abort"), f"out of time: {choice}")

    async def is_held_to_a_grammar(self) -> None:
        body = self._body() | {"regex": "[a-c]{2,5}", "max_tokens": 40, "n": 1, "ignore_eos": False}
        reply = await self._insist("/v1/completions", body)
        require(reply.status == 200, f"HTTP {reply.status}: {reply.body[:300]!r}")
        text = json.loads(reply.body)["choices"][0]["text"]
        require(re.fullmatch("[a-c]{2,5}", text), f"{text!r} does not match")

    async def asks_about_its_prompt(self) -> None:
        body = self._body() | {"echo": True, "logprobs": 2, "n": 1}
        reply = await self._insist("/v1/completions", body)
        require(reply.status == 200, f"HTTP {reply.status}: {reply.body[:300]!r}")
        given = json.loads(reply.body)["choices"][0]["logprobs"]["token_logprobs"]
        require(len(given) >= len(body["prompt"]), "log probabilities are missing")

    async def malformed(self) -> None:
        path, content, headers = self._random.choice(self._malformed())
        reply = await self._ask(path, content, headers=headers)
        # A full queue is told before what is wrong with a prompt's tokens.
        require(400 <= reply.status < 500 or self._busy(reply), f"HTTP {reply.status} for {content[:100]!r}")

    async def breaks_off_its_body(self) -> None:
        _, writer = await self._open()
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        writer.write(self._random.choice((b"POST", head, head + b'Content-Length: 99\r\n\r\n{"prompt"')))
        await asyncio.sleep(0.01)
        await self._leave(writer)

    def _malformed(self) -> list[tuple[str, bytes, bytes]]:
        dump, kind = json.dumps, b"Content-Type: application/json\r\n"
        bodies: list[Any] = [
            *(7, [], None, {}, {"prompt": []}, {"prompt": [[]]}, {"prompt": [-1]}, {"prompt": 1.5}),
            *({"prompt": "x", "n": 10**9}, {"prompt": "x", "max_tokens": 0}, {"prompt": "x", "logprobs": 99}),
            *(
                {"prompt": [self._vocab]},
                {"prompt": [1] * (CONTEXT + 1)},
                {"prompt": "x", "temperature": "h"},
            ),
            *({"prompt": "x", "logit_bias": {"a": 1}}, {"prompt": "x", "stop": [""]}, {"messages": []}),
        ]
        return [
            *(("/v1/completions", dump(body).encode(), kind) for body in bodies),
            ("/v1/completions", b"{" * 5000, kind),
            ("/v1/completions", b"\xff\xfe{}", kind),
            ("/v1/completions", b'{"prompt": "x"}', b"Content-Type: text/plain\r\n"),
            ("/v1/completions", b"x" * 70_000, kind),
            ("/v1/chat/completions", dump({"messages": [{"role": "x"}]}).encode(), kind),
            ("/generate", dump({"text": "x", "input_ids": [1]}).encode(), kind),
            ("/no/such/route", b"{}", kind),
            ("/v1/completions", b"{}", kind + b"Host: second\r\n"),
            ("/v1/completions", b"{}", kind + b"X-Long: " + b"y" * 70_000 + b"\r\n"),
        ]

    def _prompt(self) -> list[int]:
        """A prompt that leaves a common trunk somewhere, often at a page's edge."""
        length = self._random.choice((1, 5, 63, 64, 65, 100, 128, 150))
        fork = self._random.choice((0, 32, 64, 128, length))
        tail = [self._random.randrange(5, self._vocab) for _ in range(max(0, length - fork))]
        return self._trunk[: min(fork, length)] + tail

    def _body(self, longest: int = 40) -> dict[str, Any]:
        body = {"prompt": self._prompt(), "max_tokens": self._random.randrange(1, longest + 1)}
        body |= {"temperature": self._random.choice((0, 1)), "ignore_eos": self._random.random() < 0.5}
        body |= {
            "priority": self._random.choice((0, 0, 0, 5)),
            "cache_salt": self._random.choice((None, "a")),
        }
        return body | {"n": self._random.choice((1, 1, 1, 1, 2, 3))}

    def _busy(self, reply: Reply) -> bool:
        if reply.status != 503:
            return False
        require(b"retry-after: " in reply.headers.lower(), "a full queue names no time to come back")
        self.outcomes["refused, queue full"] += 1
        return True

    async def _insist(self, path: str, body: Any, pause: float = 0.0) -> Reply:
        """Asks again while the queue is full."""
        while self._busy(reply := await self._ask(path, body, pause=pause)):
            await asyncio.sleep(0.1 + 0.2 * self._random.random())
        return reply

    def _check_stream(self, reply: Reply, choices: int) -> None:
        require(reply.status == 200, f"HTTP {reply.status}: {reply.body[:300]!r}")
        events = [line[6:] for line in _unchunked(reply.body).split(b"\n") if line.startswith(b"data: ")]
        require(events[-1:] == [b"[DONE]"], f"a stream ended by {events[-1:]}")
        parsed = [json.loads(event) for event in events[:-1]]
        # The stream was under way when a later choice found the queue full.
        if any("error" in event for event in parsed):
            require(b"queue_full" in events[-2], f"a stream failed: {events[-2]!r}")
            return
        ends = [c["index"] for event in parsed for c in event["choices"] if c["finish_reason"]]
        require(sorted(ends) == list(range(choices)), f"choices ended: {ends}")

    async def _open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self._port)

    async def _send(
        self, writer: asyncio.StreamWriter, path: str, content: bytes, headers: bytes | None = None
    ) -> None:
        headers = b"Content-Type: application/json\r\n" if headers is None else headers
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n".encode()
        writer.write(head + headers + f"Content-Length: {len(content)}\r\n\r\n".encode() + content)
        await writer.drain()

    async def _ask(self, path: str, body: Any, *, headers: bytes | None = None, pause: float = 0.0) -> Reply:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        reader, writer = await self._open()
        try:
            if pause:
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            await self._send(writer, path, content, headers)
            parts = []
            while data := await reader.read(512 if pause else 2**16):
                parts.append(data)
                await asyncio.sleep(pause)
        except ConnectionError as error:
            raise SoakError(f"{path}: {error} in place of an answer to {content[:60]!r}") from error
        finally:
            await self._leave(writer, politely=True)
        head, _, rest = b"".join(parts).partition(b"\r\n\r\n")
        require(head.startswith(b"HTTP/1.1 "), f"no answer but {head[:100]!r} to {content[:60]!r}")
        return Reply(int(head[9:12]), head, rest)

    async def _leave(self, writer: asyncio.StreamWriter, politely: bool = False) -> None:
        if politely or self._random.random() < 0.5:
            writer.close()
        else:
            writer.transport.abort()
        try:
            await writer.wait_closed()
        except ConnectionError:
            return


def _unchunked(body: bytes) -> bytes:
    out = []
    while body:
        size, _, body = body.partition(b"\r\n")
        out.append(body[: int(size, 16)])
        body = body[int(size, 16) + 2 :]
    return b"".join(out)


@dataclasses.dataclass(frozen=True)
class Held:
    """What the process holds."""

    files: int
    threads: int
    mebibytes: float
    objects: int

    @classmethod
    def now(cls) -> "Held":
        gc.collect()
        objects = sum(type(x).__name__ in KINDS for x in gc.get_objects())
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        files = len(os.listdir("/proc/self/fd"))
        return cls(files, threading.active_count(), pages * os.sysconf("SC_PAGE_SIZE") / MIB, objects)


def _settle(server: Server, ledger: Ledger) -> None:
    """Waits until no request is left anywhere."""
    deadline = time.monotonic() + PATIENCE
    while server.lifecycle.running or not all(list(ledger.ends.values())) or _busy_pools(ledger):
        require(time.monotonic() < deadline, f"still busy: {ledger.engine.stats}, {server.lifecycle.running}")
        time.sleep(0.02)


def _busy_pools(ledger: Ledger) -> bool:
    stats = ledger.engine.stats
    return bool(stats.running or stats.waiting or stats.used_pages or stats.used_slots)


async def _run_clients(clients: Clients, count: int) -> None:
    gate = asyncio.Semaphore(CLIENTS)

    async def one() -> None:
        async with gate:
            await clients.one()

    await asyncio.gather(*(one() for _ in range(count)))


def soak(requests: int, seed: int = 0, model: str = "tiny-sala") -> dict[str, Any]:
    """Runs ``requests`` clients, after a tenth as many to warm up.

    Returns:
      What happened, and what was held before and after.

    Raises:
      SoakError: something that must hold did not.
    """
    config = ServerConfig(model_path=model, port=0, max_request_bytes=2**16, **ENGINE)
    fields = {f.name: getattr(config, f.name) for f in dataclasses.fields(type(config).__mro__[1])}
    with Engine(fields.pop("model_path"), **fields) as engine:
        ledger = Ledger(engine)
        server = Server(ledger, config)
        try:
            clients = Clients(server.port, engine.info.vocab_size, seed)
            asyncio.run(clients.each())
            asyncio.run(_run_clients(clients, max(40, requests // 10)))
            _settle(server, ledger)
            before = Held.now()
            started = time.monotonic()
            asyncio.run(_run_clients(clients, requests))
            seconds = time.monotonic() - started
            _settle(server, ledger)
            # The server closes its side of a connection a moment after the client.
            for _ in range(100):
                after = Held.now()
                if after.files <= before.files:
                    break
                time.sleep(0.05)
        finally:
            server.stop()
        engine.check_integrity()
        preempted = getattr(engine.stats, "preempted", 0)
    _check(ledger, before, after, clients.left)
    return {
        "benchmark": "soak",
        "requests": requests,
        "seconds": round(seconds, 1),
        "clients": dict(clients.outcomes.most_common()),
        "accepted": len(ledger.ends),
        "ends": dict(collections.Counter(reason for ends in ledger.ends.values() for reason in ends)),
        "events": sum(ledger.events.values()),
        "preempted": preempted,
        "before": dataclasses.asdict(before),
        "after": dataclasses.asdict(after),
    }


def _check(ledger: Ledger, before: Held, after: Held, left: Collection[str] = ()) -> None:
    require(ledger.ends, "nothing was accepted")
    require(not ledger.late, f"events after the last one: {ledger.late[:5]}")
    wrong = {name: ends for name, ends in ledger.ends.items() if len(ends) != 1}
    require(not wrong, f"requests without exactly one last event: {dict(list(wrong.items())[:5])}")
    went_on = [name for name, ends in ledger.ends.items() if name[:32] in left and ends != ["abort"]]
    require(not went_on, f"requests whose client had left went on to their end: {went_on[:5]}")
    reasons = {reason for ends in ledger.ends.values() for reason in ends}
    require(reasons <= {"stop", "length", "abort", "timeout"}, f"requests ended by {reasons}")
    require(after.files <= before.files, f"{after.files - before.files} files stayed open")
    # Worker threads start as they are needed, 40 at most, and stay.
    require(after.threads <= before.threads + 40, f"{after.threads} threads, {before.threads} before")
    require(after.objects <= before.objects + len(KINDS), f"{after.objects} objects of ended requests")
    require(after.mebibytes < before.mebibytes + 96, f"{after.mebibytes} MiB, {before.mebibytes} before")


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0, or 1 if something that must hold did not."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__.split("\n")[0])
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", default="tiny-sala")
    flags = parser.parse_args(argv)
    try:
        print(json.dumps(soak(flags.requests, flags.seed, flags.model)))
    except SoakError as error:
        print(f"soak: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
