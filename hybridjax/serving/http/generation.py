"""From the engine's thread to the event loop: the engine requests behind one HTTP request."""

import asyncio
import dataclasses
import logging
import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from hybridjax.errors import HybridJaxError, RequestError
from hybridjax.serving.api import FrontDoor, RequestOutput, SamplingParams, TokenLogprob
from hybridjax.serving.http.errors import DrainingError
from hybridjax.serving.http.telemetry import Telemetry, Timing
from hybridjax.serving.http.tokens import TextTokenizer

logger = logging.getLogger("hybridjax.http")

ABORT_GRACE = 2.0
MAX_PROMPT_LOGPROBS = 2**20
NO_NAMES: Mapping[str, range] = MappingProxyType({})


class ClientGoneError(HybridJaxError):
    """Nobody waits for the answer any more."""


class Job(NamedTuple):
    """What an engine request asks for.

    Attributes:
      images, priority, cache_salt, timeout: see FrontDoor.submit; jobs may share images.
    """

    prompt: Sequence[int]
    params: SamplingParams
    images: Sequence[np.ndarray] = ()
    priority: int = 0
    cache_salt: str | None = None
    timeout: float | None = None


class _Choice:
    """One engine request, and what it produced since the reader last looked."""

    def __init__(self, request_id: str, prompt_tokens: int, timing: Timing):
        self.request_id = request_id
        self.prompt_tokens = prompt_tokens
        self.timing = timing
        self.submitted = self.finished = self.aborted = False
        self.last: RequestOutput | None = None
        self._prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
        self._clear()

    def _clear(self) -> None:
        self._token_ids: list[int] = []
        self._text: list[str] = []
        self._logprobs: list[TokenLogprob] = []

    @property
    def counted_prompt_tokens(self) -> int:
        return max(self.prompt_tokens, self.last.prompt_tokens if self.last else 0)

    def add(self, output: RequestOutput) -> None:
        self.last = output
        self.finished = output.finish_reason is not None
        self._token_ids.extend(output.token_ids)
        if output.text:
            self._text.append(output.text)
        self._logprobs.extend(output.logprobs or ())
        if output.prompt_logprobs is not None:
            self._prompt_logprobs = output.prompt_logprobs

    def take(self) -> RequestOutput:
        """All events since the last take as one."""
        assert self.last is not None
        merged = dataclasses.replace(
            self.last,
            token_ids=tuple(self._token_ids),
            text="".join(self._text),
            logprobs=tuple(self._logprobs) or None,
            prompt_logprobs=self._prompt_logprobs,
        )
        self._clear()
        self._prompt_logprobs = None
        return merged


