"""The JSON that goes out: OpenAI's completion and chat objects."""

import functools
import re
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from hybridjax.serving.api import RequestOutput, TokenLogprob
from hybridjax.serving.http.protocol import ChatCompletionRequest, CompletionRequest

# JSON has no -inf; OpenAI's own servers use this number for "impossible".
LOWEST_LOGPROB = -9999.0
BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")


class TextTokenizer(Protocol):
    """What the server needs of a tokenizer (hybridjax.text)."""

    is_byte_level: bool

    @property
    def has_chat_template(self) -> bool: ...

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


def usage(prompts: Sequence[Sequence[int]], n: int, last: dict[int, RequestOutput]) -> dict[str, Any]:
    """Token counts; a prompt counts once, however many choices continue it.

    Images make a prompt longer than it was sent; the engine knows by how much.
    """
    counted = {index // n: output.prompt_tokens for index, output in last.items()}
    prompt_tokens = sum(max(len(prompt), counted.get(i, 0)) for i, prompt in enumerate(prompts))
    completion_tokens = sum(output.completion_tokens for output in last.values())
    cached = sum(output.cached_tokens for index, output in last.items() if index % n == 0)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


class CompletionBodies:
    """Bodies of /v1/completions."""

    prefix = "cmpl-"
    whole_object = chunk_object = "text_completion"

    def __init__(self, request: CompletionRequest, texts: TokenTexts, echoes: Sequence[str]):
        """``echoes``: per prompt, the text to begin each of its completions with."""
        self._request = request
        self._texts = texts
        self._echoes = echoes
        self._offsets: dict[int, int] = {}

    def opening(self, index: int) -> dict[str, Any] | None:
        """The first chunk of a choice, before anything is generated."""
        echo = self._echo(index)
        return self._choice(index, echo, None, None) if echo else None

    def delta(self, index: int, output: RequestOutput) -> dict[str, Any]:
        return self._choice(index, output.text, self._logprobs(index, output.logprobs), output)

    def whole(self, index: int, output: RequestOutput) -> dict[str, Any]:
        text = self._echo(index) + output.text
        return self._choice(index, text, self._logprobs(index, output.logprobs), output)

    def _echo(self, index: int) -> str:
        return self._echoes[index // self._request.n] if self._request.echo else ""

    def _choice(self, index: int, text: str, logprobs: Any, output: RequestOutput | None) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": logprobs} | _ending(output)

    def _logprobs(self, index: int, entries: tuple[TokenLogprob, ...] | None) -> dict[str, Any] | None:
        if self._request.logprobs is None or not entries:
            return None
        pieces = [self._texts.piece(entry.token_id) for entry in entries]
        offsets = []
        end = self._offsets.get(index, 0)
        for piece in pieces:
            offsets.append(end)
            end += piece.characters
        self._offsets[index] = end
        return {
            "tokens": [piece.text for piece in pieces],
            "token_logprobs": [finite(entry.logprob) for entry in entries],
            "top_logprobs": [self._top(entry) for entry in entries],
            "text_offset": offsets,
        }

    def _top(self, entry: TokenLogprob) -> dict[str, float]:
        best: dict[str, float] = {}
        # Different tokens may read the same; the likelier one keeps the key.
        for token_id, logprob in (*entry.top, (entry.token_id, entry.logprob)):
            best.setdefault(self._texts.piece(token_id).text, finite(logprob))
        return best


class ChatBodies:
    """Bodies of /v1/chat/completions."""

    prefix = "chatcmpl-"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, request: ChatCompletionRequest, texts: TokenTexts):
        self._request = request
        self._texts = texts

    def opening(self, index: int) -> dict[str, Any] | None:
        """The first chunk of a choice, before anything is generated."""
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None} | _ending(None)

    def delta(self, index: int, output: RequestOutput) -> dict[str, Any]:
        logprobs = self._logprobs(output.logprobs)
        delta = {"content": output.text} if output.text or logprobs else {}
        return {"index": index, "delta": delta, "logprobs": logprobs} | _ending(output)

    def whole(self, index: int, output: RequestOutput) -> dict[str, Any]:
        message = {"role": "assistant", "content": output.text, "refusal": None}
        logprobs = self._logprobs(output.logprobs)
        return {"index": index, "message": message, "logprobs": logprobs} | _ending(output)

    def _logprobs(self, entries: tuple[TokenLogprob, ...] | None) -> dict[str, Any] | None:
        if not self._request.logprobs or not entries:
            return None
        content = []
        for entry in entries:
            top = [self._token(token_id, logprob) for token_id, logprob in entry.top]
            content.append(self._token(entry.token_id, entry.logprob) | {"top_logprobs": top})
        return {"content": content}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        text, encoded, _ = self._texts.piece(token_id)
        return {
            "token": text,
            "logprob": finite(logprob),
            "bytes": None if encoded is None else list(encoded),
        }


Bodies = CompletionBodies | ChatBodies


class Envelope:
    """What every body of one response has around its choices."""

    def __init__(self, bodies: Bodies, request_id: str, model: str):
        self.response_id = bodies.prefix + request_id
        self._bodies = bodies
        self._shared = {"created": int(time.time()), "model": model}

    def whole(self, choices: Iterable[dict[str, Any]], counts: dict[str, Any]) -> dict[str, Any]:
        return self._around(self._bodies.whole_object, choices) | {"usage": counts}

    def chunk(self, choices: Iterable[dict[str, Any]], **counts: dict[str, Any] | None) -> dict[str, Any]:
        return self._around(self._bodies.chunk_object, choices) | counts

    def _around(self, kind: str, choices: Iterable[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.response_id, "object": kind, **self._shared, "choices": list(choices)}


def _ending(output: RequestOutput | None) -> dict[str, Any]:
    if output is None:
        return {"finish_reason": None, "stop_reason": None}
    return {"finish_reason": output.finish_reason, "stop_reason": output.stop_reason}


def finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB) if logprob == logprob else LOWEST_LOGPROB
