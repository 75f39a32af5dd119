"""A deterministic engine on a thread, a byte tokenizer, and a real server around both."""

import asyncio
import codecs
import contextlib
import dataclasses
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any

import httpx
import numpy as np

from hybridjax.configs.serving import ServerConfig
from hybridjax.errors import GrammarError, QueueFullError, RequestError
from hybridjax.serving.api import (
    EngineInfo,
    EngineStats,
    ImageSupport,
    OnOutput,
    RequestOutput,
    SamplingParams,
    TokenLogprob,
)
from hybridjax.serving.http.app import create_app
from hybridjax.serving.http.server import HttpServer, listen, reserve
from hybridjax.text import ToolUse

BOS, EOS, IMAGE = 256, 257, 258
PLACEHOLDER = "<|image_pad|>"
IMAGE_TOKENS = 4  # of every image
IMAGES = ImageSupport(max_image_bytes=2**16, max_image_pixels=4096, max_images=3)
ALPHABET = "abcdefghijklmnopqrstuvwxyz"
PATIENCE = 60.0


class ByteTokenizer:
    """Bytes, special tokens and placeholders. Keeps all messages that it rendered."""

    is_byte_level = True
    has_chat_template = True
    tool_use = ToolUse()
    chat_reasons = False

    def __init__(self):
        self.rendered: list[Any] = []

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids = [BOS] * add_special_tokens
        for index, part in enumerate(text.split(PLACEHOLDER)):
            ids += [IMAGE] * (index > 0) + list(part.encode())
        return ids

    def too_long(self, text: str, max_tokens: int) -> bool:
        return len(text.encode()) > max_tokens

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        special = {} if skip_special_tokens else {BOS: b"<bos>", EOS: b"<eos>"}
        return b"".join(special.get(i, b"") if i > 255 else bytes([i]) for i in ids).decode(errors="replace")

    def token_bytes(self, index: int) -> bytes:
        return bytes([index]) if index < 256 else b""

    def id_to_token(self, index: int) -> str | None:
        return None

    def render_chat(
        self, messages: Any, tools: Any = None, add_generation_prompt: bool = True, **kwargs: Any
    ) -> str:
        if unknown := set(kwargs) - {"enable_thinking"}:
            raise RequestError(f"unknown option {sorted(unknown)[0]!r}", param="chat_template_kwargs")
        self.rendered.append(messages)
        turns = "".join(f"[{m['role']}]{self._content(m['content'])}\n" for m in messages)
        thinking = "" if kwargs.get("enable_thinking", True) else "<no_think>"
        return turns + "[assistant]" * add_generation_prompt + thinking

    def _content(self, content: Any) -> str:
        if isinstance(content, str):
            return content
        images = {"image": f"<{PLACEHOLDER}>"}
        return "\n".join(part["text"] if "text" in part else images[part["type"]] for part in content)


def alphabet(prompt: Sequence[int], params: SamplingParams) -> Iterator[int]:
    """abc... for ever, from the letter that the seed names."""
    return (ord(ALPHABET[i % 26]) for i in count(params.seed or 0))


def saying(text: str) -> Callable[[Sequence[int], SamplingParams], Iterator[int]]:
    return lambda prompt, params: iter([*text.encode(), EOS])


