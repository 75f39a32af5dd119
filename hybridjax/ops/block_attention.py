"""Softmax attention of each query over a list of K/V blocks (minicpm_sala 3.6)."""

import functools

import jax
import jax.numpy as jnp

from hybridjax.batch import TILE
from hybridjax.ops.dispatch import Op, einsum_f32, tiles_at_once

_SEGMENT = 32  # blocks per step of the online softmax


def _block_attention(
    q: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    page_table: jax.Array,
    row_sequence: jax.Array,
    positions: jax.Array,
    block_ids: jax.Array,
    *,
    scale: float,
    tiled: bool = False,
) -> jax.Array:
    """Exact softmax over the listed blocks, restricted to positions at or before the query.

    Args:
      q: [N, Hq, D]; query head h reads K/V head h // (Hq / G).
      keys, values: [pages, G, block, D]; page_table: int32[B, P].
      row_sequence, positions: int32[N]; rows with position -1 return zeros.
      block_ids: int32[N, G, M] blocks of each query, -1 for none.
      scale: factor on q . k.
      tiled: the rows come in tiles of 64 of one sequence each (a promise to implementations).

    Returns:
      [N, Hq, D] in the dtype of q. Scores and sums in float32, weights in the dtype of the values.
    """
    rows, heads, width = q.shape
    _, groups, block, _ = keys.shape
    page = jnp.take_along_axis(
        page_table[row_sequence], jnp.maximum(block_ids, 0).reshape(rows, -1), axis=1
    ).reshape(block_ids.shape)
    group = jnp.arange(groups)[None, :, None]
    k, v = keys[page, group], values[page, group]  # [N, G, M, block, D]
    token = block_ids[..., None] * block + jnp.arange(block)
    seen = (block_ids >= 0)[..., None] & (token <= positions[:, None, None, None])
    seen = seen.reshape(rows, groups, 1, -1)
    k, v = (x.reshape(rows, groups, -1, width) for x in (k, v))
    # Unseen values may be anything, NaN too; a weight of zero would not silence them.
    v = jnp.where(seen[:, :, 0, :, None], v, 0)

    q = q.reshape(rows, groups, heads // groups, width)
    scores = einsum_f32("nghd,ngtd->nght", q, k)
    scores = jnp.where(seen, scale * scores, -jnp.inf)
    top = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.exp(scores - jnp.where(jnp.isfinite(top), top, 0.0))
    total = jnp.sum(weights, axis=-1, keepdims=True)
    out = einsum_f32("nght,ngtd->nghd", weights.astype(v.dtype), v)
    out = out / jnp.where(total > 0, total, 1.0)
    return out.reshape(rows, heads, width).astype(q.dtype)


def _block_attention_tiled(
    q, keys, values, page_table, row_sequence, positions, block_ids, *, scale, tiled=True
):
    """One tile at a time: 64 queries share their sequence's keys, unlisted blocks are masked.

    The context is walked in fixed segments with an online softmax, so memory does not grow with it and
    a longer page table changes no float. Differentiable; tiles are recomputed in the backward pass.
    """
    tiles = q.shape[0] // TILE
    heads, blocks = q.shape[1], page_table.shape[1]
    segment = min(_SEGMENT, blocks)
    padding = -blocks % segment
    tables = jnp.pad(page_table, ((0, 0), (0, padding)))[row_sequence[::TILE]]
    one = jax.checkpoint(functools.partial(_attend_tile, keys, values, segment, scale))
    per_tile = TILE * heads * segment * keys.shape[2] * 4
    out = jax.lax.map(
        one,
        (
            q.reshape(tiles, TILE, *q.shape[1:]),
            tables,
            positions.reshape(tiles, TILE),
            block_ids.reshape(tiles, TILE, *block_ids.shape[1:]),
        ),
        batch_size=tiles_at_once(tiles, per_tile),
    )
    return out.reshape(q.shape)


def _attend_tile(keys, values, segment, scale, tile):
    """Online-softmax attention of one tile: q [64, Hq, D], table [P'], ids [64, G, M]."""
    q, table, positions, ids = tile
    _, groups, block, width = keys.shape
    steps = table.shape[0] // segment
    # Query heads of a group join the rows, so that scores are one plain matrix per group.
    q = jnp.moveaxis(q.reshape(TILE, groups, -1, width), 0, 1)
    per_group = q.shape[2]
    q = q.reshape(groups, TILE * per_group, width)
    row = jnp.arange(TILE)[:, None, None]
    group = jnp.arange(groups)[None, :, None]
    # -1 points one past the end and is dropped.
    target = jnp.where(ids >= 0, ids, table.shape[0])
    listed = jnp.zeros((TILE, groups, table.shape[0]), bool).at[row, group, target].set(True, mode="drop")

    def step(carry, item):
        top, total, out = carry
        pages, listed, first = item
        token = (first + jnp.arange(segment))[:, None] * block + jnp.arange(block)
        seen = listed[..., None] & (token[None, None] <= positions[:, None, None, None])
        seen = jnp.moveaxis(seen.reshape(TILE, groups, -1), 0, 1)
        k = jnp.moveaxis(keys[pages], 1, 0).reshape(groups, -1, width)
        v = jnp.moveaxis(values[pages], 1, 0).reshape(groups, -1, width)
        v = jnp.where(jnp.any(seen, axis=1)[..., None], v, 0)
        seen = jnp.repeat(seen, per_group, axis=1)
        scores = einsum_f32("gmd,gtd->gmt", q, k)
        scores = jnp.where(seen, scale * scores, _LOWEST)
        new_top = jnp.maximum(top, jnp.max(scores, axis=-1, keepdims=True))
        weights = jnp.where(seen, jnp.exp(scores - new_top), 0.0)
        shrink = jnp.exp(top - new_top)
        total = total * shrink + jnp.sum(weights, axis=-1, keepdims=True)
        product = einsum_f32("gmt,gtd->gmd", weights.astype(v.dtype), v)
        return (new_top, total, out * shrink + product), None

    shape = q.shape[:2]
    start = (
        jnp.full((*shape, 1), _LOWEST, jnp.float32),
        jnp.zeros((*shape, 1), jnp.float32),
        jnp.zeros((*shape, width), jnp.float32),
    )
    items = (
        table.reshape(steps, segment),
        jnp.moveaxis(listed.reshape(TILE, groups, steps, segment), 2, 0),
        jnp.arange(steps, dtype=jnp.int32) * segment,
    )
    (_, total, out), _ = jax.lax.scan(step, start, items)
    out = out / jnp.where(total > 0, total, 1.0)
    out = jnp.moveaxis(out.reshape(groups, TILE, per_group, width), 1, 0)
    return out.reshape(TILE, -1, width).astype(q.dtype)


_LOWEST = -1e30  # finite, so that differences of masked scores stay finite


block_attention = Op("block_attention", _block_attention)
block_attention.register("xla_tiled", _block_attention_tiled, supports=lambda *_, tiled=False, **__: tiled)
