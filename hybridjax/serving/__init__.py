"""The serving engine. Public names are imported lazily: ``hybridjax.serving.api`` alone stays light."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hybridjax.serving.api import GenerationResult as GenerationResult
    from hybridjax.serving.api import RequestOutput as RequestOutput
    from hybridjax.serving.api import SamplingParams as SamplingParams
    from hybridjax.serving.engine import Engine as Engine

_HOME = {
    "Engine": "hybridjax.serving.engine",
    "GenerationResult": "hybridjax.serving.api",
    "RequestOutput": "hybridjax.serving.api",
    "SamplingParams": "hybridjax.serving.api",
}
__all__ = ["Engine", "GenerationResult", "RequestOutput", "SamplingParams"]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'hybridjax.serving' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
