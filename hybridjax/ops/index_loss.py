"""What an indexer is trained to foresee: where attention would look, block by block.

A choice of blocks has no gradient. The indexer learns from the attention's own weights instead: the loss is
KL(attention || indexer) over the complete blocks before each query, as in DeepSeek-V3.2 ("DeepSeek
Sparse Attention", section 2.1, the lightning indexer), with blocks where that has tokens.
"""

import functools

import jax
import jax.numpy as jnp

from hybridjax.batch import TILE
from hybridjax.ops.dispatch import einsum_f32, tiles_at_once
from hybridjax.ops.index_selection import index_scores

_HIDDEN = -1e30  # finite, so that rows without any block give no NaN


def attention_by_block(
    q: jax.Array, k: jax.Array, positions: jax.Array, *, block_size: int, scale: float
) -> jax.Array:
    """The mean over heads of dense attention's weights, summed over each complete block.

    Args:
      q: [R, Hq, D]; query head h reads K/V head h // (Hq / G).
      k: [L, G, D] the keys of positions 0 .. L - 1; L is a multiple of block_size.
      positions: int32[R], -1 for padding.
      block_size: tokens per block.
      scale: factor on q . k.

    Returns:
      float32[R, L / block_size], adding up to 1 over the blocks that end at or before the query, 0 elsewhere;
      all 0 where no block is complete. Tokens of the incomplete tail count for nothing.
    """
    rows, heads, width = q.shape
    length, groups = k.shape[:2]
    visible = jnp.arange(length) < ((positions + 1) // block_size * block_size)[:, None]
    total = jnp.zeros((rows, length), jnp.float32)
    # Head by head: all heads' scores at once would be the largest array of a training step.
    for head in range(heads):
        scores = scale * einsum_f32("rd,td->rt", q[:, head], k[:, head // (heads // groups)])
        scores = jnp.where(visible, scores, _HIDDEN)
        total += jnp.where(visible, jax.nn.softmax(scores, axis=-1), 0.0)
    return total.reshape(rows, -1, block_size).sum(axis=-1) / heads


def index_loss(
    q: jax.Array,
    k: jax.Array,
    index_q: jax.Array,
    index_keys: jax.Array,
    positions: jax.Array,
    *,
    sequences: int,
    block_size: int,
    scale: float,
) -> jax.Array:
    """The mean KL divergence, in nats, of the indexer's softmax over blocks from dense attention's.

    Over the rows that have two complete blocks or more. Tiles are recomputed in the backward pass.

    Args:
      q: [N, Hq, D], k: [N, G, D] of a WHOLE batch, rotated; no gradient flows into them.
      index_q: [N, Hi, Di], index_keys: [N / block_size, Di], normalised and rotated. The softmax is over
        index_scores / sqrt(Di).
      positions: int32[N], -1 for padding.
      sequences: equally long sequences in the batch.
      block_size, scale: see attention_by_block.

    Returns:
      float32 scalar, 0 or more; 0 without such rows.
    """
    q, k = jax.lax.stop_gradient((q, k))
    k = k.reshape(sequences, -1, *k.shape[1:])
    index_keys = index_keys.reshape(sequences, -1, index_keys.shape[-1])
    tiles = positions.shape[0] // TILE
    attention = functools.partial(attention_by_block, block_size=block_size, scale=scale)

    def one(tile):
        q, index_q, positions, sequence = tile
        target = attention(q, k[sequence], positions)
        complete = (positions + 1) // block_size
        visible = jnp.arange(target.shape[1]) < complete[:, None]
        scores = index_scores(index_q, index_keys[sequence]) * index_q.shape[-1] ** -0.5
        log_found = jax.nn.log_softmax(jnp.where(visible, scores, _HIDDEN), axis=-1)
        log_wanted = jnp.log(jnp.maximum(target, jnp.finfo(jnp.float32).tiny))
        divergence = jnp.sum(jnp.where(visible, target * (log_wanted - log_found), 0.0), axis=-1)
        counted = complete >= 2
        return jnp.sum(jnp.where(counted, divergence, 0.0)), jnp.sum(counted)

    per_tile = 4 * TILE * k.shape[1] * 4
    sums, counts = jax.lax.map(
        jax.checkpoint(one),
        (
            q.reshape(tiles, TILE, *q.shape[1:]),
            index_q.reshape(tiles, TILE, *index_q.shape[1:]),
            positions.reshape(tiles, TILE),
            jnp.repeat(jnp.arange(sequences, dtype=jnp.int32), tiles // sequences),
        ),
        batch_size=tiles_at_once(tiles, per_tile),
    )
    return jnp.sum(sums) / jnp.maximum(jnp.sum(counts), 1).astype(jnp.float32)
