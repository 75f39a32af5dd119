"""The compiled programs of training: one update, and the scores of held-out rows."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from hybridjax.errors import ConfigError
from hybridjax.ops import dispatch
from hybridjax.training.config import ExperimentConfig
from hybridjax.training.data import TokenBatch
from hybridjax.training.optimizers import make_schedule
from hybridjax.training.parameters import ParameterLayout, Tensors

Metrics = dict[str, jax.Array]
_AXIS = "data"
_WHOLE = PartitionSpec()


def token_nats(logits: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    """-ln p(target) and the log-normaliser: logits [..., V], targets int32[...] -> float32[...] twice."""
    logits = logits.astype(jnp.float32)
    normaliser = jax.nn.logsumexp(logits, axis=-1)
    chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return normaliser - chosen, normaliser


class DataParallel:
    """Rows of a batch over all devices, everything else on each of them.

    Programs run under shard_map, so that each device sees a smaller batch and nothing inside the model
    is ever split.

    Args:
      devices: default: all.
    """

    def __init__(self, devices: Sequence[Any] | None = None):
        devices = jax.devices() if devices is None else devices
        self._mesh = Mesh(np.asarray(devices), (_AXIS,))
        self.size = len(devices)
        self.replicated = NamedSharding(self._mesh, _WHOLE)

    def put(self, *arrays: np.ndarray, axis: int = 0) -> tuple[jax.Array, ...]:
        """The arrays, split over the devices along ``axis``.

        Raises:
          ConfigError: the axis cannot be split evenly.
        """
        rows = arrays[0].shape[axis]
        if rows % self.size:
            raise ConfigError(f"{rows} rows cannot be split over {self.size} devices; change batch_size")
        sharding = NamedSharding(self._mesh, _split_along(axis))
        return tuple(jax.device_put(a, sharding) for a in arrays)

    def per_device(self, function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        """The function as each device runs it on its own rows."""
        # Models start their scans from plain zeros, which the check of varying axes would refuse.
        return jax.shard_map(
            function, mesh=self._mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )


def _split_along(axis: int) -> PartitionSpec:
    return PartitionSpec(*[None] * axis, _AXIS)


def split_batch(batch: TokenBatch, parts: int) -> tuple[np.ndarray, ...]:
    """inputs, targets and mask as [parts, B / parts, L]."""
    return tuple(a.reshape(parts, -1, a.shape[-1]) for a in (batch.inputs, batch.targets, batch.mask))


def make_train_step(
    layout: ParameterLayout,
    optimizer: optax.GradientTransformation,
    config: ExperimentConfig,
    parallel: DataParallel,
) -> Callable[..., tuple[Tensors, Any, Metrics]]:
    """Compiles one update.

    Returns:
      ``step(tensors, opt_state, index, inputs, targets, mask)``, where the arrays are
      [microbatches, B, L] and ``index`` counts steps from 0 -> new tensors, new state (the old ones
      are donated) and metrics: loss (mean nats per target), the model's further losses by name, each
      before its weight, grad_norm (before clipping) and lr.
    """
    dtype = jnp.dtype(config.compute_dtype)
    schedule = make_schedule(config)
    weights = {name: config.loss_weight(name) for name in layout.losses}

    def objective(tensors, inputs, targets, mask, scale):
        model, extra = layout.model(tensors, dtype), {}
        with dispatch.override(config.implementation):
            if weights:
                logits, extra = model.training_losses(inputs, targets, mask)
            else:
                logits = model(inputs)
        nats, normaliser = token_nats(logits, targets)
        nats = jnp.sum(jnp.where(mask, nats, 0.0)) * scale
        penalty = jnp.sum(jnp.where(mask, normaliser**2, 0.0)) * scale
        total = nats + config.z_loss * penalty
        if weights:
            # Means over this part's targets: the part counts by its share of all.
            share = jnp.sum(mask).astype(jnp.float32) * scale
            extra = {name: share * extra[name] for name in weights}
            total += sum(weight * extra[name] for name, weight in weights.items())
        return total, {"loss": nats, **extra}

    gradient = jax.value_and_grad(objective, has_aux=True)

    def gradients(tensors, inputs, targets, mask, scale):
        def add(carry, part):
            (_, losses), grads = gradient(tensors, *part, scale)
            return jax.tree.map(jnp.add, carry, (losses, grads)), None

        losses = dict.fromkeys(("loss", *weights), jnp.zeros((), jnp.float32))
        zero = (losses, jax.tree.map(jnp.zeros_like, tensors))
        total, _ = jax.lax.scan(add, zero, (inputs, targets, mask))
        return jax.lax.psum(total, _AXIS)

    parts = _split_along(1)
    gradients = parallel.per_device(gradients, (_WHOLE, parts, parts, parts, _WHOLE), _WHOLE)

    def step(tensors, opt_state, index, inputs, targets, mask):
        scale = 1.0 / jnp.maximum(jnp.sum(mask), 1).astype(jnp.float32)
        losses, grads = gradients(tensors, inputs, targets, mask, scale)
        updates, opt_state = optimizer.update(grads, opt_state, tensors)
        metrics = {
            **losses,
            "grad_norm": optax.tree.norm(grads),
            "lr": config.optimizer.learning_rate * schedule(index),
        }
        return optax.apply_updates(tensors, updates), opt_state, metrics

    return jax.jit(step, donate_argnums=(0, 1), out_shardings=parallel.replicated)


def make_row_nats(
    layout: ParameterLayout, compute_dtype: str, parallel: DataParallel, implementation: str | None = None
) -> Callable[[Tensors, np.ndarray, np.ndarray, np.ndarray], jax.Array]:
    """Compiles ``row_nats(tensors, inputs, targets, scored)`` -> float32[B] for the Evaluator."""
    dtype = jnp.dtype(compute_dtype)

    def nats(tensors, inputs, targets, scored):
        with dispatch.override(implementation):
            found, _ = token_nats(layout.model(tensors, dtype)(inputs), targets)
        return jnp.sum(jnp.where(scored, found, 0.0), axis=-1)

    rows = _split_along(0)
    program = jax.jit(parallel.per_device(nats, (_WHOLE, rows, rows, rows), rows))
    return lambda tensors, *arrays: program(tensors, *parallel.put(*arrays))
