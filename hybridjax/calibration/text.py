"""Calibration and evaluation text: files to token samples, samples to batches of few shapes."""

import dataclasses
import json
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax.numpy as jnp
import numpy as np

from hybridjax.batch import TILE, Batch
from hybridjax.errors import ConfigError, RequestError

HELD_OUT_SHARE = 0.1
_SHORTEST_LIMIT = 512  # where log-uniform lengths begin, if the longest allows
_PARAGRAPH = re.compile(r"\n[ \t]*\n\s*")
_GOLDEN = (5**0.5 - 1) / 2
_BATCH_TOKENS = 8192
_ROLES = {"human": "user", "gpt": "assistant"}


class TextTokenizer(Protocol):
    """What is needed of a tokenizer (hybridjax.text)."""

    bos_token_id: int | None
    is_byte_level: bool

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str: ...

    def token_bytes(self, index: int) -> bytes: ...

    @property
    def has_chat_template(self) -> bool: ...

    def render_chat(self, messages: Any, *, add_generation_prompt: bool = True) -> str: ...


@dataclasses.dataclass(frozen=True)
class Sample:
    """A piece of text.

    Attributes:
      ids: int32[L], the bos token first where the tokenizer has one.
      bytes: of the text that the ids after the first stand for.
    """

    ids: np.ndarray
    bytes: int


