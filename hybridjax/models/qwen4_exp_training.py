"""What Qwen4Exp learns beside the next token: even experts, foreseeing attention, the token after next."""

from typing import Any

import jax
import jax.numpy as jnp

from hybridjax.batch import Batch
from hybridjax.configs.qwen4_exp import Qwen4ExpConfig
from hybridjax.layers import IndexedAttention
from hybridjax.ops import index_loss, load_balancing_loss

ROUTER, INDEXER, MTP = "router", "indexer", "mtp"
_SEEN = ("router_probs", "expert_ids", "attention_input")


def loss_names(config: Qwen4ExpConfig) -> tuple[str, ...]:
    """The losses that ``training_losses`` gives for this configuration."""
    mtp = config.mtp_num_hidden_layers > 0
    indexed = mtp or "indexed_attention" in config.layer_types
    return (ROUTER, *[INDEXER] * indexed, *[MTP] * mtp)


def training_losses(
    model: Any, input_ids: jax.Array, targets: jax.Array, mask: jax.Array
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Teacher-forced logits and the model's further losses, each a mean.

    - "router": load_balancing_loss, the mean over the layers; k if tokens are spread evenly.
    - "indexer": index_loss in nats, the mean over the layers; its gradient reaches index parameters alone.
    - "mtp": nats of the token after next, by one step of the MTP head from the trunk's streams.

    Args:
      model: Qwen4Exp.
      input_ids, targets: int32[B, L]; targets are the ids one place further.
      mask: bool[B, L], which targets count.

    Returns:
      float32[B, L, vocab], and float32 scalars under the names of ``loss_names``.
    """
    seen: dict[str, jax.Array] = {}

    def keep(name: str, value: jax.Array) -> None:
        if name.endswith(_SEEN):
            seen[name] = value

    batch = Batch.whole(input_ids)
    streams, _ = model.forward(batch, None, keep)
    logits = model.logits(_unpadded(streams, batch))
    losses = {}
    layers = {f"layers.{i}.": layer for i, layer in enumerate(model.layers)}
    if model.text_config.mtp_num_hidden_layers:
        layers["mtp."] = model.mtp.layer
        drafted, _ = model.draft(Batch.whole(targets), streams, None, keep)
        losses[MTP] = _draft_nats(model.draft_logits(_unpadded(drafted, batch)), targets, mask)
    valid = batch.positions >= 0
    router = [
        load_balancing_loss(seen[name + "router_probs"], seen[name + "expert_ids"], valid) for name in layers
    ]
    losses[ROUTER] = sum(router) / len(router)
    indexer = [
        _index_loss(layer.mixer, seen[name + "attention_input"], batch)
        for name, layer in layers.items()
        if isinstance(layer.mixer, IndexedAttention)
    ]
    if indexer:
        losses[INDEXER] = sum(indexer) / len(indexer)
    return logits, losses


def _unpadded(rows: jax.Array, batch: Batch) -> jax.Array:
    return rows.reshape(batch.slot.shape[0], -1, rows.shape[-1])[:, : batch.whole_length]


def _draft_nats(logits: jax.Array, targets: jax.Array, mask: jax.Array) -> jax.Array:
    """Mean nats of targets[:, t + 1] by logits[:, t], where both targets count."""
    logits, counted = logits[:, :-1], mask[:, :-1] & mask[:, 1:]
    chosen = jnp.take_along_axis(logits, targets[:, 1:, None], axis=-1)[..., 0]
    nats = jax.nn.logsumexp(logits, axis=-1) - chosen
    return jnp.sum(jnp.where(counted, nats, 0.0)) / jnp.maximum(jnp.sum(counted), 1).astype(jnp.float32)


def _index_loss(mixer: IndexedAttention, x: jax.Array, batch: Batch) -> jax.Array:
    config = mixer.config
    return index_loss(
        *mixer.index_inputs(x, batch),
        batch.positions,
        sequences=batch.slot.shape[0],
        block_size=config.indexer_compress_ratio,
        scale=config.head_dim**-0.5,
    )
