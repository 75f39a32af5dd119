"""Sends a workload to a server and measures each answer."""

import asyncio
import dataclasses
import ipaddress
import json
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from hybridjax.benchmarking.datasets import Item, TextTokenizer
from hybridjax.benchmarking.protocols import (
    PATHS,
    Answer,
    AnswerError,
    EventParser,
    error_message,
    parse_object,
    request_body,
)
from hybridjax.benchmarking.statistics import Latencies
from hybridjax.errors import ConfigError

WARMUP_TOKENS = 32
READY_PAUSE = 0.5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """One request as the client saw it; times in seconds.

    Attributes:
      error: None if it succeeded.
      late: how long after its arrival time it was sent (waiting for max_concurrency, or a slow client).
      end: when it ended, counted from the start of the run.
      input_len, output_len: tokens by the server's usage, else as counted here.
      counted_by: who counted the output tokens: "usage", "chunks" or "tokenizer".
      itl_per_token: whether the gaps are per token; else per chunk, as the server does not say how many
        tokens a chunk has.
    """

    latencies: Latencies
    error: str | None = None
    late: float = 0.0
    end: float = 0.0
    input_len: int = 0
    output_len: int = 0
    counted_by: str | None = None
    itl_per_token: bool = False
    text: str = ""


def check_target(base_url: str, allow_remote: bool) -> str:
    """The URL without a trailing slash.

    Raises:
      ConfigError: not http(s), or a host other than this machine without ``allow_remote``.
    """
    try:
        parts = urlsplit(base_url)
        host = parts.hostname
        _ = parts.port
    except ValueError as error:
        raise ConfigError(f"base_url is {base_url!r}: {error}") from error
    if parts.scheme not in ("http", "https") or not host:
        raise ConfigError(f"base_url is {base_url!r}; it must be like http://127.0.0.1:30000")
    if not allow_remote and not _is_loopback(host):
        raise ConfigError(
            f"{host} is not this machine; load is sent to other machines only with --allow-remote"
        )
    return base_url.rstrip("/")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def import_httpx() -> Any:
    """httpx, which only this command needs."""
    try:
        import httpx
    except ImportError as error:
        raise ConfigError("hybridjax.bench_serving needs httpx: pip install httpx") from error
    return httpx


