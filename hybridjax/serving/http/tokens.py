"""Single tokens as clients see them, and what the server needs of a tokenizer."""

import functools
import re
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from hybridjax.text import ToolUse

BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")


class TextTokenizer(Protocol):
    """What the server needs of a tokenizer (hybridjax.text)."""

    is_byte_level: bool

    @property
    def has_chat_template(self) -> bool: ...

    @property
    def tool_use(self) -> ToolUse: ...

    @property
    def chat_reasons(self) -> bool: ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def too_long(self, text: str, max_tokens: int) -> bool: ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...

    def token_bytes(self, index: int) -> bytes: ...

    def id_to_token(self, index: int) -> str | None: ...

    def render_chat(
        self, messages: Any, tools: Any = None, add_generation_prompt: bool = True, **kwargs: Any
    ) -> str: ...


class Piece(NamedTuple):
    """A token as clients see it.

    Attributes:
      text: what it reads like.
      bytes: None where they are not known.
      characters: how many characters of the text begin in it; of the pieces of one character, the
        first has it.
    """

    text: str
    bytes: bytes | None
    characters: int


class TokenTexts:
    """The text of single tokens, as they read in the middle of a sentence."""

    def __init__(self, tokenizer: TextTokenizer | None):
        self._tokenizer = tokenizer
        self.known = tokenizer is not None
        # Many decoders drop a first token's space, so every token is decoded behind this one.
        self._before = tokenizer.encode("a", add_special_tokens=False)[-1:] if tokenizer else []
        self._before_text = self._decode(self._before)
        self.piece = functools.lru_cache(maxsize=2**17)(self._piece)

    def _piece(self, token_id: int) -> Piece:
        if self._tokenizer is None:
            return Piece(f"token_id:{token_id}", None, 0)
        text = self._text(token_id)
        if "\ufffd" not in text:
            return Piece(text, text.encode("utf-8", "replace"), len(text))
        # A token that ends within a character; OpenAI's spelling keeps such tokens apart.
        known = self._tokenizer.token_bytes(token_id) if self._tokenizer.is_byte_level else None
        if known is None and (byte := BYTE_TOKEN.fullmatch(self._tokenizer.id_to_token(token_id) or "")):
            known = bytes([int(byte[1], 16)])
        if known is None:
            return Piece(text, None, len(text))
        return Piece(f"bytes:{str(known)[2:-1]}", known, sum(byte & 0xC0 != 0x80 for byte in known))

    def _text(self, token_id: int) -> str:
        text = self._decode([*self._before, token_id])
        if text.startswith(self._before_text):
            return text[len(self._before_text) :]
        return self._decode([token_id])

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False) if self._tokenizer and ids else ""
