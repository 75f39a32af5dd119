"""Turns a stream of token ids into a stream of text.

A character can be spread over tokens, so text is held back until it can no longer change: for every
way of cutting the ids into pushes, the pieces and the final flush add up to ``tokenizer.decode(ids)``.
"""

import codecs
from collections.abc import Sequence

from hybridjax.text.tokenizer import Tokenizer


class Detokenizer:
    """Incremental ``decode`` for one sequence; the cost of a push does not grow with the sequence."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True):
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._stream = _Bytes(tokenizer) if tokenizer.is_byte_level else _Window(tokenizer)

    def push(self, ids: Sequence[int]) -> str:
        """Takes the next token ids and returns the text that is now certain, possibly none."""
        return self._stream.push([i for i in ids if i not in self._skipped])

    def flush(self) -> str:
        """Ends the sequence and returns what was held back; unfinished characters become U+FFFD."""
        return self._stream.flush()


class _Bytes:
    """Byte-level BPE: tokens are bytes, and only the last character can be unfinished."""

    def __init__(self, tokenizer: Tokenizer):
        self._bytes = tokenizer.token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Sequence[int]) -> str:
        return self._utf8.decode(b"".join(map(self._bytes, ids)))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class _Window:
    """Any other decoder: decodes a short window and returns what its second part adds to the first.

    The first part (``prefix``) is text already returned, kept because some decoders treat the start of
    a text differently (they drop its leading space). With byte fallback, a run of byte tokens is valid
    or not as a whole, so it is held back until it ends.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._prefix = 0  # how many tokens of the window are the prefix
        self._certain = 0  # how many tokens of the window cannot change any more

    def push(self, ids: Sequence[int]) -> str:
        for index in ids:
            token = self._tokenizer.id_to_token(index)
            if token is None:
                continue
            self._window.append(index)
            if not (self._tokenizer.has_byte_fallback and _is_byte(token)):
                self._certain = len(self._window)
        return self._advance(self._certain)

    def flush(self) -> str:
        return self._advance(len(self._window))

    def _advance(self, end: int) -> str:
        if end == self._prefix:
            return ""
        before = self._tokenizer.decode(self._window[: self._prefix], skip_special_tokens=False)
        after = self._tokenizer.decode(self._window[:end], skip_special_tokens=False)
        new = after[len(before) :]
        if new:
            self._window = self._window[self._prefix :]
            self._prefix, self._certain = end - self._prefix, self._certain - self._prefix
        return new


def _is_byte(token: str) -> bool:
    return len(token) == 6 and token.startswith("<0x") and token.endswith(">")
