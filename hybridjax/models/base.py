"""What every model offers to the engine, the trainer and the checkpoint code."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import jax

from hybridjax.batch import Batch, Probe, State

Path = tuple[str | int, ...]


@dataclasses.dataclass(frozen=True)
class ScaleEntry:
    """The tensor of scales that belongs to a tensor wherever that is stored in float8_e4m3fn.

    Attributes:
      name: e.g. ``model.layers.0.mlp.experts.3.up_proj.weight_scale_inv``.
      block: rows and columns that share one scale; None: the whole tensor has one.
    """

    name: str
    block: tuple[int, int] | None = None


@dataclasses.dataclass(frozen=True)
class TensorEntry:
    """One tensor of a checkpoint and where it lives in the model.

    Attributes:
      name: the released tensor name, e.g. ``model.layers.0.self_attn.q_proj.weight``.
      shape: its shape in the checkpoint.
      path: path of the parameter in ``nnx.state(model, nnx.Param)``.
      start: first row of the parameter that the tensor fills. Fused projections hold several
        tensors one below the other, each with its own entry.
      index: which item of a stacked parameter (such as an expert) the tensor is part of; rows are then
        those of ``parameter[index]``. None: the parameter is not stacked, or the tensor is all of it.
      scale: what the tensor needs beside it if it is stored in float8; None: it never is.
      spread: the tensor is one number, [] or [1], that fills this many rows of the parameter.
      inverse: the tensor holds the reciprocal of what the parameter holds.
    """

    name: str
    shape: tuple[int, ...]
    path: Path
    start: int = 0
    index: int | None = None
    scale: ScaleEntry | None = None
    spread: int | None = None
    inverse: bool = False

    @property
    def filled(self) -> tuple[int, ...]:
        """Shape of what the tensor fills."""
        return self.shape if self.spread is None else (self.spread,)

    def part_of(self, value: Any) -> Any:
        """What the tensor fills of the parameter's array: NumPy gives a view."""
        if self.index is not None:
            value = value[self.index]
        return value if value.shape == self.filled else value[self.start : self.start + self.filled[0]]

    @property
    def order(self) -> tuple[int, int]:
        """Sorts the tensors of one parameter by where they lie."""
        return (self.index or 0, self.start)


def module_at(module: Any, path: Path) -> Any:
    """What is at a path below a module; None: nothing, as where a table is not part of the model."""
    for key in path:
        module = module[key] if isinstance(key, int) else getattr(module, key, None)
    return module


def tiles(entries: Sequence[TensorEntry], shape: tuple[int, ...]) -> bool:
    """Whether tensors, sorted by ``order``, fill a parameter of this shape: no gap, no overlap."""
    if all(entry.index is None for entry in entries):
        return _tiles_rows(entries, shape)
    if any(entry.index is None for entry in entries):
        return False
    items = itertools.groupby(entries, key=lambda entry: entry.index)
    count = 0
    for number, (index, held) in enumerate(items):
        if index != number or not _tiles_rows(list(held), shape[1:]):
            return False
        count += 1
    return len(shape) > 1 and count == shape[0]


def _tiles_rows(entries: Sequence[TensorEntry], shape: tuple[int, ...]) -> bool:
    if len(entries) == 1:
        return entries[0].filled == shape and entries[0].start == 0
    row = 0
    for entry in entries:
        if entry.start != row or len(entry.filled) != len(shape) or entry.filled[1:] != shape[1:]:
            return False
        row += entry.filled[0]
    return bool(shape) and row == shape[0]


@dataclasses.dataclass(frozen=True)
class StateSize:
    """Bytes of sequence state over all layers."""

    per_page: int
    per_slot: int


class CausalLM(Protocol):
    """A language model as nnx module. All state is passed in; see hybridjax/batch.py.

    ``layers`` are modules with ``whole(hidden, batch, ngram_rows=None)``: one layer on a WHOLE batch. With
    ``embed`` before and ``logits`` after them they are the model.
    """

    config: Any
    layers: Any

    def __call__(self, input_ids: jax.Array) -> jax.Array:
        """Teacher-forced logits: int32[B, L] -> float32[B, L, vocab]; differentiable."""
        ...

    def forward(
        self, batch: Batch, state: State | None, probe: Probe | None = None
    ) -> tuple[jax.Array, State | None]:
        """Hidden states [N, hidden] of every row (before the final norm) and the state after the step."""
        ...

    def embed(self, batch: Batch) -> jax.Array:
        """Hidden states [N, hidden] before the first layer."""
        ...

    def logits(self, hidden: jax.Array) -> jax.Array:
        """float32[..., vocab] from hidden states [..., hidden]."""
        ...

    def init_state(self, num_pages: int, num_slots: int) -> State:
        """Zeroed caches; page 0 and slot 0 belong to nobody."""
        ...

    def state_size(self) -> StateSize: ...

    @property
    def page_size(self) -> int:
        """Tokens per page that the model's attention wants."""
        ...

    @classmethod
    def checkpoint_entries(
        cls, config: Any, names: Mapping[str, tuple[int, ...]] | None = None
    ) -> tuple[TensorEntry, ...]:
        """Every tensor of a checkpoint of this configuration, in layer order.

        Args:
          config: the architecture.
          names: the tensors that a checkpoint has, with their shapes; they decide between variants of the
            layout. None: the layout that is saved.
        """
        ...
