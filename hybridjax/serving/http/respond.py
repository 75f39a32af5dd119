"""One generating request from submission to the last byte."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from hybridjax.serving.api import FrontDoor, RequestOutput
from hybridjax.serving.http.bodies import Bodies, Envelope, usage
from hybridjax.serving.http.errors import GenerationFailedError, describe, dumps
from hybridjax.serving.http.generation import ClientGoneError, Generation, Lifecycle
from hybridjax.serving.http.protocol import GenerationRequest

logger = logging.getLogger("hybridjax.http")

# Token ids of the prompts and the bodies to answer with; runs in a worker thread.
Prepare = Callable[[], tuple[list[list[int]], Bodies]]

JSON_HEADERS = ((b"content-type", b"application/json"),)
SSE_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


class GenerationResponse(Response):
    """Submits when it is sent, so that nothing can come between a submission and its clean-up.

    Whatever ends this response early (the client leaves, a choice fails, the server stops) aborts
    what still runs.
    """

    def __init__(
        self,
        engine: FrontDoor,
        lifecycle: Lifecycle,
        model: str,
        request: GenerationRequest,
        prepare: Prepare,
        token_ids: bool,
    ):
        super().__init__()
        self._engine = engine
        self._lifecycle = lifecycle
        self._model = model
        self._request = request
        self._prepare = prepare
        self._token_ids = token_ids

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id = scope["state"]["request_id"]
        generation = Generation(self._engine, request_id, incremental=self._request.stream)
        self._lifecycle.enter(generation)
        watcher = asyncio.create_task(_close_on_disconnect(receive, generation))
        try:
            prompts, bodies = await run_in_threadpool(self._submit, generation)
            envelope = Envelope(bodies, request_id, self._model)
            answer = _Answer(self._request, prompts, bodies, envelope, self._token_ids)
            await (answer.stream if self._request.stream else answer.complete)(generation, send)
        except ClientGoneError:
            logger.info("%s the client went away", request_id)
        finally:
            generation.close()
            watcher.cancel()
            self._lifecycle.leave(generation)

    def _submit(self, generation: Generation) -> tuple[list[list[int]], Bodies]:
        prompts, bodies = self._prepare()
        n = self._request.n
        params = [self._request.sampling_params(choice) for choice in range(n)]
        generation.submit([(prompt, params[choice]) for prompt in prompts for choice in range(n)])
        return prompts, bodies


async def _close_on_disconnect(receive: Receive, generation: Generation) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    generation.close()


class _Answer:
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

    async def complete(self, generation: Generation, send: Send) -> None:
        outputs: dict[int, RequestOutput] = {}
        while news := await generation.next():
            outputs.update(news)
            self._note(news)
        choices = [self._with_ids(self._bodies.whole(i, outputs[i]), outputs[i]) for i in sorted(outputs)]
        body = dumps(self._envelope.whole(choices, self._usage()))
        headers = [*JSON_HEADERS, (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def stream(self, generation: Generation, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": list(SSE_HEADERS)})
        try:
            openings = map(self._bodies.opening, range(len(self._prompts) * self._request.n))
            await self._send(send, [self._chunk([choice]) for choice in openings if choice])
            while news := await generation.next():
                self._note(news)
                await self._send(
                    send, [self._chunk([self._delta(*new)]) for new in news if self._shows(new[1])]
                )
            ending = [_event(self._envelope.chunk([], usage=self._usage()))] * self._request.include_usage
            ending.append(b"data: [DONE]\n\n")
        except ClientGoneError:
            raise
        except Exception as error:
            # The status line is out already, so the stream itself has to tell.
            logger.error("%s failed while streaming", generation.request_id, exc_info=error)
            ending = [_event(describe(error, generation.request_id)[1])]
        await send({"type": "http.response.body", "body": b"".join(ending)})

    def _note(self, news: list[tuple[int, RequestOutput]]) -> None:
        for index, output in news:
            if output.finish_reason == "error":
                raise GenerationFailedError(output.error or "no reason given")
            self._last[index] = output

    def _shows(self, output: RequestOutput) -> bool:
        # Tokens whose text is still held back give a chunk only if something else of them is asked for.
        return bool(output.text or output.finish_reason or output.logprobs or self._token_ids)

    def _delta(self, index: int, output: RequestOutput) -> dict[str, Any]:
        return self._with_ids(self._bodies.delta(index, output), output)

    def _with_ids(self, choice: dict[str, Any], output: RequestOutput) -> dict[str, Any]:
        return choice | {"token_ids": list(output.token_ids)} if self._token_ids else choice

    def _usage(self) -> dict[str, Any]:
        return usage(self._prompts, self._request.n, self._last)

    def _chunk(self, choices: list[dict[str, Any]]) -> bytes:
        if self._request.include_usage:
            return _event(self._envelope.chunk(choices, usage=None))
        return _event(self._envelope.chunk(choices))

    async def _send(self, send: Send, events: list[bytes]) -> None:
        if events:
            await send({"type": "http.response.body", "body": b"".join(events), "more_body": True})


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + dumps(body) + b"\n\n"
