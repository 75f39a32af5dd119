"""Tokenizers, incremental detokenising, sandboxed chat templates, and what models write: reasoning and tool
calls. Knows nothing of models or jax."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hybridjax.text.chat_template import ChatTemplate, ToolUse
    from hybridjax.text.detokenizer import Detokenizer
    from hybridjax.text.tokenizer import Tokenizer, load_tokenizer

__all__ = ["ChatTemplate", "Detokenizer", "Tokenizer", "ToolUse", "load_tokenizer"]

_MODULES = {
    "ChatTemplate": "chat_template",
    "Detokenizer": "detokenizer",
    "Tokenizer": "tokenizer",
    "ToolUse": "chat_template",
    "load_tokenizer": "tokenizer",
}


def __getattr__(name: str) -> Any:
    """Imports at first use: who only reads what a model wrote needs no tokenizer library."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
