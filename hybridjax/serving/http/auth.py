"""Who may call which route: API keys, checked before anything else sees the request."""

import hashlib
import hmac

from starlette.types import ASGIApp, Receive, Scope, Send

from hybridjax.configs.serving import ServerConfig
from hybridjax.errors import HybridJaxError
from hybridjax.serving.http.errors import UnauthorizedError, error_response

# The page holds nothing of the server's; what it shows, it asks for with the key.
PUBLIC = frozenset({"/health", "/"})
# What the API key opens. Any other path counts as an operator's route, also one that nobody listed.
ORDINARY = frozenset(
    {
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/models",
        "/generate",
        "/tokenize",
        "/detokenize",
        # Its abort_all asks for more by itself.
        "/abort_request",
        "/health_generate",
        "/model_info",
        "/get_model_info",
        "/metrics",
        "/web/state",
        "/openapi.json",
    }
)
ORDINARY_PREFIX = "/v1/models/"

# Of a refused body, what is read so that a client still sending sees the refusal and not a reset.
DISCARDED_BYTES = 2**20


class Keys:
    """The keys of a server, as digests: of one length, so that comparing them tells nothing."""

    def __init__(self, config: ServerConfig):
        self._api = _digest(config.api_key)
        self._admin = _digest(config.admin_api_key)

    def allows_ordinary(self, token: bytes | None) -> bool:
        return self._api is None or _equal(token, self._api) | _equal(token, self._admin)

    def allows_admin(self, token: bytes | None) -> bool:
        """An admin key is needed if there is one; otherwise what opens the ordinary routes will do."""
        return self.allows_ordinary(token) if self._admin is None else _equal(token, self._admin)


class Authentication:
    """Refuses a request without the key that its path needs; notes whether it has an operator's rights.

    The path is the server's own reading of the request line, which is also what picks the route: the
    Host header and everything computed from it play no part.
    """

    def __init__(self, app: ASGIApp, config: ServerConfig):
        self.app = app
        self._keys = Keys(config)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise HybridJaxError(f"there is nothing here that speaks {scope['type']}")
        token = bearer_token(scope)
        path = scope["path"]
        is_admin = self._keys.allows_admin(token)
        scope["state"]["is_admin"] = is_admin
        if path in PUBLIC or is_admin:
            allowed = True
        else:
            ordinary = path in ORDINARY or path.startswith(ORDINARY_PREFIX)
            allowed = ordinary and self._keys.allows_ordinary(token)
        if allowed:
            return await self.app(scope, receive, send)
        if not any(name == b"expect" for name, _ in scope["headers"]):
            await discard(receive, DISCARDED_BYTES)
        await error_response(_refusal(token), scope)(scope, receive, send)


def bearer_token(scope: Scope) -> bytes | None:
    """The token of the one ``Authorization: Bearer`` header; None without or with several of them."""
    values = [value for name, value in scope["headers"] if name == b"authorization"]
    if len(values) != 1:
        return None
    scheme, _, token = values[0].partition(b" ")
    return token.strip() if scheme.lower() == b"bearer" else None


async def discard(receive: Receive, limit: int) -> None:
    """Reads a body that nobody wants, as far as the limit."""
    seen = 0
    more = True
    while more and seen <= limit:
        message = await receive()
        seen += len(message.get("body", b""))
        more = message.get("more_body", False)


def _refusal(token: bytes | None) -> UnauthorizedError:
    if token is None:
        return UnauthorizedError("this route needs a key; send it as 'Authorization: Bearer KEY'")
    return UnauthorizedError("the key in the Authorization header does not open this route")


def _digest(key: str | None) -> bytes | None:
    return None if key is None else hashlib.sha256(key.encode()).digest()


def _equal(token: bytes | None, digest: bytes | None) -> bool:
    # Without a key to compare with, the work is the same.
    given = hashlib.sha256(token or b"").digest()
    same = hmac.compare_digest(given, digest or bytes(32))
    return same and token is not None and digest is not None
