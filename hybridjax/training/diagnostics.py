"""How well the parts of a Qwen4Exp model do their work, on held-out text."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from hybridjax.batch import Batch
from hybridjax.layers import IndexedAttention
from hybridjax.ops import attention_by_block
from hybridjax.training.data import PreparedData

_SEEN = ("expert_ids", "attention_input", "block_ids")


def heldout_rows(data: PreparedData, rows: int = 8, length: int = 2048) -> np.ndarray:
    """The first ``length`` tokens of held-out documents, int32[R, length], evenly spaced; R <= rows.

    R is smaller where fewer documents are that long, and 0 where none is.
    """
    starts = [d.token_start for d in data.documents if d.tokens >= length]
    starts = [starts[i * len(starts) // rows] for i in range(rows)] if len(starts) > rows else starts
    found = [data.heldout[start : start + length].astype(np.int32) for start in starts]
    return np.stack(found) if found else np.zeros((0, length), np.int32)


def diagnose(model: Any, ids: np.ndarray) -> dict[str, Any]:
    """What an MTP head, the experts and the indexers do on rows of text.

    Args:
      model: Qwen4Exp.
      ids: int32[R, L].

    Returns:
      rows and length; and, where the model has the part,
      - mtp_agreement: share of places where the greedy draft of the token after next (given the true next
        one) is the trunk's own greedy choice there;
      - expert_load: per layer (MTP last), the busiest expert's choices relative to the mean;
      - attention_share: of dense attention's weight on complete blocks, the share that lies on the chosen
        ones ("chosen", per layer and their mean), beside what as many blocks would hold at best ("best"),
        if they were the latest ones ("latest"), and at random ("random"); means over queries that leave
        blocks out.
    """
    graphdef, state = nnx.split(model)
    program = jax.jit(lambda state, ids: _measure(nnx.merge(graphdef, state), ids))
    found = jax.device_get(program(state, jnp.asarray(ids)))
    report: dict[str, Any] = {"rows": ids.shape[0], "length": ids.shape[1]}
    if "agreement" in found:
        report["mtp_agreement"] = float(found["agreement"])
    report["expert_load"] = {name: float(load) for name, load in found["load"].items()}
    if found["share"]:
        names = ("chosen", "best", "latest", "random")
        each = {layer: dict(zip(names, map(float, values))) for layer, values in found["share"].items()}
        mean = {name: float(np.mean([values[name] for values in each.values()])) for name in names}
        report["attention_share"] = {**mean, "layers": each}
    return report


def _measure(model: Any, ids: jax.Array) -> dict[str, Any]:
    seen: dict[str, jax.Array] = {}

    def keep(name: str, value: jax.Array) -> None:
        if name.endswith(_SEEN):
            seen[name] = value

    batch = Batch.whole(ids)
    rows, length = ids.shape
    streams, _ = model.forward(batch, None, keep)
    layers = {f"layers.{i}": layer for i, layer in enumerate(model.layers)}
    out: dict[str, Any] = {}
    if model.text_config.mtp_num_hidden_layers:
        layers["mtp"] = model.mtp.layer
        following = jnp.pad(ids[:, 1:], ((0, 0), (0, 1)))
        drafted, _ = model.draft(Batch.whole(following), streams, None, keep)

        def greedy(logits):
            return jnp.argmax(logits, axis=-1).reshape(rows, -1)[:, :length]

        trunk, draft = greedy(model.logits(streams)), greedy(model.draft_logits(drafted))
        # The last two places have no true next token, or no choice of the trunk to agree with.
        out["agreement"] = jnp.mean(draft[:, : length - 2] == trunk[:, 1 : length - 1])
    out["load"] = {name: _load(seen[name + ".expert_ids"], layer) for name, layer in layers.items()}
    out["share"] = {
        name: _shares(layer.mixer, seen[name + ".attention_input"], seen[name + ".block_ids"], batch)
        for name, layer in layers.items()
        if isinstance(layer.mixer, IndexedAttention)
    }
    return out


def _load(ids: jax.Array, layer: Any) -> jax.Array:
    experts = layer.mlp.gate.sizes[0]
    counts = jnp.zeros((experts + 1,)).at[jnp.where(ids < 0, experts, ids)].add(1.0)[:experts]
    return jnp.max(counts) / jnp.mean(counts)


def _shares(mixer: IndexedAttention, x: jax.Array, chosen: jax.Array, batch: Batch) -> jax.Array:
    """float32[4]: the share of attention on the chosen, the best, the latest and on random blocks."""
    config = mixer.config
    ratio, top_k = config.indexer_compress_ratio, config.indexer_budget // config.indexer_compress_ratio
    q, k, _, _ = mixer.index_inputs(x, batch)
    sequences = batch.slot.shape[0]

    def one(item):
        q, k, chosen, positions = item
        weight = attention_by_block(q, k, positions, block_size=ratio, scale=config.head_dim**-0.5)
        complete = (positions + 1) // ratio
        blocks = weight.shape[1]
        target = jnp.where(chosen < 0, blocks, chosen)
        row = jnp.arange(target.shape[0])[:, None]
        listed = jnp.zeros((target.shape[0], blocks + 1), bool).at[row, target].set(True)[:, :-1]
        index = jnp.arange(blocks)
        latest = index >= (complete - top_k)[:, None]
        shares = (
            jnp.sum(jnp.where(listed, weight, 0.0), axis=-1),
            jnp.sum(jax.lax.top_k(weight, min(top_k, blocks))[0], axis=-1),
            jnp.sum(jnp.where(latest, weight, 0.0), axis=-1),
            jnp.float32(top_k) / jnp.maximum(complete, 1).astype(jnp.float32),
        )
        counted = complete > top_k
        return jnp.stack([jnp.sum(jnp.where(counted, s, 0.0)) for s in shares]), jnp.sum(counted)

    items = tuple(a.reshape(sequences, -1, *a.shape[1:]) for a in (q, k, chosen[:, 0], batch.positions))
    sums, counts = jax.lax.map(one, items)
    return jnp.sum(sums, axis=0) / jnp.maximum(jnp.sum(counts), 1).astype(jnp.float32)
