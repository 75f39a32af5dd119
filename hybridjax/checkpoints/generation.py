"""The sampling defaults that a checkpoint recommends in generation_config.json."""

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hybridjax.checkpoints.bundled import resolve
from hybridjax.configs.frozen_dict import FrozenDict
from hybridjax.errors import CheckpointError
from hybridjax.json_files import read_object

FILE = "generation_config.json"

# Lowest and highest values, as in SamplingParams.
_RANGES = {
    "temperature": (0, 100),
    "top_p": (0, 1),
    "top_k": (-1, 2**31 - 1),
    "min_p": (0, 1),
    "repetition_penalty": (0.01, 100),
    "max_new_tokens": (1, 2**31 - 1),
}
_TOKENS = ("eos_token_id", "bos_token_id", "pad_token_id")


@dataclasses.dataclass(frozen=True)
class GenerationDefaults:
    """What generation_config.json says; None where it says nothing.

    Attributes:
      eos_token_id: ids that end a completion; they override those of config.json.
      bos_token_id, pad_token_id: ids.
      do_sample: False recommends greedy decoding.
      temperature, top_p, top_k, min_p, repetition_penalty, max_new_tokens: as in SamplingParams.
      extra: everything else in the file, kept for saving.
    """

    eos_token_id: tuple[int, ...] | None = None
    bos_token_id: int | None = None
    pad_token_id: int | None = None
    do_sample: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None
    extra: Mapping[str, Any] = FrozenDict()

    def __post_init__(self):
        object.__setattr__(self, "extra", FrozenDict(self.extra))

    def to_dict(self) -> dict[str, Any]:
        """The content of a generation_config.json that says the same."""
        known = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "extra"}
        return {**self.extra, **{name: value for name, value in known.items() if value is not None}}


def generation_config(path_or_name: str | Path, vocab_size: int | None = None) -> GenerationDefaults:
    """Reads generation_config.json of a directory or bundled model; without the file all are None.

    Args:
      path_or_name: the model.
      vocab_size: token ids must be below it; None: any id.

    Raises:
      CheckpointError: no such model, the file is malformed, or a value is out of range.
    """
    file = resolve(path_or_name) / FILE
    if not file.exists():
        return GenerationDefaults()
    raw = read_object(file)
    fields: dict[str, Any] = {"do_sample": _take(raw, "do_sample", (bool,), file)}
    for name, (low, high) in _RANGES.items():
        kinds = (int,) if name in ("top_k", "max_new_tokens") else (int, float)
        value = fields[name] = _take(raw, name, kinds, file)
        if value is not None and not low <= value <= high:
            raise CheckpointError(f"{file}: {name} is {value!r}; it must be between {low} and {high}")
    for name in _TOKENS:
        fields[name] = _take_tokens(raw, name, vocab_size, file)
    return GenerationDefaults(**fields, extra=raw)


def _take_tokens(raw: dict[str, Any], name: str, vocab_size: int | None, file: Path) -> Any:
    value = raw.pop(name, None)
    if value is None:
        return None
    several = name == "eos_token_id"
    ids = value if several and isinstance(value, list) else [value]
    highest = 2**31 - 1 if vocab_size is None else vocab_size - 1
    if not all(type(token) is int and 0 <= token <= highest for token in ids):
        wanted = "an id or a list of ids" if several else "an id"
        raise CheckpointError(f"{file}: {name} is {value!r}; it must be {wanted} in 0..{highest}")
    return tuple(ids) if several else value


def _take(raw: dict[str, Any], name: str, kinds: tuple[type, ...], file: Path) -> Any:
    value = raw.pop(name, None)
    if value is None or (type(value) in kinds and _is_finite(value)):
        return value
    names = " or ".join(kind.__name__ for kind in kinds)
    raise CheckpointError(f"{file}: {name} is {value!r}; it must be of type {names}")


def _is_finite(value: float) -> bool:
    return isinstance(value, int) or math.isfinite(value)
