"""Which tensors fill which parameter, checked against the model class's own table."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from flax import nnx

from hybridjax.errors import CheckpointError
from hybridjax.models.base import Path, TensorEntry


@dataclasses.dataclass(frozen=True)
class Parameter:
    """A parameter of a model and the tensors that fill its rows, in order.

    ``variable`` holds an array, or a ShapeDtypeStruct in a model that was only traced.
    """

    path: Path
    variable: nnx.Param[Any]
    entries: tuple[TensorEntry, ...]

    @property
    def value(self) -> jax.Array:
        return self.variable.get_value()

    @property
    def shape(self) -> tuple[int, ...]:
        return self.value.shape


def parameters_of(model: Any) -> list[Parameter]:
    """Every parameter with its tensors, in checkpoint order.

    Raises:
      CheckpointError: the table does not cover the parameters exactly: a bug in the model class.
    """
    by_path: dict[Path, list[TensorEntry]] = {}
    for entry in type(model).checkpoint_entries(model.config):
        by_path.setdefault(tuple(entry.path), []).append(entry)
    params, others = nnx.state(model, nnx.Param, ...)
    variables = dict(nnx.to_flat_state(params))
    bug = f"bug in {type(model).__name__}.checkpoint_entries"
    if others_flat := dict(nnx.to_flat_state(others)):
        raise CheckpointError(
            f"{bug}: {_dotted(next(iter(others_flat)))} is no nnx.Param, so it has no tensor"
        )
    for path in variables:
        if path not in by_path:
            raise CheckpointError(f"{bug}: parameter {_dotted(path)} has no tensor")
    out = []
    for path, entries in by_path.items():
        if path not in variables:
            raise CheckpointError(f"{bug}: {entries[0].name} names {_dotted(path)}, which does not exist")
        entries = tuple(sorted(entries, key=lambda entry: entry.start))
        parameter = Parameter(path, variables[path], entries)
        if not _fills(entries, parameter.shape):
            shapes = ", ".join(f"{e.name} {list(e.shape)} from row {e.start}" for e in entries)
            raise CheckpointError(f"{bug}: {_dotted(path)} {list(parameter.shape)} is not filled by {shapes}")
        out.append(parameter)
    return out


def _fills(entries: tuple[TensorEntry, ...], shape: tuple[int, ...]) -> bool:
    if len(entries) == 1:
        return entries[0].shape == shape and entries[0].start == 0
    row = 0
    for entry in entries:
        if entry.start != row or len(entry.shape) != len(shape) or entry.shape[1:] != shape[1:]:
            return False
        row += entry.shape[0]
    return row == shape[0]


def _dotted(path: Sequence[Any]) -> str:
    return ".".join(map(str, path))
