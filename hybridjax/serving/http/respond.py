"""One generating request from submission to the last byte."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from starlette.concurrency import run_in_threadpool
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from hybridjax.errors import RequestError
from hybridjax.serving.api import RequestOutput
from hybridjax.serving.http.bodies import Bodies, Envelope, usage
from hybridjax.serving.http.errors import GenerationFailedError, RequestTimeoutError, describe, dumps
from hybridjax.serving.http.generation import NO_NAMES, ClientGoneError, Front, Generation, Job
from hybridjax.serving.http.protocol import GenerationRequest

logger = logging.getLogger("hybridjax.http")

# From the generation to the job of each choice and what to answer with; called once, in a worker thread.
Prepare = Callable[[Generation], "tuple[list[Job], Answer]"]

JSON_HEADERS = ((b"content-type", b"application/json"),)
SSE_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


class Answer(Protocol):
    """What a generation's events look like to the client, as JSON values."""

    def whole(self, outputs: Sequence[RequestOutput]) -> Any:
        """The one body, from all choices."""
        ...

    def openings(self) -> Iterable[Any]:
        """Events of a stream before anything is generated."""
        ...

    def event(self, index: int, output: RequestOutput) -> Any | None:
        """The event about what is new of a choice; None if there is nothing to show."""
        ...

    def endings(self) -> Iterable[Any]:
        """Events of a stream after the last token."""
        ...


class GenerationResponse(Response):
    """Submits when it is sent, so that nothing can come between a submission and its clean-up.

    Whatever ends this response early (the client leaves, a choice fails, the server stops) aborts
    what still runs.
    """

    def __init__(
        self,
        front: Front,
        prepare: Prepare,
        *,
        stream: bool,
        names: Mapping[str, range] = NO_NAMES,
        gate: asyncio.Semaphore | None = None,
    ):
        """Makes the response; nothing happens before it is sent.

        Args:
          front: the engine and what belongs to it.
          prepare: makes the jobs.
          stream: answer with server-sent events.
          names: what the choices can be aborted by.
          gate: held while jobs are made and submitted, if they take much memory or time.
        """
        super().__init__()
        self._front = front
        self._prepare = prepare
        self._streams = stream
        self._names = names
        self._gate = gate or contextlib.nullcontext()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id = scope["state"]["request_id"]
        front = self._front
        generation = Generation(
            front.engine, request_id, incremental=self._streams, telemetry=front.telemetry
        )
        front.lifecycle.enter(generation, self._names)
        watcher = asyncio.create_task(_close_on_disconnect(receive, generation))
        try:
            async with self._gate:
                answer = await run_in_threadpool(self._submit, generation)
            await (self._stream if self._streams else self._complete)(answer, generation, send)
        except ClientGoneError:
            logger.info("%s the client went away", request_id)
        finally:
            generation.close()
            watcher.cancel()
            front.lifecycle.leave(generation)
            # For the log.
            scope["state"]["summary"] = generation.summary()

    def _submit(self, generation: Generation) -> Answer:
        generation.check_wanted()
        jobs, answer = self._prepare(generation)
        generation.submit(jobs)
        return answer

    async def _complete(self, answer: Answer, generation: Generation, send: Send) -> None:
        outputs: dict[int, RequestOutput] = {}
        while news := await _next(generation):
            outputs.update(news)
        if all(o.finish_reason == "timeout" and not o.completion_tokens for o in outputs.values()):
            raise RequestTimeoutError("the request's timeout passed before anything was generated")
        # Away from the event loop, as a body may have megabytes.
        whole = [outputs[index] for index in sorted(outputs)]
        body = await run_in_threadpool(lambda: dumps(answer.whole(whole)))
        headers = [*JSON_HEADERS, (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _stream(self, answer: Answer, generation: Generation, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": list(SSE_HEADERS)})
        try:
            await _send(send, [_event(body) for body in answer.openings()])
            while news := await _next(generation):
                bodies = [answer.event(*new) for new in news]
                await _send(send, [_event(body) for body in bodies if body is not None])
            ending = [*map(_event, answer.endings()), b"data: [DONE]\n\n"]
        except ClientGoneError:
            raise
        except Exception as error:
            # The status line is out already, so the stream itself has to tell.
            details = None if isinstance(error, RequestError) else error
            logger.error("%s failed while streaming: %s", generation.request_id, error, exc_info=details)
            ending = [_event(describe(error, generation.request_id)[1])]
        await send({"type": "http.response.body", "body": b"".join(ending)})


class OpenAIAnswer:
    """The answer to a completion or chat request."""

    def __init__(
        self,
        request: GenerationRequest,
        prompts: Sequence[Sequence[int]],
        bodies: Bodies,
        envelope: Envelope,
        token_ids: bool,
    ):
        self._request = request
        self._prompts = prompts
        self._bodies = bodies
        self._envelope = envelope
        self._token_ids = token_ids
        self._last: dict[int, RequestOutput] = {}

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        self._last = dict(enumerate(map(self._bodies.shown, outputs)))
        choices = [self._with_ids(self._bodies.whole(i, output), output) for i, output in self._last.items()]
        return self._envelope.whole(choices, self._usage()) | self._bodies.beside(outputs[0])

    def openings(self) -> Iterable[dict[str, Any]]:
        openings = map(self._bodies.opening, range(len(self._prompts) * self._request.n))
        return [self._chunk([choice]) for choice in openings if choice]

    def event(self, index: int, output: RequestOutput) -> dict[str, Any] | None:
        output = self._last[index] = self._bodies.shown(output)
        choice = self._bodies.delta(index, output, always=self._token_ids)
        return None if choice is None else self._chunk([self._with_ids(choice, output)])

    def endings(self) -> Iterable[dict[str, Any]]:
        return [self._envelope.chunk([], usage=self._usage())] * self._request.include_usage

    def _with_ids(self, choice: dict[str, Any], output: RequestOutput) -> dict[str, Any]:
        return choice | {"token_ids": list(output.token_ids)} if self._token_ids else choice

    def _usage(self) -> dict[str, Any]:
        return usage(self._prompts, self._request.n, self._last, self._bodies.reasoning_tokens())

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        if self._request.include_usage:
            return self._envelope.chunk(choices, usage=None)
        return self._envelope.chunk(choices)


async def _close_on_disconnect(receive: Receive, generation: Generation) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    generation.close()


async def _next(generation: Generation) -> list[tuple[int, RequestOutput]]:
    news = await generation.next()
    for _, output in news:
        if output.finish_reason == "error" and output.is_requests_fault:
            raise RequestError(output.error or "no reason given", code="grammar_too_complex")
        if output.finish_reason == "error":
            raise GenerationFailedError(output.error or "no reason given")
    return news


async def _send(send: Send, events: list[bytes]) -> None:
    if events:
        await send({"type": "http.response.body", "body": b"".join(events), "more_body": True})


def _event(body: Any) -> bytes:
    return b"data: " + dumps(body) + b"\n\n"
