"""Around every request: an id, a line in the log, a limit on the body, no traceback for the client."""

import logging
import time
import uuid

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hybridjax.serving.http.errors import CLIENT_CLOSED_REQUEST, BodyTooLargeError, error_response

logger = logging.getLogger("hybridjax.http")


class RequestLog:
    """Gives the request an id (also the reply's x-request-id), logs it, and turns bugs into HTTP 500."""

    def __init__(self, app: ASGIApp):
        self.app = app

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
            await error_response(error, request_id)(scope, receive, tagged)
        finally:
            level = logging.DEBUG if scope["path"] == "/health" else logging.INFO
            shown = ascii(scope["path"][:100])[1:-1]
            seconds = time.monotonic() - started
            code = status or CLIENT_CLOSED_REQUEST
            logger.log(level, "%s %s %s %d %.3f s", request_id, scope["method"], shown, code, seconds)


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
