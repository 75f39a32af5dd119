"""Small checks shared by the config classes; each failure names field, value and what is allowed."""

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from typing import Any

from hybridjax.errors import ConfigError


def check(ok: bool, name: str, value: Any, allowed: str) -> None:
    if not ok:
        raise ConfigError(f"{name} is {value!r}; it must be {allowed}")


def positive_int(name: str, value: Any, most: int = 2**31 - 1) -> None:
    check(type(value) is int and value > 0, name, value, "a positive integer")
    check(value <= most, name, value, f"at most {most}")


def finite_floats(config: Any, prefix: str = "") -> None:
    """Refuses NaN and infinity in any field of a dataclass; JSON files and flags can hold both."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if isinstance(value, float):
            check(math.isfinite(value), prefix + field.name, value, "finite")


def token_ids_and_dtype(config: Any) -> None:
    """Refuses ids of special tokens outside the vocabulary, and dtypes that no model is kept in."""
    known = f"in 0..{config.vocab_size - 1}"
    for name in ("bos_token_id", "pad_token_id"):
        token = getattr(config, name)
        check(token is None or 0 <= token < config.vocab_size, name, token, f"null or {known}")
    for token in config.eos_token_id:
        check(0 <= token < config.vocab_size, "eos_token_id", token, known)
    allowed = "float32, bfloat16 or float16"
    check(config.dtype in ("float32", "bfloat16", "float16"), "dtype", config.dtype, allowed)


def take(raw: Mapping[str, Any], name: str, annotation: Any, prefix: str = "") -> Any:
    """Reads ``raw[name]`` as the annotated type, which may be a union of int, float, bool, str, None.

    An integer is taken where a float is wanted; a bool is never taken for a number. Raises ConfigError
    for other types and for numbers that are not finite.
    """
    value = raw[name]
    if type(value) is float:
        check(math.isfinite(value), prefix + name, value, "finite")
    kinds = typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
    if type(value) in kinds:
        return value
    if float in kinds and type(value) is int:
        try:
            return float(value)
        except OverflowError:
            raise ConfigError(f"{prefix}{name} is beyond the range of a float") from None
    if int in kinds and type(value) is float and value.is_integer():
        return int(value)
    if value is None and types.NoneType in kinds:
        return None
    names = " or ".join("null" if k is types.NoneType else k.__name__ for k in kinds)
    raise ConfigError(f"{prefix}{name} is {value!r}; it must be of type {names}")
