"""hybridjax: hybrid linear + sparse attention language models in JAX.

The public names are imported lazily, so that ``import hybridjax`` costs nothing and a module that
needs only one layer never pays for the serving engine.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hybridjax.checkpoints import load_model as load_model
    from hybridjax.checkpoints import load_tokenizer as load_tokenizer
    from hybridjax.checkpoints import save_pretrained as save_pretrained
    from hybridjax.serving import Engine as Engine
    from hybridjax.serving import SamplingParams as SamplingParams

__version__ = "0.1.0"

_HOME = {
    "load_model": "hybridjax.checkpoints",
    "save_pretrained": "hybridjax.checkpoints",
    "load_tokenizer": "hybridjax.checkpoints",
    "Engine": "hybridjax.serving",
    "SamplingParams": "hybridjax.serving",
}
__all__ = ["Engine", "SamplingParams", "load_model", "load_tokenizer", "save_pretrained"]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'hybridjax' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
