"""Command-line flags generated from a frozen dataclass: a default and its help live in one place."""

import argparse
import dataclasses
import types
import typing
from typing import Any


def flag(default: Any, help: str, **metadata: Any) -> Any:
    """A dataclass field with its help text; ``aliases`` and ``choices`` are what argparse calls so."""
    return dataclasses.field(default=default, metadata={"help": help, **metadata})


def add_flags(parser: argparse.ArgumentParser, config: type) -> None:
    """Adds ``--field-name`` for each field of the dataclass; booleans become switches."""
    for field in dataclasses.fields(config):
        flags = ["--" + field.name.replace("_", "-"), *field.metadata.get("aliases", [])]
        help_text = field.metadata.get("help", "").replace("%", "%%")
        kind, optional = _kind(field.type)
        if kind is bool:
            parser.add_argument(*flags, dest=field.name, action="store_true", help=help_text)
            continue
        shown = "" if optional else f" (default: {field.default})"
        parser.add_argument(
            *flags,
            dest=field.name,
            type=readable_int if kind is int else kind,
            default=field.default,
            choices=field.metadata.get("choices"),
            metavar=None if "choices" in field.metadata else kind.__name__.upper(),
            help=help_text + shown,
        )


def from_flags[C](config: type[C], namespace: argparse.Namespace) -> C:
    """The dataclass from parsed flags; raises ConfigError for values that cannot work."""
    names = [f.name for f in dataclasses.fields(config)]  # pyright: ignore[reportArgumentType]
    return config(**{name: getattr(namespace, name) for name in names})


def readable_int(text: str) -> int:
    """'65536', '64k' and '64K' are 65536; 'm' is 2**20."""
    scale = {"k": 2**10, "m": 2**20}.get(text[-1:].lower(), 1)
    digits = text[:-1] if scale != 1 else text
    try:
        return int(digits) * scale
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number such as 4096 or 64k") from None


def _kind(annotation: Any) -> tuple[type, bool]:
    if isinstance(annotation, types.UnionType):
        kinds = [k for k in typing.get_args(annotation) if k is not types.NoneType]
        return kinds[0], True
    return annotation, False