@dataclasses.dataclass
class _Live:
    request_id: str
    prompt: Sequence[int]
    prompt_tokens: int
    params: SamplingParams
    on_output: OnOutput
    tokens: Iterator[Any]
    cached_tokens: int
    queue_seconds: float | None = None
    generated: int = 0
    decoder: Any = dataclasses.field(default_factory=lambda: codecs.getincrementaldecoder("utf-8")())
    held: str = ""

    def step(self) -> RequestOutput:
        """The next token as an event; a scripted exception or "timeout" as such an event."""
        token = next(self.tokens)
        if isinstance(token, Exception):
            is_requests_fault = isinstance(token, GrammarError)
            return self._event(finish_reason="error", error=str(token), is_requests_fault=is_requests_fault)
        if token == "timeout":
            return self._event(finish_reason="timeout")
        self.generated += 1
        stopped = token == EOS or token in self.params.stop_token_ids
        self.held += "" if stopped else self.decoder.decode(bytes([token]))
        for stop in self.params.stop:
            if (at := self.held.find(stop)) >= 0:
                text = self.held[: at + len(stop) * self.params.include_stop_str_in_output]
                return self._event(token, text=text, finish_reason="stop", stop_reason=stop)
        if stopped:
            matched = None if token == EOS else token
            return self._event(token, text=self.held, finish_reason="stop", stop_reason=matched)
        if self.generated == self.params.max_tokens:
            return self._event(token, text=self.held, finish_reason="length")
        keep = max(map(len, self.params.stop), default=1) - 1
        cut = len(self.held) - keep if keep else len(self.held)
        text, self.held = self.held[: max(cut, 0)], self.held[max(cut, 0) :]
        return self._event(token, text=text)

    def _of_prompt(self, token: int, count: int) -> TokenLogprob:
        """Minus the token's number per hundred; the tokens behind it are likelier."""
        top = tuple(((token + 1 + i) % 256, (20 - i - token) / 100) for i in range(count))
        return TokenLogprob(token, -token / 100, top)

    def _event(self, *tokens: int, **fields: Any) -> RequestOutput:
        logprobs = None
        if self.params.logprobs is not None and tokens:
            top = tuple(((tokens[0] + i) % 256, -0.5 - i) for i in range(self.params.logprobs))
            logprobs = (TokenLogprob(tokens[0], -0.5, top),)
        prompt_logprobs = None
        if self.params.prompt_logprobs is not None and self.generated == 1 and tokens:
            known = (self._of_prompt(token, self.params.prompt_logprobs) for token in self.prompt[1:])
            prompt_logprobs = (None, *known)
        return RequestOutput(
            request_id=self.request_id,
            token_ids=tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            prompt_tokens=self.prompt_tokens,
            completion_tokens=self.generated,
            cached_tokens=self.cached_tokens,
            queue_seconds=self.queue_seconds,
            **fields,
        )