def read_documents(path: Path, tokenizer: TextTokenizer) -> list[list[int]]:
    """The documents of a file as token ids, without bos.

    ``.jsonl``: one object per line, with ``text``, or with ``conversations`` or ``messages`` (turns with
    ``from`` and ``value``, or ``role`` and ``content``), which go through the chat template. Everything else
    is plain text, whose paragraphs (text between blank lines) are the documents.

    Raises:
      ConfigError: the file cannot be read, a line is malformed, or there is no text.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as text: {error}") from error
    if "\0" in text:
        raise ConfigError(f"{path}: holds NUL characters; it must be text")
    if path.suffix == ".jsonl":
        texts = [_line(path, number, line, tokenizer) for number, line in _lines(text)]
    else:
        ends = [match.end() for match in _PARAGRAPH.finditer(text)]
        texts = [text[a:b] for a, b in zip([0, *ends], [*ends, len(text)])]
    try:
        documents = [tokenizer.encode(text, add_special_tokens=False) for text in texts if text.strip()]
    except RequestError as error:
        raise ConfigError(f"{path}: {error}") from error
    documents = [ids for ids in documents if ids]
    if not documents:
        raise ConfigError(f"{path}: holds no text")
    return documents


def _lines(text: str) -> Iterator[tuple[int, str]]:
    # Not splitlines: JSON strings may hold U+2028 and its like.
    return ((i, line) for i, line in enumerate(text.split("\n"), 1) if line.strip())


def _line(path: Path, number: int, line: str, tokenizer: TextTokenizer) -> str:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}, line {number}: not JSON: {error}") from error
    if isinstance(value, dict):
        if isinstance(value.get("text"), str):
            return value["text"]
        turns = value.get("conversations", value.get("messages"))
        if isinstance(turns, list) and turns and all(isinstance(turn, dict) for turn in turns):
            messages = [_message(turn) for turn in turns]
            if all(isinstance(message["content"], str) for message in messages):
                return _chat(path, number, messages, tokenizer)
    raise ConfigError(f"{path}, line {number}: must be an object with text, or with conversations of turns")


def _message(turn: dict[str, Any]) -> dict[str, Any]:
    role = turn.get("role", turn.get("from", "user"))
    return {"role": _ROLES.get(str(role), role), "content": turn.get("content", turn.get("value"))}


def _chat(path: Path, number: int, messages: list[dict[str, Any]], tokenizer: TextTokenizer) -> str:
    if not tokenizer.has_chat_template:
        return "\n\n".join(message["content"] for message in messages)
    try:
        return tokenizer.render_chat(messages, add_generation_prompt=False)
    except RequestError as error:
        raise ConfigError(f"{path}, line {number}: the chat template refuses it: {error}") from error


def cut(
    documents: Sequence[Sequence[int]], tokenizer: TextTokenizer, length: int, *, lengths: str = "fixed"
) -> list[Sample]:
    """Samples of at most ``length`` tokens from consecutive documents.

    A sample takes documents as long as they fit; one that does not fit begins the next sample, or is cut
    where it would leave more than half of the room empty. With "log-uniform" lengths each sample has a limit
    of its own between 512 and ``length``, evenly spread on a logarithmic scale.
    """
    bos = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    low = math.log(min(_SHORTEST_LIMIT, length))

    def limit() -> int:
        if lengths == "fixed":
            return length
        place = _GOLDEN * (len(samples) + 1) % 1
        return round(math.exp(low + (math.log(length) - low) * place))

    samples: list[Sample] = []
    held: list[int] = []
    for ids in documents:
        rest = list(ids)
        while rest:
            room = limit() - len(bos) - len(held)
            if len(rest) <= room:
                held += rest
                break
            if room > limit() // 2:
                held, rest = held + rest[:room], rest[room:]
            samples += _sample(held, bos, tokenizer)
            held = []
    return samples + _sample(held, bos, tokenizer)


def _sample(ids: Sequence[int], bos: list[int], tokenizer: TextTokenizer) -> list[Sample]:
    # Without bos the first token is context only.
    predicted = ids if bos else ids[1:]
    if not predicted:
        return []
    if tokenizer.is_byte_level:
        size = sum(len(tokenizer.token_bytes(i)) for i in predicted)
    else:
        size = len(tokenizer.decode(predicted).encode())
    return [Sample(np.asarray([*bos, *ids], np.int32), size)]


def evenly[T](items: Sequence[T], count: int) -> list[T]:
    """At most ``count`` of the items, evenly spaced."""
    if count >= len(items):
        return list(items)
    return [items[i * len(items) // count] for i in range(count)]


def hold_out(samples: Sequence[Sample]) -> tuple[list[Sample], list[Sample]]:
    """All but the last tenth, and that.

    Raises:
      ConfigError: there are fewer than two samples.
    """
    if len(samples) < 2:
        raise ConfigError(
            "the calibration text is too short to hold a part of it out for the evaluation; "
            "give a longer one, or another text to evaluate"
        )
    count = max(1, round(len(samples) * HELD_OUT_SHARE))
    return list(samples[:-count]), list(samples[-count:])


@dataclasses.dataclass(frozen=True)
class TokenBatch:
    """Sequences padded to a common length.

    Attributes:
      ids: int32[B, L], L a multiple of 64.
      lengths: int32[B], 0 for a row that only fills the batch.
    """

    ids: np.ndarray
    lengths: np.ndarray

    @property
    def live(self) -> np.ndarray:
        """bool[B * L]: the rows that are no padding."""
        return (np.arange(self.ids.shape[1]) < self.lengths[:, None]).reshape(-1)

    def whole(self) -> Batch:
        """The WHOLE batch; padding behind a sequence has position -1 and is seen by nothing before it."""
        batch = Batch.whole(jnp.asarray(self.ids))
        positions = np.where(self.live, np.tile(np.arange(self.ids.shape[1]), len(self.ids)), -1)
        return dataclasses.replace(
            batch,
            positions=jnp.asarray(positions, jnp.int32),
            context_length=jnp.asarray(self.lengths, jnp.int32),
        )


def batches(samples: Sequence[Sample], tokens: int = _BATCH_TOKENS) -> list[TokenBatch]:
    """Batches of about ``tokens`` tokens, of one shape per power of two of the samples' length."""
    groups: dict[int, list[Sample]] = {}
    for sample in samples:
        size = TILE * 2 ** max(0, math.ceil(math.log2(len(sample.ids) / TILE)))
        groups.setdefault(size, []).append(sample)
    out = []
    for size, group in sorted(groups.items()):
        count = min(max(1, tokens // size), len(group))
        for first in range(0, len(group), count):
            ids, lengths = np.zeros((count, size), np.int32), np.zeros(count, np.int32)
            for i, sample in enumerate(group[first : first + count]):
                lengths[i] = len(sample.ids)
                ids[i, : lengths[i]] = sample.ids
            out.append(TokenBatch(ids, lengths))
    return out
