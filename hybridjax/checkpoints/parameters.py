"""Which tensors fill which parameter, checked against the model class's own table."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from flax import nnx

from hybridjax.checkpoints import nvfp4
from hybridjax.checkpoints.ngram_tables import table_paths
from hybridjax.errors import CheckpointError
from hybridjax.models.base import Path, TensorEntry, tiles
from hybridjax.quantization import in_checkpoint_order


@dataclasses.dataclass(frozen=True)
class Parameter:
    """A parameter of a model and the tensors that fill it, in order of items and rows.

    ``variable`` holds an array, or a ShapeDtypeStruct in a model that was only traced.
    """

    path: Path
    variable: nnx.Param[Any]
    entries: tuple[TensorEntry, ...]

    @property
    def value(self) -> jax.Array:
        value = self.variable.get_value()
        # Codes that an engine arranged for its GPU are saved as they were.
        return in_checkpoint_order(value) if isinstance(value, jax.Array) else value

    @property
    def shape(self) -> tuple[int, ...]:
        return jax.eval_shape(lambda: self.value).shape


@dataclasses.dataclass(frozen=True)
class Layout:
    """What a checkpoint of a model holds beside constants, in checkpoint order.

    Attributes:
      parameters: every parameter with its tensors.
      tables: the tensors of every n-gram table that is kept on the host, by ascending layer.
    """

    parameters: tuple[Parameter, ...]
    tables: tuple[tuple[TensorEntry, ...], ...] = ()


def layout_of(
    model: Any,
    names: Mapping[str, tuple[int, ...]] | None = None,
    entries: Sequence[TensorEntry] | None = None,
) -> Layout:
    """Every parameter and host table with its tensors.

    Args:
      model: the model, or one that was only traced.
      names: shapes of a checkpoint's tensors by name; None: the layout that is saved.
      entries: what the model class's ``checkpoint_entries`` gives for these names, if that is known.

    Raises:
      CheckpointError: the table does not cover the parameters exactly: a bug in the model class.
    """
    by_path: dict[Path, list[TensorEntry]] = {}
    dense = entries
    if dense is None:
        # A model that was loaded in NVFP4 is saved with its experts, like its table's shards, as they were.
        known = getattr(model, "stored_shapes", None) if names is None else names
        dense = tuple(type(model).checkpoint_entries(model.config, known))
    for entry in nvfp4.expand(model, dense, names):
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
    tables = []
    for path in table_paths(model):
        if path not in by_path or path in variables:
            raise CheckpointError(f"{bug}: {_dotted(path)} is on the host, but has no tensor of its own")
        tables.append(tuple(sorted(by_path.pop(path), key=lambda entry: entry.order)))
    out = []
    for path, entries in by_path.items():
        if path not in variables:
            raise CheckpointError(f"{bug}: {entries[0].name} names {_dotted(path)}, which does not exist")
        entries = tuple(sorted(entries, key=lambda entry: entry.order))
        parameter = Parameter(path, variables[path], entries)
        if not tiles(entries, parameter.shape):
            shapes = ", ".join(_described(entry) for entry in entries[:8])
            more = f" and {len(entries) - 8} more" if len(entries) > 8 else ""
            raise CheckpointError(
                f"{bug}: {_dotted(path)} {list(parameter.shape)} is not filled by {shapes}{more}"
            )
        out.append(parameter)
    return Layout(tuple(out), tuple(tables))


def parameters_of(model: Any, names: Mapping[str, tuple[int, ...]] | None = None) -> list[Parameter]:
    """Every parameter with its tensors, in checkpoint order; see ``layout_of``."""
    return list(layout_of(model, names).parameters)


def _described(entry: TensorEntry) -> str:
    item = "" if entry.index is None else f"item {entry.index}, "
    return f"{entry.name} {list(entry.shape)} from {item}row {entry.start}"


def _dotted(path: Sequence[Any]) -> str:
    return ".".join(map(str, path))
