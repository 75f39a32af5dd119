"""Reads prompts from ShareGPT files and simpler JSON; rows that cannot be read are counted, not fatal."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeGuard

from hybridjax.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Row:
    """A prompt and what is known about its completion."""

    prompt: str | Sequence[int]
    completion: str | None = None
    output_len: int | None = None


@dataclasses.dataclass(frozen=True)
class Rows:
    """The usable rows of a file, and how many others it had."""

    rows: list[Row]
    malformed: int


def read_rows(path: str | Path) -> Rows:
    """Reads a JSON array or JSON Lines.

    A row is an object with ``conversations`` (or ``conversation``), a list of turns whose text is
    ``value`` or ``content``: the first is the prompt, the second the completion; or an object with
    ``prompt`` (text or token ids) and optionally ``completion`` and ``output_len``.

    Raises:
      ConfigError: the file cannot be read, or is a JSON array with a syntax error.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"dataset_path: cannot read {path}: {error}") from error
    if text.lstrip().startswith("["):
        try:
            values = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"dataset_path: {path} is not JSON: {error}") from error
    else:
        # Not splitlines: JSON strings may hold U+2028 and its like.
        values = [_line(line) for line in text.split("\n") if line.strip()]
    rows = [_row(value) for value in values]
    return Rows([row for row in rows if row is not None], sum(row is None for row in rows))


def _line(line: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _row(value: Any) -> Row | None:
    if not isinstance(value, dict):
        return None
    turns = value.get("conversations", value.get("conversation"))
    if turns is not None:
        return _conversation(turns)
    prompt, completion = value.get("prompt"), value.get("completion")
    output_len = value.get("output_len", value.get("max_tokens"))
    if not _is_prompt(prompt):
        return None
    if completion is not None and not isinstance(completion, str):
        return None
    if output_len is not None and (type(output_len) is not int or output_len < 1):
        return None
    return Row(prompt, completion, output_len)


def _is_prompt(value: Any) -> TypeGuard[str | list[int]]:
    if isinstance(value, list):
        return bool(value) and all(type(token) is int and token >= 0 for token in value)
    return isinstance(value, str) and value != ""


def _conversation(turns: Any) -> Row | None:
    if not isinstance(turns, list) or len(turns) < 2:
        return None
    texts = [turn.get("value", turn.get("content")) if isinstance(turn, dict) else None for turn in turns[:2]]
    prompt, completion = texts
    if not isinstance(prompt, str) or not isinstance(completion, str) or not prompt:
        return None
    return Row(prompt, completion)
