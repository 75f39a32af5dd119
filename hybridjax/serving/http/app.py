"""The routes."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from pydantic.json_schema import models_json_schema
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from hybridjax.configs.serving import ServerConfig
from hybridjax.errors import EngineDeadError, ModelNotFoundError, RequestError
from hybridjax.serving.api import FrontDoor
from hybridjax.serving.http import errors
from hybridjax.serving.http.auth import Authentication
from hybridjax.serving.http.bodies import CompletionBodies, Envelope
from hybridjax.serving.http.chat import Chats, Prepared
from hybridjax.serving.http.content import check_images
from hybridjax.serving.http.errors import DrainingError, MetricsDisabledError
from hybridjax.serving.http.generation import Front, Generation, Job, Lifecycle
from hybridjax.serving.http.metrics import CONTENT_TYPE, Metrics
from hybridjax.serving.http.middleware import BodyLimit, CrossSiteCheck, HostCheck, RequestLog
from hybridjax.serving.http.native import NativeRoutes
from hybridjax.serving.http.native_protocol import (
    AbortRequest,
    DetokenizeRequest,
    GenerateRequest,
    TokenizeRequest,
)
from hybridjax.serving.http.parsing import json_body, parse, show
from hybridjax.serving.http.protocol import (
    MAX_PROMPTS,
    ChatCompletionRequest,
    CompletionRequest,
    GenerationRequest,
    Schema,
)
from hybridjax.serving.http.respond import Answer, GenerationResponse, OpenAIAnswer
from hybridjax.serving.http.telemetry import Telemetry
from hybridjax.serving.http.tokens import TextTokenizer, TokenTexts
from hybridjax.serving.http.webpage import STATE_PATH, WebPage, page_state

BODIES: tuple[type[Schema], ...] = (
    *(CompletionRequest, ChatCompletionRequest, GenerateRequest),
    *(TokenizeRequest, DetokenizeRequest, AbortRequest),
)


# Prompts whose images are decoded at a time: each image may take hundreds of megabytes meanwhile.
IMAGE_WORKERS = 4


def create_app(engine: FrontDoor, tokenizer: TextTokenizer | None, config: ServerConfig) -> FastAPI:
    """The OpenAI-compatible application over an engine that is ready.

    Args:
      engine: takes the requests.
      tokenizer: None serves prompts of token ids only, and answers with token ids.
      config: names the model and bounds the body.

    Returns:
      The ASGI application; its ``state.lifecycle`` is what a server drains.
    """
    service = _Service(engine, tokenizer, config)
    app = FastAPI(title="hybridjax", docs_url=None, redoc_url=None, redirect_slashes=False)
    app.state.lifecycle = service.lifecycle
    errors.install(app)
    app.add_middleware(BodyLimit, limit=config.max_request_bytes)
    app.add_middleware(Authentication, config=config)
    app.add_middleware(CrossSiteCheck)
    app.add_middleware(HostCheck)
    app.add_middleware(RequestLog, model=service.name if config.log_requests else None)

    def route(path: str, endpoint: Callable[..., Any], method: str, **documented: Any) -> None:
        app.add_api_route(path, endpoint, methods=[method], response_model=None, **documented)

    route("/v1/completions", service.completions, "POST", openapi_extra=_documented(CompletionRequest))
    route("/v1/chat/completions", service.chat, "POST", openapi_extra=_documented(ChatCompletionRequest))
    route("/v1/models", service.models, "GET")
    route("/v1/models/{model_id:path}", service.model, "GET")
    route("/health", service.health, "GET")
    route("/health", service.health, "HEAD", include_in_schema=False)
    route("/metrics", service.metrics, "GET")
    if service.page is not None:
        route("/", service.web_page, "GET", include_in_schema=False)
        route(STATE_PATH, service.web_state, "GET")
    native = service.native
    route("/generate", native.generate, "POST", openapi_extra=_documented(GenerateRequest))
    route("/tokenize", native.tokenize, "POST", openapi_extra=_documented(TokenizeRequest))
    route("/detokenize", native.detokenize, "POST", openapi_extra=_documented(DetokenizeRequest))
    route("/flush_cache", native.flush_cache, "POST")
    route("/abort_request", native.abort_request, "POST", openapi_extra=_documented(AbortRequest))
    route("/health_generate", native.health_generate, "GET")
    for path in ("/model_info", "/get_model_info"):
        route(path, native.model_info, "GET")
    for path in ("/server_info", "/get_server_info"):
        route(path, native.server_info, "GET")
    _document_schemas(app)
    return app


class _Service:
    def __init__(self, engine: FrontDoor, tokenizer: TextTokenizer | None, config: ServerConfig):
        self.lifecycle = Lifecycle()
        self.telemetry = Telemetry()
        self._engine = engine
        self._tokenizer = tokenizer
        self._texts = TokenTexts(tokenizer)
        self.name = config.served_model_name or engine.info.model_name
        self.page = None if config.disable_web_page else WebPage()
        self._front = Front(
            engine=engine,
            lifecycle=self.lifecycle,
            telemetry=self.telemetry,
            model=self.name,
            max_completions=min(MAX_PROMPTS, config.max_queued_requests),
            sampling_defaults=engine.info.sampling_defaults if config.sampling_defaults == "model" else {},
        )
        self._metrics = Metrics(engine, self.telemetry, self.name) if config.enable_metrics else None
        self._chats = Chats(self._front, tokenizer, self._texts, config)
        self.native = NativeRoutes(self._front, tokenizer, self._texts, self._chats, config)
        self._created = int(time.time())
        self._image_gate = asyncio.Semaphore(IMAGE_WORKERS)

    async def completions(self, request: Request) -> Response:
        body = parse(await json_body(request), CompletionRequest)
        self._check_model(body.model)
        self._front.check_count(len(body.prompt) * body.n, "prompt")
        return self._generate(body, lambda _: self._prepare_completions(body))

    async def chat(self, request: Request) -> Response:
        body = parse(await json_body(request), ChatCompletionRequest)
        self._check_model(body.model)
        pictures = body.pictures()
        check_images(len(pictures), self._engine.info)
        gate = self._image_gate if pictures else None
        return self._generate(body, lambda generation: self._chats.prepare(body, pictures, generation), gate)

    async def models(self) -> dict[str, Any]:
        return {"object": "list", "data": [self._card()]}

    async def model(self, model_id: str) -> dict[str, Any]:
        if not model_id:
            raise ModelNotFoundError("the path names no model", param="model")
        self._check_model(model_id)
        return self._card()

    async def health(self) -> Response:
        if self.lifecycle.draining:
            raise DrainingError("the server is shutting down")
        if not self._engine.is_healthy:
            raise EngineDeadError("the engine is not healthy")
        return JSONResponse({"status": "ok"})

    async def metrics(self) -> Response:
        if self._metrics is None:
            raise MetricsDisabledError("this server was started without --enable-metrics")
        body = await run_in_threadpool(self._metrics.render)
        return Response(body, headers={"content-type": CONTENT_TYPE})

    async def web_page(self) -> Response:
        assert self.page is not None
        return self.page.response()

    async def web_state(self) -> dict[str, Any]:
        chat = self._tokenizer is not None and self._tokenizer.has_chat_template
        return page_state(self._engine, self.telemetry, self.lifecycle, model=self.name, chat=chat)

    def _card(self) -> dict[str, Any]:
        info = self._engine.info
        card = {"id": self.name, "object": "model", "created": self._created, "owned_by": "hybridjax"}
        return card | {"root": info.model_path, "max_model_len": info.context_length}

    def _check_model(self, name: str) -> None:
        if name not in ("", self.name):
            raise ModelNotFoundError(
                f"the model {show(name)} does not exist here; this server serves {self.name!r}",
                param="model",
            )

    def _generate(
        self,
        body: GenerationRequest,
        prepare: Callable[[Generation], Prepared],
        gate: asyncio.Semaphore | None = None,
    ) -> Response:
        if self._tokenizer is None and body.stop:
            raise RequestError("stop needs a tokenizer, which this server lacks", param="stop")
        token_ids = body.return_token_ids or self._tokenizer is None

        def prepare_all(generation: Generation) -> tuple[list[Job], Answer]:
            params = [body.sampling_params(choice, self._front.sampling_defaults) for choice in range(body.n)]
            prepared = prepare(generation)
            prompts, images = prepared.prompts, prepared.images
            params = [prepared.adapt(each) for each in params]
            self._front.check_prompt_logprobs(prompts, body.n, params[0].prompt_logprobs)
            options = body.submit_options()
            jobs = [Job(prompt, each, images, **options) for prompt in prompts for each in params]
            envelope = Envelope(prepared.bodies, generation.request_id, self.name)
            return jobs, OpenAIAnswer(body, prompts, prepared.bodies, envelope, token_ids)

        return GenerationResponse(self._front, prepare_all, stream=body.stream, gate=gate)

    def _prepare_completions(self, body: CompletionRequest) -> Prepared:
        texts = [prompt for prompt in body.prompt if isinstance(prompt, str)]
        ids = [prompt for prompt in body.prompt if not isinstance(prompt, str)]
        tokenizer = self._tokenizer
        if tokenizer is None:
            if texts:
                raise RequestError("this server has no tokenizer; send token ids", param="prompt")
            if body.echo:
                raise RequestError("echo needs a tokenizer, which this server lacks", param="echo")
            return Prepared(ids, CompletionBodies(body, self._texts, ids, ()))
        prompts = ids or [self._front.encode(tokenizer, text, "prompt") for text in texts]
        echoes = texts if texts or not body.echo else [tokenizer.decode(prompt) for prompt in ids]
        return Prepared(prompts, CompletionBodies(body, self._texts, prompts, echoes))


def _documented(schema: type[Schema]) -> dict[str, Any]:
    reference = {"$ref": f"#/components/schemas/{schema.__name__}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": reference}}}}


def _document_schemas(app: FastAPI) -> None:
    generate = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            _, schemas = models_json_schema(
                [(schema, "validation") for schema in BODIES],
                ref_template="#/components/schemas/{model}",
            )
            generate().setdefault("components", {}).setdefault("schemas", {}).update(schemas["$defs"])
        return generate()

    app.openapi = openapi
