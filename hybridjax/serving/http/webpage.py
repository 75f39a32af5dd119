"""The page at ``/``: one file without outside parts, which may run its own script and nothing else."""

import base64
import hashlib
from importlib.resources import files
from typing import Any

from starlette.responses import Response

from hybridjax.serving.api import FrontDoor
from hybridjax.serving.http.generation import Lifecycle
from hybridjax.serving.http.telemetry import Telemetry

STATE_PATH = "/web/state"


class WebPage:
    """Puts the page together from its files in the package, with the headers that lock it in."""

    def __init__(self):
        folder = files("hybridjax.serving.http") / "web"
        style, script = ((folder / name).read_text("utf-8") for name in ("page.css", "page.js"))
        page = (folder / "page.html").read_text("utf-8")
        self._body = page.replace("/*style*/", style).replace("/*script*/", script).encode()
        self._headers = {
            "content-type": "text/html; charset=utf-8",
            "cache-control": "no-cache",
            "content-security-policy": "; ".join(
                (
                    "default-src 'none'",
                    f"script-src '{_hash(script)}'",
                    f"style-src '{_hash(style)}'",
                    "connect-src 'self'",
                    "img-src data:",
                    "base-uri 'none'",
                    "form-action 'none'",
                    "frame-ancestors 'none'",
                    # Whatever a model writes, no string becomes markup.
                    "require-trusted-types-for 'script'",
                    "trusted-types 'none'",
                )
            ),
            "x-content-type-options": "nosniff",
            "referrer-policy": "no-referrer",
            "cross-origin-opener-policy": "same-origin",
            "cross-origin-resource-policy": "same-origin",
        }

    def response(self) -> Response:
        return Response(self._body, headers=self._headers)


def page_state(
    engine: FrontDoor, telemetry: Telemetry, lifecycle: Lifecycle, *, model: str, chat: bool
) -> dict[str, Any]:
    """What the page shows about the server: nothing that a client of the API may not know.

    Args:
      engine, telemetry, lifecycle: what it tells about.
      model: its name to clients.
      chat: whether there is a chat template.
    """
    info, stats = engine.info, engine.stats
    state = "draining" if lifecycle.draining else "ready" if engine.is_healthy else "failed"
    return {
        "model": model,
        "state": state,
        "chat": chat,
        "images": None if info.images is None else {"max_count": info.images.max_images},
        "context_length": info.context_length,
        "max_running": info.max_running_requests,
        "running": stats.running,
        "waiting": stats.waiting,
        "tokens_per_second": telemetry.tokens_per_second(),
        "generated_tokens": telemetry.generated_tokens,
        "finished": sum(telemetry.finished.values()),
        "first_token_seconds": telemetry.median_first_token(),
        "cache_hit_rate": telemetry.cache_hit_rate(),
        "page_share": stats.used_pages / stats.total_pages if stats.total_pages else 0.0,
        "slot_share": stats.used_slots / stats.total_slots if stats.total_slots else 0.0,
    }


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