class Generation:
    """The engine requests of one HTTP request: started together, aborted together, each at most once.

    Events that the reader has no time for are merged, so what waits here is never more than the
    completions themselves.
    """

    def __init__(
        self,
        engine: FrontDoor,
        request_id: str,
        *,
        incremental: bool,
        telemetry: Telemetry | None = None,
    ):
        """Belongs to the running event loop.

        Args:
          engine: takes the requests.
          request_id: prefix of the engine requests' ids.
          incremental: wake the reader at every event, not only when all is finished.
          telemetry: where events are counted.
        """
        self.request_id = request_id
        self.names: tuple[str, ...] = ()
        self._engine = engine
        self._incremental = incremental
        self._telemetry = telemetry or Telemetry()
        self._started = self._telemetry.clock()
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._wake = asyncio.Event()
        self._wake_scheduled = False
        self._choices: list[_Choice] = []
        # Choices with something to take, in the order of their first event.
        self._ready: dict[int, _Choice] = {}
        self._delivered = 0
        self._aborting = False
        self._unwanted: set[int] = set()
        self._closed = False

    @property
    def is_closed(self) -> bool:
        return self._closed

    def check_wanted(self) -> None:
        """Raises ClientGoneError after ``close``; from any thread."""
        if self._closed:
            raise ClientGoneError

    def submit(self, jobs: Sequence[Job]) -> None:
        """Starts one choice per job; called once, from a worker thread. Raises what the engine raises."""
        self._choices = [
            _Choice(f"{self.request_id}-{index}", len(job.prompt), Timing(self._started))
            for index, job in enumerate(jobs)
        ]
        for index, (choice, job) in enumerate(zip(self._choices, jobs, strict=True)):
            if self._closed:
                return
            self._engine.submit(
                job.prompt,
                job.params,
                partial(self._on_output, index),
                request_id=choice.request_id,
                images=job.images,
                priority=job.priority,
                cache_salt=job.cache_salt,
                timeout=job.timeout,
            )
            with self._lock:
                choice.submitted = True
                too_late = (self._aborting or index in self._unwanted) and not choice.finished
                choice.aborted = too_late
            if too_late:
                self._engine.abort(choice.request_id)

    async def next(self) -> list[tuple[int, RequestOutput]]:
        """What is new, one merged event per choice; empty after the last. Raises ClientGoneError."""
        while self._delivered < len(self._choices):
            await self._wake.wait()
            with self._lock:
                self._wake.clear()
                self._wake_scheduled = False
                if self._closed:
                    raise ClientGoneError
                news = [(index, choice.take()) for index, choice in self._ready.items()]
                self._ready = {}
            self._delivered += sum(output.finish_reason is not None for _, output in news)
            if news:
                return news
        return []

    def abort(self, indices: Collection[int] | None = None) -> int:
        """Ends what still runs; the last events still arrive. Returns the number of aborted choices.

        Args:
          indices: of the choices to end, also of those not submitted yet; None: all.
        """
        with self._lock:
            self._aborting |= indices is None
            self._unwanted.update(indices or ())
            chosen = [c for i, c in enumerate(self._choices) if indices is None or i in indices]
            running = [c for c in chosen if c.submitted and not c.finished and not c.aborted]
            for choice in running:
                choice.aborted = True
        for choice in running:
            self._engine.abort(choice.request_id)
        return len(running)

    def close(self) -> None:
        """Ends what still runs and forgets what arrives from now on. May be called again."""
        with self._lock:
            self._closed = True
            self._ready = {}
        aborted = self.abort()
        self._wake.set()
        if aborted:
            logger.info("%s aborted %d of %d", self.request_id, aborted, len(self._choices))

    def summary(self) -> dict[str, Any]:
        """Counts for a log: nothing of what clients or models have written."""
        with self._lock:
            last = [choice.last for choice in self._choices]
            prompts = sum(choice.counted_prompt_tokens for choice in self._choices if choice.submitted)
        reasons = [(output.finish_reason if output else None) or "abort" for output in last]
        return {
            "prompt_tokens": prompts,
            "completion_tokens": sum(output.completion_tokens for output in last if output),
            "cached_tokens": sum(output.cached_tokens for output in last if output),
            "queue_time": _longest(output.queue_seconds for output in last if output),
            "time_to_first_token": _longest(choice.timing.first_token for choice in self._choices),
            "finish_reasons": reasons,
        }

    def _on_output(self, index: int, output: RequestOutput) -> None:
        with self._lock:
            choice = self._choices[index]
            if choice.finished:
                return
            self._telemetry.record(choice.timing, output)
            if self._closed:
                choice.finished = output.finish_reason is not None
                return
            choice.add(output)
            self._ready[index] = choice
            if self._wake_scheduled or not self._worth_waking(output):
                return
            self._wake_scheduled = True
        try:
            self._loop.call_soon_threadsafe(self._wake.set)
        except RuntimeError:
            # The loop is closed: nobody reads any more.
            return

    def _worth_waking(self, output: RequestOutput) -> bool:
        if self._incremental or output.finish_reason == "error":
            return True
        return all(choice.finished for choice in self._choices)


