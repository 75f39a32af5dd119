"""Optimisers and learning-rate schedules over dictionaries of named tensors."""

import functools
import math
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from hybridjax.training.config import ExperimentConfig, OptimizerConfig

MATRIX, TABLE, VECTOR = "matrix", "table", "vector"

# Makes the root mean square of Muon's updates that of AdamW's (arXiv 2502.16982).
_MUON_RMS = 0.2


_TABLES = ("embed_tokens", "ngram_embedding", "lm_head")
# A few rows that feed a sigmoid or softmax each: no matrix whose directions are worth equalising.
_GATES = ("in_proj_b", "in_proj_a", "mlp.gate.weight", "shared_expert_gate", "block_inject_weight")


def kind_of(name: str, ndim: int) -> str:
    """A hidden "matrix" or stack of experts' matrices, a "table" (embedding, n-grams or output head), or a
    "vector": norms, decays, convolutions, routers and gates."""
    if ndim == 3:
        return MATRIX if ".experts." in name else VECTOR
    if ndim != 2 or any(part in name for part in _GATES):
        return VECTOR
    return TABLE if any(part in name for part in _TABLES) else MATRIX


def make_schedule(config: ExperimentConfig) -> Callable[[Any], jax.Array]:
    """The factor on every peak learning rate, float32 in [0, 1], of a step counted from 0."""
    schedule, steps = config.schedule, config.steps

    def factor(step: Any) -> jax.Array:
        done = jnp.asarray(step, jnp.float32) + 1.0
        warmup = jnp.minimum(done / max(schedule.warmup_steps, 1), 1.0)
        if schedule.name == "cosine":
            start = schedule.warmup_steps
            share = jnp.clip((done - start) / max(steps - start, 1), 0.0, 1.0)
            decay = 0.5 * (1.0 + jnp.cos(jnp.pi * share))
        else:
            length = max(round(schedule.decay_share * steps), 1)
            decay = jnp.clip((steps - done) / length, 0.0, 1.0)
        return warmup * (schedule.final_scale + (1.0 - schedule.final_scale) * decay)

    return factor


def make_optimizer(config: ExperimentConfig, tensors: Mapping[str, Any]) -> optax.GradientTransformation:
    """Gradient clipping, then one chain per kind of tensor.

    Args:
      config: the experiment.
      tensors: names and shapes of what is trained.
    """
    labels = {name: kind_of(name, len(t.shape)) for name, t in tensors.items()}
    factor = make_schedule(config)
    optimizer = config.optimizer

    def rate(peak: float) -> optax.GradientTransformation:
        return optax.scale_by_learning_rate(lambda step: peak * factor(step))

    decay = optax.add_decayed_weights(optimizer.weight_decay)
    decays_head = optax.add_decayed_weights(
        optimizer.weight_decay, mask=functools.partial(jax.tree.map_with_path, _is_head)
    )
    chains: dict[Hashable, optax.GradientTransformation] = {
        MATRIX: optax.chain(_hidden(optimizer), decay, rate(optimizer.learning_rate)),
        TABLE: optax.chain(_adam(optimizer), decays_head, rate(optimizer.embedding_learning_rate)),
        VECTOR: optax.chain(_adam(optimizer), rate(optimizer.embedding_learning_rate)),
    }
    return _lenient(
        optax.chain(optax.clip_by_global_norm(optimizer.grad_clip), optax.partition(chains, labels))
    )


def _lenient(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """The optimiser under JAX's default type promotion: optax raises floats to integer counts."""

    def init(params):
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            return optimizer.init(params)

    def update(updates, state, params=None):
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            return optimizer.update(updates, state, params)

    return optax.GradientTransformation(init, update)


def _is_head(path: tuple[Any, ...], leaf: Any) -> bool:
    return "lm_head" in str(path[-1])


def _adam(optimizer: OptimizerConfig) -> optax.GradientTransformation:
    return optax.scale_by_adam(optimizer.beta1, optimizer.beta2, optimizer.eps)


def _hidden(optimizer: OptimizerConfig) -> optax.GradientTransformation:
    if optimizer.name == "adamw":
        return _adam(optimizer)
    rows, columns = 1, 2
    muon = optax.contrib.scale_by_muon(
        beta=optimizer.momentum,
        weight_dimension_numbers=functools.partial(
            jax.tree.map, lambda _: optax.contrib.MuonDimensionNumbers(rows, columns)
        ),
    )
    return optax.chain(_stacked(muon), optax.stateless(lambda updates, _: jax.tree.map(_like_adam, updates)))


def _stacked(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """Shows matrices of one shape to the optimiser as one array [count, rows, columns].

    A model has dozens of small matrices; one by one, their Newton-Schulz steps would be as many kernels.
    A stack of experts [E, rows, columns] counts as E matrices.
    """

    def stack(matrices):
        return {
            "x".join(map(str, shape)): jnp.concatenate([m.reshape(-1, *shape) for m in group])
            for shape, group in _by_shape(matrices).items()
        }

    def init(params):
        return optimizer.init(stack(params))

    def update(updates, state, params=None):
        found: Any
        found, state = optimizer.update(stack(updates), state)
        out = dict(updates)
        first: dict[tuple[int, ...], int] = {}
        for name, update in updates.items():
            if isinstance(update, optax.MaskedNode):
                continue
            shape = update.shape[-2:]
            start = first.get(shape, 0)
            first[shape] = start + update.size // math.prod(shape)
            out[name] = found["x".join(map(str, shape))][start : first[shape]].reshape(update.shape)
        return out, state

    return optax.GradientTransformation(init, update)


def _by_shape(matrices: Mapping[str, Any]) -> dict[tuple[int, ...], list[jax.Array]]:
    groups: dict[tuple[int, ...], list[jax.Array]] = {}
    for matrix in matrices.values():
        # Tensors of other kinds are masked out.
        if not isinstance(matrix, optax.MaskedNode):
            groups.setdefault(matrix.shape[-2:], []).append(matrix)
    return groups


def _like_adam(update: jax.Array) -> jax.Array:
    return update * (_MUON_RMS * max(update.shape[-2:]) ** 0.5)
