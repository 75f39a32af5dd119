"""A small OpenAI- and SGLang-like server on a thread, and an engine that answers at once."""

import asyncio
import json
import socket
import threading
from types import SimpleNamespace

import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

PATIENCE = 30
# A line separator within JSON and a character of several bytes: neither may end or break an event.
TEXTS = ["a\u2028b", "€", "c", "d"]


class FakeServer:
    """Answers each request with as many tokens as it asks for, two to a chunk.

    Attributes:
      bodies: every request body, in order of arrival.
      failures: index of arrival -> "http", "event", "cut" or "abort": how that request fails.
      meet: requests that must be in flight together before any of them is answered.
      usage: whether answers report token counts.
      not_ready: how many requests for the models are still refused.
      flushed_after: how many requests had been asked for when the cache was flushed, each time.
      headers: those of every request, in order of arrival.
    """

    def __init__(self):
        self.bodies = []
        self.authorizations = []
        self.failures = {}
        self.fail_all = False
        self.meet = 1
        self.usage = True
        self.most_in_flight = 0
        self._in_flight = 0
        self._together = asyncio.Condition()
        self.not_ready = 0
        self.flushed_after = []
        self.headers = []
        routes = [Route("/v1/models", self._models, methods=["GET"])]
        routes.append(Route("/flush_cache", self._flush, methods=["POST"]))
        for path in ("/v1/completions", "/v1/chat/completions", "/generate"):
            routes.append(Route(path, self._answer, methods=["POST"]))
        sock = socket.socket()
        sock.bind(("127.0.0.1", 0))
        sock.listen(128)
        self.port = sock.getsockname()[1]
        config = uvicorn.Config(Starlette(routes=routes), log_level="error", lifespan="off", ws="none")
        self._server = _Server(config)
        self._sock = sock
        self._thread = threading.Thread(target=self._server.run, args=([sock],))
        self._thread.start()
        assert self._server.ready.wait(PATIENCE)

    def stop(self):
        self._server.should_exit = True
        self._thread.join(PATIENCE)
        self._sock.close()
        assert not self._thread.is_alive()

    async def _models(self, request):
        self.not_ready -= 1
        if self.not_ready >= 0:
            return JSONResponse({"error": {"message": "not yet"}}, 503)
        return JSONResponse({"data": [{"id": "fake-model"}]})

    async def _flush(self, request):
        if self.fail_all:
            return JSONResponse({"error": {"message": "not you"}}, 401)
        self.flushed_after.append(len(self.bodies))
        return JSONResponse({"success": True})

    async def _answer(self, request):
        body = await request.json()
        failure = "http" if self.fail_all else self.failures.get(len(self.bodies))
        self.bodies.append(body)
        self.authorizations.append(request.headers.get("authorization"))
        self.headers.append(dict(request.headers))
        async with self._together:
            self._in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self._in_flight)
            self._together.notify_all()
            await self._together.wait_for(lambda: self.most_in_flight >= self.meet)
        if failure == "http":
            self._in_flight -= 1
            return JSONResponse({"error": {"message": "the fake is full"}}, 503)
        make = _native if request.url.path == "/generate" else _openai
        chunks, whole = make(body, failure, self.usage, request.url.path)
        if not body["stream"]:
            self._in_flight -= 1
            return Response(json.dumps(whole), media_type="application/json")
        return StreamingResponse(self._stream(chunks), media_type="text/event-stream")

    async def _stream(self, chunks):
        yield b": a comment\n\n"
        data = b"".join(chunks)
        # Cut within lines and characters.
        for start in range(0, len(data), 7):
            yield data[start : start + 7]
        self._in_flight -= 1


class _Server(uvicorn.Server):
    def __init__(self, config):
        super().__init__(config)
        self.ready = threading.Event()

    async def startup(self, sockets=None):
        await super().startup(sockets)
        self.ready.set()


def _event(value):
    return b"data: " + json.dumps(value, ensure_ascii=False).encode() + b"\n\n"


def _openai(body, failure, with_usage, path):
    chat = "chat" in path
    count = body["max_tokens"]
    prompt = body["messages"][0]["content"] if chat else body["prompt"]
    usage = {"prompt_tokens": len(prompt), "completion_tokens": count}
    chunks, texts = [], []
    if chat:
        chunks.append(_event({"choices": [{"delta": {"role": "assistant", "content": ""}}]}))
    for start in range(0, count, 2):
        ids = list(range(start, min(start + 2, count)))
        text = "".join(TEXTS[i % len(TEXTS)] for i in ids)
        texts.append(text)
        choice = {"delta": {"content": text}} if chat else {"text": text}
        if body.get("return_token_ids"):
            choice["token_ids"] = ids
        choice["finish_reason"] = "length" if start + 2 >= count else None
        chunks.append(_event({"choices": [choice], "usage": None}))
    if failure:
        chunks = chunks[: len(chunks) // 2]
        if failure == "event":
            chunks.append(_event({"error": {"message": "the fake broke"}}))
        return chunks, {"error": "the fake broke"}
    message = {"message": {"content": "".join(texts)}} if chat else {"text": "".join(texts)}
    whole = {"choices": [message | {"finish_reason": "length"}]}
    if with_usage:
        chunks.append(_event({"choices": [], "usage": usage}))
        whole["usage"] = usage
    return [*chunks, b"data: [DONE]\n\n"], whole


def _native(body, failure, with_usage, path):
    count = body["sampling_params"]["max_new_tokens"]
    chunks, last = [], {}
    for done in [*range(2, count, 2), count]:
        text = "".join(TEXTS[i % len(TEXTS)] for i in range(done))
        meta = {"prompt_tokens": 5, "completion_tokens": done, "finish_reason": None}
        if done == count:
            abort = {"type": "abort", "message": "the fake gave up"}
            meta["finish_reason"] = abort if failure == "abort" else {"type": "length"}
        last = {"text": text, "meta_info": meta}
        chunks.append(_event(last))
    return [*chunks, b"data: [DONE]\n\n"], last


class FakeEngine:
    """Token i of a prompt's completion is (sum of the prompt + i) % 100.

    Args:
      moody: tokens change with the number of requests in the batch.
    """

    tokenizer = None

    def __init__(self, moody=False):
        self.moody = moody
        self.batches = []
        self.info = SimpleNamespace(max_running_requests=4, context_length=64, vocab_size=50)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        pass

    def check_integrity(self):
        pass

    def generate(self, prompts, params):
        self.batches.append((prompts, params))
        mood = len(prompts) if self.moody else 0
        return [
            SimpleNamespace(
                prompt_token_ids=prompt,
                token_ids=tuple((sum(prompt) + mood + i) % 100 for i in range(p.max_tokens)),
                finish_reason="length",
            )
            for prompt, p in zip(prompts, params, strict=True)
        ]
