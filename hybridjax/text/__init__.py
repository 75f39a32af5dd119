"""Tokenizers, incremental detokenising and sandboxed chat templates. Knows nothing of models or jax."""

from hybridjax.text.chat_template import ChatTemplate, ToolUse
from hybridjax.text.detokenizer import Detokenizer
from hybridjax.text.tokenizer import Tokenizer, load_tokenizer

__all__ = ["ChatTemplate", "Detokenizer", "Tokenizer", "ToolUse", "load_tokenizer"]
