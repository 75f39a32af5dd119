"""Every failure in OpenAI's error shape."""

import json
import logging
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Scope

from hybridjax.errors import EngineDeadError, HybridJaxError, ModelNotFoundError, QueueFullError, RequestError

logger = logging.getLogger("hybridjax.http")

DRAINING_RETRY_AFTER = 5
CLIENT_CLOSED_REQUEST = 499
INTERNAL_MESSAGE = "The server failed on this request; its log has the details under request id "


class BodyTooLargeError(HybridJaxError):
    """The body has more than max_request_bytes. Becomes HTTP 413."""


class UnsupportedMediaTypeError(HybridJaxError):
    """The body is not declared as JSON. Becomes HTTP 415."""


class MetricsDisabledError(HybridJaxError):
    """There are no metrics without --enable-metrics. Becomes HTTP 404."""


class UnauthorizedError(HybridJaxError):
    """The request lacks the key that its route needs. Becomes HTTP 401."""


class BadHostError(HybridJaxError):
    """The Host header is no host name or address. Becomes HTTP 400."""


class CrossSiteError(HybridJaxError):
    """A page of another site made a browser send this. Becomes HTTP 403."""


class DrainingError(HybridJaxError):
    """The server is shutting down. Becomes HTTP 503."""


class GenerationFailedError(HybridJaxError):
    """The engine reported an error for a request that it had accepted. Becomes HTTP 500."""


class RequestTimeoutError(HybridJaxError):
    """The request's own timeout passed before it had a token. Becomes HTTP 504."""


def error_body(message: str, kind: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def describe(error: Exception, request_id: str) -> tuple[int, dict[str, Any], dict[str, str]]:
    """Status, body and headers that tell a client about the error, and no internals."""
    invalid = "invalid_request_error"
    match error:
        case ModelNotFoundError():
            return 404, error_body(str(error), invalid, error.param, error.code or "model_not_found"), {}
        case RequestError():
            return 400, error_body(str(error), invalid, error.param, error.code), {}
        case MetricsDisabledError():
            return 404, error_body(str(error), invalid, code="metrics_disabled"), {}
        case UnauthorizedError():
            body = error_body(str(error), "authentication_error", code="invalid_api_key")
            return 401, body, {"www-authenticate": "Bearer"}
        case BadHostError():
            return 400, error_body(str(error), invalid, code="bad_host"), {}
        case CrossSiteError():
            return 403, error_body(str(error), invalid, code="cross_site"), {}
        case BodyTooLargeError():
            return 413, error_body(str(error), invalid, code="request_too_large"), {}
        case UnsupportedMediaTypeError():
            return 415, error_body(str(error), invalid, code="unsupported_media_type"), {}
        case QueueFullError():
            body = error_body(str(error), "service_unavailable", code="queue_full")
            return 503, body, {"retry-after": str(error.retry_after)}
        case DrainingError():
            body = error_body(str(error), "service_unavailable", code="draining")
            return 503, body, {"retry-after": str(DRAINING_RETRY_AFTER)}
        case EngineDeadError():
            return 503, error_body(str(error), "service_unavailable", code="engine_dead"), {}
        case RequestTimeoutError():
            return 504, error_body(str(error), "timeout", code="timeout"), {}
        case HTTPException(status_code=404):
            return 404, error_body("there is no such route", invalid, code="not_found"), {}
        case HTTPException(status_code=405):
            body = error_body("this route has no such method", invalid, code="method_not_allowed")
            return 405, body, dict(error.headers or {})
        case _:
            return 500, error_body(INTERNAL_MESSAGE + request_id, "server_error", code="internal_error"), {}


def error_response(error: Exception, scope: Scope) -> JSONResponse:
    """The answer to a request that failed; notes in its state, for the log, why."""
    status, body, headers = describe(error, scope["state"]["request_id"])
    scope["state"]["error"] = body["error"]["code"] or body["error"]["type"]
    return JSONResponse(body, status, headers)


def dumps(value: Any) -> bytes:
    """JSON without characters that a line-based reader could take for the end of a line."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for separator in ("\x85", "\u2028", "\u2029"):
        text = text.replace(separator, f"\\u{ord(separator):04x}")
    # A lone surrogate becomes its JSON escape.
    return text.encode("utf-8", "backslashreplace")


def install(app: FastAPI) -> None:
    async def answer(request: Request, error: Exception) -> Response:
        if isinstance(error, GenerationFailedError):
            logger.error("%s the engine failed: %s", request.state.request_id, error)
        return error_response(error, request.scope)

    async def nobody_listens(request: Request, error: Exception) -> Response:
        return Response(status_code=CLIENT_CLOSED_REQUEST)

    for kind in (RequestError, BodyTooLargeError, UnsupportedMediaTypeError, DrainingError, QueueFullError):
        app.add_exception_handler(kind, answer)
    for kind in (
        EngineDeadError,
        GenerationFailedError,
        HTTPException,
        MetricsDisabledError,
        RequestTimeoutError,
        UnauthorizedError,
    ):
        app.add_exception_handler(kind, answer)
    app.add_exception_handler(ClientDisconnect, nobody_listens)
