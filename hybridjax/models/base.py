"""What every model offers to the engine, the trainer and the checkpoint code."""

import dataclasses
from typing import Any, Protocol

import jax

from hybridjax.batch import Batch, Probe, State

Path = tuple[str | int, ...]


@dataclasses.dataclass(frozen=True)
class TensorEntry:
    """One tensor of a checkpoint and where it lives in the model.

    Attributes:
      name: the released tensor name, e.g. ``model.layers.0.self_attn.q_proj.weight``.
      shape: its shape in the checkpoint.
      path: path of the parameter in ``nnx.state(model, nnx.Param)``.
      start: first row of the parameter that the tensor fills. Fused projections hold several
        tensors one below the other, each with its own entry.
    """

    name: str
    shape: tuple[int, ...]
    path: Path
    start: int = 0


@dataclasses.dataclass(frozen=True)
class StateSize:
    """Bytes of sequence state over all layers."""

    per_page: int
    per_slot: int


class CausalLM(Protocol):
    """A language model as nnx module. All state is passed in; see hybridjax/batch.py."""

    config: Any

    def __call__(self, input_ids: jax.Array) -> jax.Array:
        """Teacher-forced logits: int32[B, L] -> float32[B, L, vocab]; differentiable."""
        ...

    def forward(
        self, batch: Batch, state: State | None, probe: Probe | None = None
    ) -> tuple[jax.Array, State | None]:
        """Hidden states [N, hidden] of every row (before the final norm) and the state after the step."""
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
    def checkpoint_entries(cls, config: Any) -> tuple[TensorEntry, ...]:
        """Every tensor of a checkpoint of this configuration, in layer order."""
        ...
