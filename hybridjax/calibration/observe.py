"""What the matrices of a layer get to see: Hessians, the largest activations, and the rows of experts."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from hybridjax.batch import Batch
from hybridjax.calibration.selection import LayerPlan
from hybridjax.calibration.streaming import Layer
from hybridjax.models.base import Path, module_at
from hybridjax.ops.dispatch import einsum_f32
from hybridjax.ops.experts import activate

_CHUNK = 256  # rows of an expert that are added at a time

See = Callable[..., None]


class WatchedWeight(nnx.Module):
    """A weight that shows its inputs [N, in] before it multiplies them."""

    def __init__(self, weight: Any, see: See):
        self.weight, self.see = weight, see

    def matmul(self, x: jax.Array, out_dtype: jnp.dtype | None = None) -> jax.Array:
        self.see(x)
        return self.weight.matmul(x, out_dtype)


class WatchedExperts(nnx.Module):
    """Experts that show their inputs [N, H] and each row's experts int32[N, k]."""

    def __init__(self, experts: Any, see: See):
        self.experts, self.see = experts, see

    def apply(self, x: jax.Array, ids: jax.Array, weights: jax.Array) -> jax.Array:
        self.see(x, ids)
        return self.experts.apply(x, ids, weights)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Inputs:
    """What a matrix has seen of its inputs.

    Attributes:
      hessian: float32[..., K, K], the sum of x^T x over all rows.
      largest: float32[...], the largest magnitude.
    """

    hessian: jax.Array
    largest: jax.Array

    @classmethod
    def none(cls, columns: int, *stack: int) -> "Inputs":
        return cls(jnp.zeros((*stack, columns, columns), jnp.float32), jnp.zeros(stack, jnp.float32))

    def plus(self, x: jax.Array) -> "Inputs":
        """With further rows [..., N, K]; rows of zeros add nothing."""
        largest = jnp.max(jnp.abs(x), axis=(-2, -1)).astype(jnp.float32)
        hessian = self.hessian + einsum_f32("...nk,...nl->...kl", x, x)
        return Inputs(hessian, jnp.maximum(self.largest, largest))


@dataclasses.dataclass(frozen=True)
class Seen:
    """What the matrices of one layer have seen.

    Attributes:
      linears: by the path of a Linear.
      experts: by the path of a stack of experts: per batch the rows [N, H] and their experts int32[N, k],
        in host memory.
      rows: of the calibration text.
    """

    linears: dict[Path, Inputs]
    experts: dict[Path, list[tuple[np.ndarray, np.ndarray]]]
    rows: int


def observe(
    layer: Layer,
    plan: LayerPlan,
    batches: Sequence[tuple[np.ndarray, Batch, np.ndarray | None]],
) -> Seen:
    """Passes batches (hidden states, batch, n-gram rows) through a layer; padding rows do not count."""
    watched, stacks = tuple(plan.linears), tuple(plan.experts)
    linears = {path: Inputs.none(held[0].shape[1]) for path, held in plan.linears.items()}
    experts: dict[Path, list[tuple[np.ndarray, np.ndarray]]] = {path: [] for path in stacks}
    rows = 0
    for hidden, batch, ngram_rows in batches:
        linears, shown = _observe(
            layer.graph, watched, stacks, layer.state, linears, hidden, batch, ngram_rows
        )
        for path, (x, ids) in shown.items():
            experts[path].append((np.asarray(x), np.asarray(ids)))
        rows += int(np.sum(np.asarray(batch.positions) >= 0))
    return Seen(linears, experts, rows)


@functools.partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=4)
def _observe(
    graph: Any,
    watched: tuple[Path, ...],
    stacks: tuple[Path, ...],
    state: Any,
    linears: dict[Path, Inputs],
    hidden: jax.Array,
    batch: Batch,
    ngram_rows: jax.Array | None,
) -> tuple[dict[Path, Inputs], dict[Path, tuple[jax.Array, jax.Array]]]:
    layer = nnx.merge(graph, state)
    live = batch.positions >= 0
    seen, shown = dict(linears), {}

    def see(path: Path, x: jax.Array) -> None:
        seen[path] = seen[path].plus(jnp.where(live[:, None], x, 0))

    def see_rows(path: Path, x: jax.Array, ids: jax.Array) -> None:
        shown[path] = x, jnp.where(live[:, None], ids, -1)

    for path in watched:
        linear: Any = module_at(layer, path)
        linear.weight = WatchedWeight(linear.weight, functools.partial(see, path))
    for path in stacks:
        owner: Any = module_at(layer, path[:-1])
        experts = getattr(owner, str(path[-1]))
        setattr(owner, str(path[-1]), WatchedExperts(experts, functools.partial(see_rows, path)))
    # What follows the last matrix has no use, and XLA leaves it out.
    layer.whole(hidden, batch, ngram_rows)
    return seen, shown


def counts(rows: Sequence[tuple[np.ndarray, np.ndarray]], experts: int) -> np.ndarray:
    """int64[E]: how many rows each expert has seen."""
    out = np.zeros(experts, np.int64)
    for _, ids in rows:
        out += np.bincount(ids[ids >= 0], minlength=experts)
    return out


def expert_inputs(
    rows: Sequence[tuple[np.ndarray, np.ndarray]], gate_up: jax.Array, first: int
) -> tuple[Inputs, Inputs]:
    """What a group of experts has seen: before the gate and up projections, and before the down projection.

    Args:
      rows: as in ``Seen``.
      gate_up: [G, 2I, H] the matrices of the group.
      first: the number of its first expert.
    """
    count, wide, hidden = gate_up.shape
    sums = Inputs.none(hidden, count), Inputs.none(wide // 2, count)
    for x in _chunks(rows, first, count):
        sums = _add_experts(sums, x, gate_up)
    return sums


def _chunks(rows: Sequence[tuple[np.ndarray, np.ndarray]], first: int, count: int) -> Iterator[np.ndarray]:
    """Rows [G, R, H] of G experts at a time, padded with zeros, until all have been given."""
    own = [
        np.concatenate([x[(ids == expert).any(axis=1)] for x, ids in rows])
        for expert in range(first, first + count)
    ]
    for begin in range(0, max(map(len, own)), _CHUNK):
        out = np.zeros((count, _CHUNK, own[0].shape[1]), own[0].dtype)
        for target, x in zip(out, own):
            part = x[begin : begin + _CHUNK]
            target[: len(part)] = part
        yield out


@functools.partial(jax.jit, donate_argnums=0)
def _add_experts(sums: tuple[Inputs, Inputs], x: jax.Array, gate_up: jax.Array) -> tuple[Inputs, Inputs]:
    between = activate(einsum_f32("gnh,goh->gno", x, gate_up), x.dtype)
    return sums[0].plus(x), sums[1].plus(between)