def _longest(values: Iterable[float | None]) -> float | None:
    return max((round(value, 6) for value in values if value is not None), default=None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Front:
    """What every request that generates needs.

    Attributes:
      model: its name to clients.
      max_completions: of one HTTP request.
      sampling_defaults: what fields of SamplingParams mean that a request leaves out.
    """

    engine: FrontDoor
    lifecycle: "Lifecycle"
    telemetry: Telemetry
    model: str
    max_completions: int
    sampling_defaults: Mapping[str, float]

    def encode(
        self, tokenizer: TextTokenizer, text: str, param: str, *, add_special_tokens: bool = True
    ) -> list[int]:
        """Token ids of a prompt; raises RequestError for an empty one and for what no context holds."""
        if not text:
            raise RequestError(f"{param} is empty; it must have at least one character", param=param)
        context = self.engine.info.context_length
        if tokenizer.too_long(text, context):
            raise RequestError(
                f"{param} has more than {context} tokens, which is what the context holds",
                param=param,
                code="context_length_exceeded",
            )
        return tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def check_prompt_logprobs(
        self, prompts: Sequence[Sequence[int]], n: int, top: int | None, param: str = "prompt_logprobs"
    ) -> None:
        """Raises RequestError if an answer would hold too many of them."""
        if top is None:
            return
        entries = sum(map(len, prompts)) * n * (1 + top)
        if entries > MAX_PROMPT_LOGPROBS:
            raise RequestError(
                f"prompt tokens x completions x (1 + {top} most likely) is {entries}; at most "
                f"{MAX_PROMPT_LOGPROBS} log probabilities of prompts per request",
                param=param,
            )

    def check_count(self, wanted: int, param: str) -> None:
        """Raises RequestError if one HTTP request asks for too many completions."""
        if wanted > self.max_completions:
            raise RequestError(
                f"prompts x n asks for {wanted} completions; at most {self.max_completions} per request",
                param=param,
            )


class Lifecycle:
    """Whether requests are taken, and which are running. Used on the event loop only."""

    def __init__(self):
        self.draining = False
        self.running: set[Generation] = set()
        # What clients call their requests -> the choices that go by the name.
        self._named: dict[str, tuple[Generation, range]] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    def enter(self, generation: Generation, names: Mapping[str, range] = NO_NAMES) -> None:
        """Notes a generation that begins.

        Args:
          generation: until ``leave``.
          names: what ``abort`` knows its choices by, beside the generation's own id.

        Raises:
          DrainingError: nothing may begin any more.
          RequestError: a name is in use.
        """
        if self.draining:
            raise DrainingError("the server is shutting down and takes no new requests")
        for name in names:
            if name in self._named:
                raise RequestError(f"rid {name!r} is in use", param="rid", code="duplicate_request_id")
        self._named.update({name: (generation, indices) for name, indices in names.items()})
        generation.names = tuple(names)
        self.running.add(generation)
        self._idle.clear()

    def abort(self, name: str) -> int:
        """Ends what goes by that name, or has that id in an answer. Returns the number of choices."""
        if name in self._named:
            generation, indices = self._named[name]
            return generation.abort(indices)
        request_id, _, index = name.removeprefix("chatcmpl-").removeprefix("cmpl-").partition("-")
        chosen = {int(index)} if index.isdecimal() else None
        return sum(g.abort(chosen) for g in self.running if g.request_id == request_id)

    def abort_all(self) -> int:
        return sum(generation.abort() for generation in self.running)

    def leave(self, generation: Generation) -> None:
        self.running.discard(generation)
        for name in generation.names:
            del self._named[name]
        generation.names = ()
        if not self.running:
            self._idle.set()

    async def drain(self, timeout: float) -> None:
        """Takes no new requests, lets running ones finish for ``timeout`` seconds, aborts the rest."""
        self.draining = True
        logger.info("draining: %d requests have %g s to finish", len(self.running), timeout)
        if await self._idle_within(timeout):
            return
        aborted = self.abort_all()
        logger.warning("drain timeout: aborted %d completions", aborted)
        await self._idle_within(ABORT_GRACE)

    async def _idle_within(self, timeout: float) -> bool:
        try:
            async with asyncio.timeout(timeout):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True