class FakeEngine:
    """One token per live request and round, from ``script``; counts everything.

    Attributes:
      script: makes the tokens of a request; an exception among them fails it, "timeout" ends it.
      budget: tokens it may still emit over all requests; None: any number.
      live: requests without a last event, by id.
      submitted: all requests ever, by id.
      images, options: of all requests ever, by id.
      aborts: calls of abort, by id.
      ends: last events, by id.
    """

    def __init__(
        self,
        *,
        max_queued: int = 1024,
        context_length: int = 2**20,
        images: ImageSupport | None = None,
    ):
        self.info = EngineInfo(
            model_name="fake",
            model_path="/models/fake",
            context_length=context_length,
            vocab_size=258 if images is None else 259,
            max_running_requests=8,
            max_total_tokens=2**20,
            images=images,
        )
        self.tokenizer: ByteTokenizer | None = ByteTokenizer()
        self.is_healthy = True
        self.pulse: int | None = None
        self.stats = EngineStats()
        self.script: Callable[[Sequence[int], SamplingParams], Iterator[Any]] = alphabet
        self.submit_error: Exception | None = None
        self.cached_tokens = 0
        self.queue_seconds: float | None = None
        self.flushes = 0
        self.budget: int | None = None
        self.emitted = 0
        self.live: dict[str, _Live] = {}
        self.submitted: dict[str, tuple[Sequence[int], SamplingParams]] = {}
        self.images: dict[str, Sequence[np.ndarray]] = {}
        self.options: dict[str, dict[str, Any]] = {}
        self.aborts: Counter[str] = Counter()
        self.ends: Counter[str] = Counter()
        self._max_queued = max_queued
        self._changed = threading.Condition()
        self._to_abort: list[str] = []
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="fake-engine")
        self._thread.start()

    def submit(
        self,
        prompt: Any,
        params: SamplingParams,
        on_output: OnOutput,
        *,
        request_id: str | None = None,
        images: Sequence[np.ndarray] = (),
        priority: int = 0,
        cache_salt: str | None = None,
        timeout: float | None = None,
    ) -> str:
        assert request_id is not None and not isinstance(prompt, str)
        with self._changed:
            if self.submit_error is not None:
                raise self.submit_error
            if request_id in self.submitted:
                raise RequestError(f"duplicate request id {request_id}")
            if not prompt:
                raise RequestError("the prompt is empty", param="prompt")
            if max(prompt) >= self.info.vocab_size:
                raise RequestError(f"token id {max(prompt)} is not in the vocabulary", param="prompt")
            if self.info.images is not None and prompt.count(IMAGE) != len(images):
                raise RequestError(
                    f"the prompt has {prompt.count(IMAGE)} image placeholders for {len(images)} images",
                    param="messages",
                    code="image_placeholder_mismatch",
                )
            assert self.info.images is not None or not images
            length = len(prompt) + (IMAGE_TOKENS - 1) * len(images)
            if length + (params.max_tokens or 1) > self.info.context_length:
                raise RequestError(
                    f"{length} prompt tokens + max_tokens exceed {self.info.context_length}",
                    param="max_tokens",
                    code="context_length_exceeded",
                )
            if len(self.live) >= self._max_queued:
                raise QueueFullError("the queue is full", retry_after=7)
            self.submitted[request_id] = (prompt, params)
            self.options[request_id] = {"priority": priority, "cache_salt": cache_salt, "timeout": timeout}
            self.images[request_id] = images
            tokens = self.script(prompt, params)
            counts = self.cached_tokens, self.queue_seconds
            live = _Live(request_id, prompt, length, params, on_output, tokens, *counts)
            self.live[request_id] = live
            self._changed.notify_all()
        return request_id

    def abort(self, request_id: str) -> None:
        with self._changed:
            self.aborts[request_id] += 1
            self._to_abort.append(request_id)
            self._changed.notify_all()

    def flush_cache(self) -> None:
        self.flushes += 1

    def give_up(self, why: str) -> None:
        """Ends every request in the calling thread, as if the engine's own hung."""
        with self._changed:
            self.is_healthy, self.budget = False, 0
            live = list(self.live.values())
        for one in live:
            self._emit(one, one._event(finish_reason="error", error=why))

    def shutdown(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        self._thread.join(PATIENCE)

    def allow(self, tokens: int | None) -> None:
        with self._changed:
            self.budget = tokens
            self._changed.notify_all()

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Waits for something that a submission, an abort or an event brings about."""
        with self._changed:
            assert self._changed.wait_for(condition, PATIENCE), "the awaited state never came"

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._stopped or self._to_abort or (self.live and self.budget != 0)
                )
                if self._stopped:
                    return
                aborted = [self.live.pop(i) for i in self._to_abort if i in self.live]
                self._to_abort.clear()
                running = list(self.live.values())[: self.budget]
                if self.budget is not None:
                    self.budget -= len(running)
            for live in aborted:
                self._emit(live, live._event(finish_reason="abort"))
            for live in running:
                self._emit(live, live.step())

    def _emit(self, live: _Live, event: RequestOutput) -> None:
        if event.finish_reason is not None:
            self.live.pop(live.request_id, None)
            self.ends[live.request_id] += 1
        live.on_output(event)
        with self._changed:
            self.emitted += len(event.token_ids)
            self._changed.notify_all()


class RunningServer:
    """The application under uvicorn on a thread, on a port of its own."""

    def __init__(self, engine: FakeEngine, tokenizer: Any = "bytes", **config: Any):
        self.engine = engine
        settings = ServerConfig(port=0, **{"drain_timeout": 1.0, **config})
        self.app = create_app(engine, engine.tokenizer if tokenizer == "bytes" else tokenizer, settings)
        self.lifecycle = self.app.state.lifecycle
        ready = threading.Event()

        def on_ready() -> None:
            task = asyncio.current_task()
            assert task is not None
            self.main_task = task
            ready.set()

        self.server = HttpServer(self.app, settings, on_ready=on_ready)
        sock = reserve("127.0.0.1", 0)
        listen(sock)
        self.port = sock.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.thread = threading.Thread(target=self.server.run, args=([sock],), name="server")
        self.thread.start()
        assert ready.wait(PATIENCE)

    def settle(self) -> None:
        """Waits until no request, watcher or other task is left on the server's loop."""

        async def others_end() -> None:
            others = asyncio.all_tasks() - {asyncio.current_task(), self.main_task}
            if others:
                _, pending = await asyncio.wait(others, timeout=PATIENCE)
                assert not pending, pending

        loop = self.main_task.get_loop()
        asyncio.run_coroutine_threadsafe(others_end(), loop).result(2 * PATIENCE)
        assert self.lifecycle.running == set()

    def stop(self) -> None:
        self.server.stop()
        self.thread.join(PATIENCE)
        assert not self.thread.is_alive()


@contextlib.contextmanager
def fuzzed_server(
    context_length: int, images: ImageSupport | None = None, tokenizer: ByteTokenizer | None = None
) -> Iterator[tuple[FakeEngine, httpx.Client]]:
    """A server for random requests: healthy to the end, each of its requests ended exactly once."""
    engine = FakeEngine(context_length=context_length, images=images)
    engine.script = lambda prompt, params: iter([*"äb世".encode(), EOS])
    engine.tokenizer = tokenizer or engine.tokenizer
    server = RunningServer(engine)
    with httpx.Client(base_url=server.url, timeout=PATIENCE) as client:
        yield engine, client
        assert client.get("/health").status_code == 200
    server.settle()
    server.stop()
    engine.shutdown()
    assert engine.ends == dict.fromkeys(engine.submitted, 1)