class Client:
    """Asks one server; an async context manager that holds the connections."""

    def __init__(
        self,
        backend: str,
        base_url: str,
        *,
        model: str = "",
        stream: bool = True,
        ignore_eos: bool = True,
        extra: Mapping[str, Any] | None = None,
        api_key: str | None = None,
        timeout: float = 600.0,
        tokenizer: TextTokenizer | None = None,
        headers: Mapping[str, str] | None = None,
    ):
        self.backend = backend
        self.model = model
        self._url = base_url
        self._stream = stream
        self._ignore_eos = ignore_eos
        self._extra = dict(extra or {})
        self._tokenizer = tokenizer
        self._httpx = import_httpx()
        key = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = self._httpx.AsyncClient(
            headers={"accept-encoding": "identity"} | key | dict(headers or {}),
            timeout=timeout,
            # Servers close idle connections after about 5 s; reusing one just then would fail.
            limits=self._httpx.Limits(
                max_connections=None, max_keepalive_connections=None, keepalive_expiry=2.0
            ),
            # A proxy from the environment would take the load elsewhere and time itself.
            trust_env=False,
            follow_redirects=False,
        )

    async def __aenter__(self) -> "Client":
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self._http.aclose()

    async def models(self) -> list[dict[str, Any]]:
        """The cards of /v1/models.

        Raises:
          AnswerError: the server cannot be reached or answers otherwise.
        """
        try:
            response = await self._http.get(self._url + "/v1/models")
        except self._httpx.HTTPError as error:
            raise AnswerError(f"{self._url} does not answer: {_named(error)}") from error
        if response.status_code != 200:
            raise AnswerError(f"{self._url}/v1/models answers HTTP {response.status_code}")
        cards = parse_object(response.text).get("data")
        if not isinstance(cards, list) or not all(isinstance(c, dict) and "id" in c for c in cards):
            raise AnswerError(f"{self._url}/v1/models names no models")
        return cards

    async def wait_until_ready(self, timeout: float) -> None:
        """Asks for the models until the server answers; raises AnswerError after ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        while True:
            try:
                await self.models()
                return
            except AnswerError:
                if time.monotonic() >= deadline:
                    raise
            await asyncio.sleep(READY_PAUSE)

    async def flush_cache(self) -> None:
        """Makes the server forget its cached prefixes; raises AnswerError if it refuses."""
        try:
            response = await self._http.post(self._url + "/flush_cache")
        except self._httpx.HTTPError as error:
            raise AnswerError(f"flushing the cache has failed: {_named(error)}") from error
        if response.status_code != 200:
            raise AnswerError(f"flush_cache: {_refusal(response.status_code, response.content)}")

    async def ask(self, item: Item) -> Outcome:
        """Runs one request to its end; what goes wrong is in the outcome."""
        body = request_body(
            self.backend,
            self.model,
            item,
            stream=self._stream,
            ignore_eos=self._ignore_eos,
            extra=self._extra,
        )
        content = json.dumps(body).encode()
        answer = Answer(self.backend)
        start = time.perf_counter()
        clock = _TokenClock(start)
        error = None
        try:
            await (self._read_stream if self._stream else self._read_whole)(content, answer, clock)
        except AnswerError as failure:
            error = str(failure)
        except (self._httpx.HTTPError, self._httpx.StreamError) as failure:
            error = _named(failure)
        return self._outcome(item, answer, clock, error, time.perf_counter() - start)

    async def _read_stream(self, content: bytes, answer: Answer, clock: "_TokenClock") -> None:
        parser = EventParser()
        async with self._http.stream("POST", **self._post(content)) as response:
            if response.status_code != 200:
                raise AnswerError(_refusal(response.status_code, await response.aread()))
            async for data in response.aiter_bytes():
                now = time.perf_counter()
                for event in parser.feed(data):
                    was_finished = answer.finished
                    clock.arrived(now, answer.event(event))
                    if answer.finished and not was_finished:
                        clock.finished(now)
        if not answer.finished:
            raise AnswerError("the stream ended before the completion did")

    async def _read_whole(self, content: bytes, answer: Answer, clock: "_TokenClock") -> None:
        response = await self._http.post(**self._post(content))
        if response.status_code != 200:
            raise AnswerError(_refusal(response.status_code, response.content))
        answer.take(parse_object(response.text))

    def _post(self, content: bytes) -> dict[str, Any]:
        headers = {"content-type": "application/json"}
        return {"url": self._url + PATHS[self.backend], "content": content, "headers": headers}

    def _outcome(
        self, item: Item, answer: Answer, clock: "_TokenClock", error: str | None, elapsed: float
    ) -> Outcome:
        output_len, counted_by = answer.output_tokens, "usage"
        if output_len is None:
            output_len, counted_by = answer.tokens, "chunks"
        if output_len is None and self._tokenizer is not None:
            output_len, counted_by = len(self._tokenizer.encode(answer.text, False)), "tokenizer"
        if output_len is None and error is None:
            error = "the answer has no usage, and there is no tokenizer to count its tokens"
        count = output_len or 0
        return Outcome(
            latencies=clock.latencies(count, elapsed) if self._stream else Latencies(None, None, (), elapsed),
            error=error,
            input_len=item.input_len if answer.prompt_tokens is None else answer.prompt_tokens,
            output_len=count,
            counted_by=counted_by,
            itl_per_token=answer.tokens is not None,
            text=answer.text,
        )


class _TokenClock:
    """Arrival times of the tokens of one stream."""

    def __init__(self, start: float):
        self._start = start
        self._first: float | None = None
        self._last = start
        self._gaps: list[float] = []
        self._end: float | None = None

    def arrived(self, now: float, tokens: int) -> None:
        if not tokens:
            return
        if self._first is None:
            self._first = now
            # Further tokens of the first chunk came at no distance from the first.
            self._gaps += [0.0] * (tokens - 1)
        else:
            self._gaps += [(now - self._last) / tokens] * tokens
        self._last = now

    def finished(self, now: float) -> None:
        self._end = now

    def latencies(self, output_len: int, elapsed: float) -> Latencies:
        first, last = self._first, self._last
        if first is None and self._end is not None and output_len:
            # Tokens without any text, end-of-sequence ones for instance, show in the end alone.
            first = last = self._end
        if first is None:
            return Latencies(None, None, (), elapsed)
        tpot = (last - first) / (output_len - 1) if output_len > 1 else None
        return Latencies(first - self._start, tpot, tuple(self._gaps), elapsed)


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".rstrip(": ")


def _refusal(status: int, content: bytes) -> str:
    text = content.decode("utf-8", "replace")
    try:
        text = error_message(parse_object(text))
    except AnswerError:
        text = " ".join(text.split())[:200]
    return f"HTTP {status}: {text}"


async def run_load(
    ask: Callable[[Item], Awaitable[Outcome]],
    items: Sequence[Item],
    arrivals: Sequence[float],
    max_concurrency: int | None,
    on_done: Callable[[], object] = lambda: None,
) -> tuple[list[Outcome], float]:
    """Starts each request at its arrival time, at most ``max_concurrency`` of them at once.

    Returns:
      The outcomes in the order of ``items``, and the seconds from the start to the last one's end.
    """
    slots = asyncio.Semaphore(max_concurrency or max(1, len(items)))
    start = time.perf_counter()

    async def one(item: Item, due: float) -> Outcome:
        await asyncio.sleep(max(0.0, start + due - time.perf_counter()))
        async with slots:
            late = time.perf_counter() - start - due
            outcome = await ask(item)
        on_done()
        return dataclasses.replace(outcome, late=late, end=time.perf_counter() - start)

    outcomes = await asyncio.gather(*map(one, items, arrivals))
    return outcomes, max((o.end for o in outcomes), default=math.nan)


def warmup_item(item: Item) -> Item:
    """A request of the same length that leaves a server's prefix cache without the item's own prefix."""
    if isinstance(item.prompt, str):
        prompt: str | tuple[int, ...] = "#" + item.prompt[1:]
    else:
        prompt = item.prompt[::-1]
    return dataclasses.replace(item, prompt=prompt, output_len=min(item.output_len, WARMUP_TOKENS))
