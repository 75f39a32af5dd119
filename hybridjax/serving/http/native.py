"""SGLang's native routes: /generate and what its tools ask a server about."""

import dataclasses
import importlib.metadata
import platform
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from hybridjax.configs.serving import ServerConfig, secret_fields
from hybridjax.errors import RequestError
from hybridjax.serving.api import RequestOutput, TokenLogprob
from hybridjax.serving.http.bodies import finite
from hybridjax.serving.http.chat import Chats
from hybridjax.serving.http.errors import UnauthorizedError
from hybridjax.serving.http.generation import Front, Generation, Job
from hybridjax.serving.http.native_protocol import (
    AbortRequest,
    DetokenizeRequest,
    GenerateRequest,
    TokenizeRequest,
)
from hybridjax.serving.http.parsing import json_body, parse
from hybridjax.serving.http.probe import HealthProbe
from hybridjax.serving.http.respond import GenerationResponse
from hybridjax.serving.http.tokens import TextTokenizer, TokenTexts

# An event repeats all tokens, so it waits until it adds this share of them: otherwise the bytes of a
# long stream would grow with the square of its length.
NEW_SHARE = 1 / 256

LIBRARIES = ("hybridjax", "jax", "jaxlib", "flax", "numpy", "tokenizers")


class NativeAnswer:
    """The answer to POST /generate: per completion, its text and a ``meta_info``."""

    def __init__(
        self,
        request: GenerateRequest,
        ids: Sequence[str],
        texts: TokenTexts,
        clock: Callable[[], float],
        prompts: Sequence[Sequence[int]] = (),
    ):
        self._request = request
        self._first = [prompt[0] for prompt in prompts]
        self._ids = ids
        self._texts = texts
        self._clock = clock
        self._started = clock()
        # SGLang's events repeat everything so far.
        self._text = [""] * len(ids)
        self._token_ids: list[list[int]] = [[] for _ in ids]
        self._logprobs: list[list[TokenLogprob]] = [[] for _ in ids]
        self._input_logprobs: list[Sequence[TokenLogprob | None]] = [() for _ in ids]
        self._shown = [0] * len(ids)

    @property
    def _is_list(self) -> bool:
        return self._request.is_batch or len(self._ids) > 1

    def whole(self, outputs: Sequence[RequestOutput]) -> Any:
        for index, output in enumerate(outputs):
            self._add(index, output)
        replies = [self._reply(index, output) for index, output in enumerate(outputs)]
        return replies if self._is_list else replies[0]

    def openings(self) -> Iterable[Any]:
        return ()

    def event(self, index: int, output: RequestOutput) -> dict[str, Any] | None:
        self._add(index, output)
        tokens = len(self._token_ids[index])
        if output.finish_reason is None and tokens - self._shown[index] < tokens * NEW_SHARE:
            return None
        self._shown[index] = tokens
        reply = self._reply(index, output)
        return reply | {"index": index} if self._is_list else reply

    def endings(self) -> Iterable[Any]:
        return ()

    def _add(self, index: int, output: RequestOutput) -> None:
        self._text[index] += output.text
        self._token_ids[index].extend(output.token_ids)
        self._logprobs[index].extend(output.logprobs or ())
        if output.prompt_logprobs is not None:
            self._input_logprobs[index] = output.prompt_logprobs[self._request.logprob_start_len :]

    def _reply(self, index: int, output: RequestOutput) -> dict[str, Any]:
        text = {"text": self._text[index]} if self._texts.known else {}
        return text | {"output_ids": list(self._token_ids[index]), "meta_info": self._meta(index, output)}

    def _meta(self, index: int, output: RequestOutput) -> dict[str, Any]:
        meta: dict[str, Any] = {
            "id": self._ids[index],
            "finish_reason": _finish_reason(output),
            "prompt_tokens": output.prompt_tokens,
            "completion_tokens": output.completion_tokens,
            "cached_tokens": output.cached_tokens,
        }
        if self._request.return_logprob:
            # A prompt may be long, so of a stream's events only the last repeats it.
            prompt = self._input_logprobs[index] if output.finish_reason is not None else ()
            for name, entries in (("input", prompt), ("output", self._logprobs[index])):
                meta[f"{name}_token_logprobs"] = [self._token(index, entry) for entry in entries]
                if self._request.top_logprobs_num:
                    meta[f"{name}_top_logprobs"] = [self._top(entry) for entry in entries]
        if output.finish_reason is not None:
            meta["e2e_latency"] = self._clock() - self._started
        return meta

    def _token(self, index: int, entry: TokenLogprob | None) -> list[Any]:
        if entry is None:  # the first token of a prompt
            return self._entry(self._first[index // self._request.n], None)
        return self._entry(entry.token_id, entry.logprob)

    def _top(self, entry: TokenLogprob | None) -> list[Any] | None:
        return None if entry is None else [self._entry(*top) for top in entry.top]

    def _entry(self, token_id: int, logprob: float | None) -> list[Any]:
        text = self._texts.piece(token_id).text if self._request.return_text_in_logprobs else None
        return [None if logprob is None else finite(logprob), token_id, text]


class NativeRoutes:
    """The endpoints."""

    def __init__(
        self,
        front: Front,
        tokenizer: TextTokenizer | None,
        texts: TokenTexts,
        chats: Chats,
        config: ServerConfig,
    ):
        self._front = front
        self._tokenizer = tokenizer
        self._texts = texts
        self._chats = chats
        self._config = config
        self._probe = HealthProbe(front, config.health_check_timeout)

    async def generate(self, request: Request) -> Response:
        body = parse(await json_body(request), GenerateRequest)
        body.check()
        self._front.check_count(len(body.prompts) * body.n, "text" if body.text is not None else "input_ids")
        if self._tokenizer is None and any(params.stop for params in body.sampling_params):
            raise RequestError(
                "stop needs a tokenizer, which this server lacks", param="sampling_params.stop"
            )
        names = {rid: range(i * body.n, (i + 1) * body.n) for i, rid in enumerate(body.rid)}

        def prepare(generation: Generation) -> tuple[list[Job], NativeAnswer]:
            prompts = self._prompts(body)
            ids = _ids(body, generation.request_id)
            answer = NativeAnswer(body, ids, self._texts, self._front.telemetry.clock, prompts)
            return self._jobs(body, prompts), answer

        return GenerationResponse(self._front, prepare, stream=body.stream, names=names)

    async def model_info(self) -> dict[str, Any]:
        info = self._front.engine.info
        return {
            "model_path": info.model_path,
            "tokenizer_path": self._config.tokenizer_path or info.model_path,
            "is_generation": True,
            "preferred_sampling_params": dict(self._front.sampling_defaults) or None,
            "served_model_name": self._front.model,
            "context_length": info.context_length,
            "vocab_size": info.vocab_size,
            "has_image_understanding": info.images is not None,
        }

    async def server_info(self) -> dict[str, Any]:
        secret = secret_fields(type(self._config))
        fields = dataclasses.fields(self._config)
        settings = {f.name: getattr(self._config, f.name) for f in fields if f.name not in secret}
        state = dataclasses.asdict(self._front.engine.stats)
        state["last_gen_throughput"] = self._front.telemetry.tokens_per_second()
        return settings | {
            "version": _version("hybridjax"),
            "versions": {"python": platform.python_version()} | {name: _version(name) for name in LIBRARIES},
            "engine": dataclasses.asdict(self._front.engine.info),
            "internal_states": [state],
        }

    async def abort_request(self, request: Request) -> dict[str, Any]:
        body = parse(await json_body(request), AbortRequest)
        if body.abort_all:
            if not request.state.is_admin:
                raise UnauthorizedError("abort_all needs the admin key")
            return {"aborted": self._front.lifecycle.abort_all()}
        if not body.rid:
            raise RequestError("rid is missing", param="rid", code="missing_required_parameter")
        return {"aborted": self._front.lifecycle.abort(body.rid)}

    async def flush_cache(self, request: Request) -> dict[str, Any]:
        await run_in_threadpool(self._front.engine.flush_cache)
        return {"success": True}

    async def tokenize(self, request: Request) -> dict[str, Any]:
        body = parse(await json_body(request), TokenizeRequest)
        tokenizer = self._need_tokenizer()
        is_batch = isinstance(body.prompt, list)

        def encode() -> list[list[int]]:
            if body.messages:
                text = self._chats.render(body.conversation())
                return [tokenizer.encode(text, add_special_tokens=False)]
            texts = body.prompt if isinstance(body.prompt, list) else [body.prompt or ""]
            return [tokenizer.encode(text, add_special_tokens=body.add_special_tokens) for text in texts]

        tokens = await run_in_threadpool(encode)
        length = self._front.engine.info.context_length
        if not is_batch:
            return {"tokens": tokens[0], "count": len(tokens[0]), "max_model_len": length}
        return {"tokens": tokens, "count": [len(ids) for ids in tokens], "max_model_len": length}

    async def detokenize(self, request: Request) -> dict[str, Any]:
        body = parse(await json_body(request), DetokenizeRequest)
        tokenizer = self._need_tokenizer()
        size = self._front.engine.info.vocab_size
        is_batch = bool(body.tokens) and isinstance(body.tokens[0], list)
        batch: Any = body.tokens if is_batch else [body.tokens]

        def decode() -> list[str]:
            largest = max((max(ids, default=0) for ids in batch), default=0)
            if largest >= size:
                raise RequestError(f"tokens has {largest}; token ids are 0..{size - 1}", param="tokens")
            return [tokenizer.decode(ids, skip_special_tokens=body.skip_special_tokens) for ids in batch]

        texts = await run_in_threadpool(decode)
        return {"text": texts if is_batch else texts[0]}

    async def health_generate(self) -> Response:
        await self._probe.check()
        return JSONResponse({"status": "ok"})

    def _prompts(self, body: GenerateRequest) -> list[list[int]]:
        if body.text is None:
            prompts: list[Any] = list(body.prompts)
        else:
            tokenizer = self._need_tokenizer("text")
            prompts = [self._front.encode(tokenizer, str(text), "text") for text in body.prompts]
        if body.prompt_logprobs is not None:
            param = "logprob_start_len"
            shortest = min(map(len, prompts))
            if body.logprob_start_len > shortest:
                raise RequestError(
                    f"{param} is {body.logprob_start_len}; the prompt has only {shortest} tokens", param=param
                )
            self._front.check_prompt_logprobs(prompts, body.n, body.prompt_logprobs, param)
        return prompts

    def _jobs(self, body: GenerateRequest, prompts: list[list[int]]) -> list[Job]:
        each = body.sampling_params * (len(prompts) if len(body.sampling_params) == 1 else 1)
        defaults, logprobs = self._front.sampling_defaults, (body.logprobs, body.prompt_logprobs)
        options = body.submit_options()
        return [
            Job(prompt, params.sampling_params(choice, defaults, *logprobs), **options)
            for prompt, params in zip(prompts, each, strict=True)
            for choice in range(body.n)
        ]

    def _need_tokenizer(self, param: str | None = None) -> TextTokenizer:
        if self._tokenizer is None:
            raise RequestError("this server has no tokenizer; it takes token ids only", param=param)
        return self._tokenizer


def _ids(body: GenerateRequest, request_id: str) -> list[str]:
    """The id of each completion, all different."""
    if not body.rid:
        count = len(body.prompts) * body.n
        return [request_id] if count == 1 else [f"{request_id}-{index}" for index in range(count)]
    if body.n == 1:
        return list(body.rid)
    return [f"{rid}-{choice}" for rid in body.rid for choice in range(body.n)]


def _finish_reason(output: RequestOutput) -> dict[str, Any] | None:
    match output.finish_reason:
        case None:
            return None
        case "length":
            return {"type": "length", "length": output.completion_tokens}
        case "stop":
            last = output.token_ids[-1] if output.token_ids else None
            return {"type": "stop", "matched": last if output.stop_reason is None else output.stop_reason}
        case "timeout":
            return {"type": "abort", "message": "the request's timeout passed"}
        case reason:
            return {"type": reason, "message": "the request was aborted"}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
