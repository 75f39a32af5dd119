"""Around every request: an id, a line in the log, a limit on the body, no traceback for the client."""

import logging
import re
import time
import uuid
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hybridjax.serving.http.errors import (
    CLIENT_CLOSED_REQUEST,
    BadHostError,
    BodyTooLargeError,
    CrossSiteError,
    dumps,
    error_response,
)

logger = logging.getLogger("hybridjax.http")
request_logger = logging.getLogger("hybridjax.requests")

GENERATING = frozenset({"/v1/completions", "/v1/chat/completions", "/generate"})
# Asked for again and again by machines.
POLLED = frozenset({"/health", "/metrics", "/web/state"})
HOST = re.compile(rb"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(:[0-9]{1,5})?")


class RequestLog:
    """Gives the request an id (also the reply's x-request-id), logs it, and turns bugs into HTTP 500.

    Args:
      model: the name in a line of JSON per request that generates, or would have; None: no such lines.
    """

    def __init__(self, app: ASGIApp, model: str | None = None):
        self.app = app
        self._model = model

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        request_id = uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        status = None
        started = time.monotonic()

        async def tagged(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
                message = {**message, "headers": headers}
            await send(message)

        try:
            await self.app(scope, receive, tagged)
        except Exception as error:
            if status is not None:
                raise
            logger.exception("%s unexpected error", request_id)
            await error_response(error, scope)(scope, receive, tagged)
        finally:
            level = logging.DEBUG if scope["path"] in POLLED else logging.INFO
            shown = ascii(scope["path"][:100])[1:-1]
            seconds = time.monotonic() - started
            code = status or CLIENT_CLOSED_REQUEST
            logger.log(level, "%s %s %s %d %.3f s", request_id, scope["method"], shown, code, seconds)
            if self._model is not None and scope["path"] in GENERATING:
                self._log(scope, code, seconds)

    def _log(self, scope: Scope, status: int, seconds: float) -> None:
        """One line of JSON: counts and times, nothing that clients or models have written."""
        state = scope["state"]
        line: dict[str, Any] = {"id": state["request_id"], "route": scope["path"], "model": self._model}
        line |= {"status": status, "error": state.get("error"), "latency": round(seconds, 6)}
        request_logger.info("%s", dumps(line | state.get("summary", {})).decode())


class HostCheck:
    """Refuses a Host header that is neither a name nor an address, with an optional port.

    Nothing here is decided by it; but what reads it later (a proxy, a log, a redirect) may be confused.
    """

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            hosts = [value for name, value in scope["headers"] if name == b"host"]
            if len(hosts) > 1 or not all(HOST.fullmatch(host) for host in hosts):
                error = BadHostError("the Host header must be a name or an address, with or without a port")
                return await error_response(error, scope)(scope, receive, send)
        await self.app(scope, receive, send)


class CrossSiteCheck:
    """Refuses what a browser sends for a page of elsewhere, which could not read the answer anyway.

    Most requests are JSON, about which a browser asks first; those without a body it would just send.
    """

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] not in ("GET", "HEAD"):
            site = Headers(scope=scope).get("sec-fetch-site", "none")
            if site not in ("same-origin", "none"):
                error = CrossSiteError("pages of other sites may not use this server")
                return await error_response(error, scope)(scope, receive, send)
        await self.app(scope, receive, send)


class BodyLimit:
    """Counts the body as it arrives and refuses it beyond the limit, whatever content-length says."""

    def __init__(self, app: ASGIApp, limit: int):
        self.app = app
        self.limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        headers = Headers(scope=scope)
        declared = headers.get("content-length", "")
        too_large = declared.isdecimal() and int(declared[:20]) > self.limit
        received = 0

        async def counted() -> Message:
            nonlocal received
            if too_large and "expect" in headers:
                raise self._error()
            message = await receive()
            received += len(message.get("body", b""))
            if too_large or received > self.limit:
                await self._discard(message, receive)
                raise self._error()
            return message

        await self.app(scope, counted, send)

    def _error(self) -> BodyTooLargeError:
        return BodyTooLargeError(f"the body is too large; at most {self.limit} bytes are taken")

    async def _discard(self, message: Message, receive: Receive) -> None:
        # A client still sending when the connection closes would see a reset instead of the answer.
        seen = 0
        while message.get("more_body") and seen <= 4 * self.limit:
            message = await receive()
            seen += len(message.get("body", b""))
