"""Parameters under the names of the checkpoint's tensors, and the model made from them."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from hybridjax.errors import ConfigError
from hybridjax.layers import DenseExperts, Linear
from hybridjax.models.base import Path, TensorEntry, module_at, tiles
from hybridjax.models.precision import kept_precise, matches
from hybridjax.quantization import GROUP, straight_through

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
      rule: how the tensors in ``rounded`` are brought into NVFP4 before the model sees them; see
        ``ExperimentConfig.quantize_weights``.
      rounded: names of tensors; those of one parameter share a global scale, as fused matrices do.
    """

    graphdef: Any
    rest: Any
    variables: dict[Any, Any]
    parts: dict[Any, tuple[TensorEntry, ...]]
    float32: tuple[str, ...] = ()
    losses: tuple[str, ...] = ()
    rule: str = "none"
    rounded: frozenset[str] = frozenset()

    @classmethod
    def of(cls, model: Any, quantize_weights: str = "none") -> "ParameterLayout":
        """The layout of an nnx model; models without ``checkpoint_entries`` are named by path.

        Args:
          model: whose parameters are float32.
          quantize_weights: see ``ExperimentConfig.quantize_weights``.

        Raises:
          ConfigError: the model's entries do not tile its parameters, a parameter is not floating-point, or
            there is nothing to quantise, or a matrix that does not divide into groups.
        """
        graphdef, state, rest = nnx.split(model, nnx.Param, ...)
        abstract = jax.eval_shape(lambda s: s, state)
        variables: dict[Any, Any] = dict(nnx.to_flat_state(abstract))
        for path, variable in variables.items():
            if not jnp.issubdtype(variable.dtype, jnp.floating) or variable.dtype == jnp.float8_e4m3fn:
                raise ConfigError(
                    f"parameter {'.'.join(map(str, path))} is {variable.dtype}: a quantised model cannot be "
                    "trained; train it in bfloat16 with quantize_weights"
                )
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
            quantize_weights,
            _rounded(model, parts) if quantize_weights != "none" else frozenset(),
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
            held = [value.astype(own) for value in self._values(path, tensors)]
            value = held[0] if len(held) == 1 else jnp.concatenate(held)
            flat.append((path, variable.replace(value.reshape(variable.shape))))
        return nnx.merge(self.graphdef, nnx.from_flat_state(flat), self.rest)

    def _values(self, path: Path, tensors: Mapping[str, jax.Array]) -> list[jax.Array]:
        """The tensors of a parameter as the model sees them, before they take its dtype."""
        entries = self.parts[path]
        rounded = [tensors[entry.name] for entry in entries if entry.name in self.rounded]
        if not rounded:
            return [tensors[entry.name] for entry in entries]
        # Fused matrices share a global scale; stacked ones have one each.
        amax = jnp.max(jnp.stack([jnp.max(jnp.abs(x), axis=(-2, -1)) for x in rounded]), axis=0)
        return [
            straight_through(tensors[entry.name], self.rule, amax)
            if entry.name in self.rounded
            else tensors[entry.name]
            for entry in entries
        ]


def _rounded(model: Any, parts: Mapping[Any, list[TensorEntry]]) -> frozenset[str]:
    """The tensors that ``hybridjax.quantize`` would quantise.

    Raises:
      ConfigError: there are none, or one does not divide into groups.
    """
    patterns = kept_precise(model)
    out = set()
    for path, held in parts.items():
        if path[0] != "layers" or not _is_matrix(model, path):
            continue
        for entry in held:
            if matches(entry.name, patterns):
                continue
            if entry.shape[-1] % GROUP:
                raise ConfigError(
                    f"quantize_weights: {entry.name} {list(entry.shape)} has {entry.shape[-1]} columns, "
                    f"which do not divide into groups of {GROUP}"
                )
            out.add(entry.name)
    if not out:
        raise ConfigError(f"quantize_weights: {type(model).__name__} has no matrices to quantise")
    return frozenset(out)


def _is_matrix(model: Any, path: Path) -> bool:
    """Whether a parameter is the matrix of a linear layer or a stack of experts."""
    linear = path[-2:] == ("weight", "value") and isinstance(module_at(model, path[:-2]), Linear)
    return linear or isinstance(module_at(model, path[:-1]), DenseExperts)


def count(tensors: Mapping[str, Any]) -> int:
    """Number of parameters."""
    return sum(math.prod(t.shape) for t in tensors.values())
