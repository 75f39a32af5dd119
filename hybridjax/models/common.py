"""What the model families share: checks of ids, probes, recomputed layers, and the size of their state."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer

from hybridjax.batch import Probe, State
from hybridjax.models.base import StateSize


def checked_ids(input_ids: jax.Array, vocab: int) -> jax.Array:
    """The ids as an integer array [batch, length].

    Raises:
      ValueError: another shape or dtype, or (outside jit) ids beyond the vocabulary.
    """
    ids = jnp.asarray(input_ids)
    if ids.ndim != 2 or not ids.size or not jnp.issubdtype(ids.dtype, jnp.integer):
        raise ValueError(
            f"input_ids is {ids.dtype}{list(ids.shape)}; it must hold integers of shape [batch, length]"
        )
    if not isinstance(ids, Tracer):
        # Not with jax: inside jit even known values would become tracers.
        known = np.asarray(ids)
        low, high = int(known.min()), int(known.max())
        if low < 0 or high >= vocab:
            raise ValueError(f"input_ids holds ids from {low} to {high}; they must be in 0..{vocab - 1}")
    return ids


def prefixed(probe: Probe | None, prefix: str) -> Probe | None:
    """A probe that sees its names with a prefix."""
    if probe is None:
        return None
    return lambda name, value: probe(prefix + name, value)


def rematerialised(call: Callable[..., Any], layer: nnx.Module, *args: Any) -> Any:
    """``call(layer, *args)``, recomputed in the backward pass.

    The layer goes through as its parameters, so that nothing happens to the module itself and a model may
    also be closed over by a traced function.
    """
    graph, state = nnx.split(layer)
    return jax.checkpoint(lambda state, *args: call(nnx.merge(graph, state), *args))(state, *args)


def state_size(init_state: Callable[[int, int], State]) -> StateSize:
    """Bytes of sequence state per page and per slot, from what the two sizes of a model's state add."""

    def total(pages: int, slots: int) -> int:
        shapes = jax.eval_shape(lambda: init_state(pages, slots))
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes))

    one = total(1, 1)
    return StateSize(per_page=total(2, 1) - one, per_slot=total(1, 2) - one)
