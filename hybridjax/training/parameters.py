"""Parameters under the names of the checkpoint's tensors, and the model made from them."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from hybridjax.errors import ConfigError
from hybridjax.models.base import TensorEntry, tiles

Tensors = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class ParameterLayout:
    """Translates between a model and a flat dictionary of its checkpoint's tensors.

    Training works on the dictionary: fused matrices come apart, so that the optimiser sees each
    projection alone, and names do not depend on how a layer stores its weights.

    Attributes:
      graphdef, rest: the model without its parameters.
      variables: abstract parameter variables by path.
      parts: the tensors that each parameter holds, in order of rows.
      float32: last names of the parameters that are float32 whatever the model's dtype.
      losses: names of the losses that the model's ``training_losses`` gives beside its logits.
    """

    graphdef: Any
    rest: Any
    variables: dict[Any, Any]
    parts: dict[Any, tuple[TensorEntry, ...]]
    float32: tuple[str, ...] = ()
    losses: tuple[str, ...] = ()

    @classmethod
    def of(cls, model: Any) -> "ParameterLayout":
        """The layout of an nnx model; models without ``checkpoint_entries`` are named by path.

        Raises:
          ConfigError: the model's entries do not tile its parameters.
        """
        graphdef, state, rest = nnx.split(model, nnx.Param, ...)
        abstract = jax.eval_shape(lambda s: s, state)
        variables: dict[Any, Any] = dict(nnx.to_flat_state(abstract))
        if hasattr(model, "checkpoint_entries"):
            entries = model.checkpoint_entries(model.config)
        else:
            entries = [TensorEntry(".".join(map(str, p)), v.shape, p) for p, v in variables.items()]
        parts: dict[Any, list[TensorEntry]] = {path: [] for path in variables}
        for entry in entries:
            if entry.path not in parts:
                raise ConfigError(f"tensor {entry.name} belongs to {entry.path}, which is no parameter")
            parts[entry.path].append(entry)
        for path, held in parts.items():
            held.sort(key=lambda e: e.order)
            if not held or not tiles(held, variables[path].shape):
                raise ConfigError(f"the checkpoint's tensors do not tile parameter {path}")
        return cls(
            graphdef,
            rest,
            variables,
            {path: tuple(held) for path, held in parts.items()},
            tuple(getattr(model, "float32_parameters", ())),
            tuple(getattr(model, "training_loss_names", ())),
        )

    def tensors(self, model: Any) -> Tensors:
        """The model's parameters in float32 by tensor name."""
        out = {}
        for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
            value = variable.get_value()
            for entry in self.parts[path]:
                out[entry.name] = entry.part_of(value).astype(jnp.float32)
        return out

    def model(self, tensors: Mapping[str, jax.Array], dtype: Any) -> Any:
        """The model with these tensors as parameters in ``dtype``; differentiable in the tensors."""
        flat = []
        for path, variable in self.variables.items():
            own = jnp.float32 if path[-1] in self.float32 else dtype
            held = [tensors[entry.name].astype(own) for entry in self.parts[path]]
            value = held[0] if len(held) == 1 else jnp.concatenate(held)
            flat.append((path, variable.replace(value.reshape(variable.shape))))
        return nnx.merge(self.graphdef, nnx.from_flat_state(flat), self.rest)


def count(tensors: Mapping[str, Any]) -> int:
    """Number of parameters."""
    return sum(math.prod(t.shape) for t in tensors.values())
