"""The sampling defaults that a checkpoint recommends in generation_config.json."""

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hybridjax.checkpoints.bundled import resolve
from hybridjax.checkpoints.json_files import read_object
from hybridjax.errors import CheckpointError

FILE = "generation_config.json"


@dataclasses.dataclass(frozen=True)
class GenerationDefaults:
    """What generation_config.json says; None where it says nothing.

    Attributes:
      eos_token_id: ids that end a completion; they override those of config.json.
      bos_token_id, pad_token_id: ids.
      do_sample: False recommends greedy decoding.
      temperature, top_p, top_k, min_p, repetition_penalty, max_new_tokens: as in SamplingParams;
        ranges are checked where they are used.
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


def generation_config(path_or_name: str | Path) -> GenerationDefaults:
    """Reads generation_config.json of a directory or bundled model; without the file all are None.

    Raises:
      CheckpointError: no such model, or the file is malformed.
    """
    file = resolve(path_or_name) / FILE
    if not file.exists():
        return GenerationDefaults()
    raw = read_object(file)
    fields: dict[str, Any] = {}
    for name in ("bos_token_id", "pad_token_id", "top_k", "max_new_tokens"):
        fields[name] = _take(raw, name, (int,), file)
    for name in ("temperature", "top_p", "min_p", "repetition_penalty"):
        fields[name] = _take(raw, name, (int, float), file)
    fields["do_sample"] = _take(raw, "do_sample", (bool,), file)
    eos = raw.get("eos_token_id")
    if eos is not None:
        ids = eos if isinstance(eos, list) else [eos]
        if not all(type(token) is int and token >= 0 for token in ids):
            raise CheckpointError(f"{file}: eos_token_id is {eos!r}; it must be an id or a list of ids")
        fields["eos_token_id"] = tuple(ids)
    return GenerationDefaults(**fields)


def _take(raw: Mapping[str, Any], name: str, kinds: tuple[type, ...], file: Path) -> Any:
    value = raw.get(name)
    if value is None or (type(value) in kinds and math.isfinite(value)):
        return value
    names = " or ".join(kind.__name__ for kind in kinds)
    raise CheckpointError(f"{file}: {name} is {value!r}; it must be of type {names}")
