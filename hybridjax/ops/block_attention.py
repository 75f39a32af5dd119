"""Softmax attention of each query over a list of K/V blocks (minicpm_sala 3.6, qwen4_exp 5)."""

import functools

import jax
import jax.numpy as jnp

from hybridjax.batch import TILE
from hybridjax.ops.dispatch import Op, einsum_f32, tiles_at_once

_SEGMENT = 32  # pages per step of the online softmax
_GATHERED_COST = 8  # of a listed token on a CPU, in those of a token under the mask
_GATHERED_BYTES = 2**25  # of keys and values gathered at once


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
    block_size: int | None = None,
    tiled: bool = False,
) -> jax.Array:
    """Exact softmax over the listed blocks, restricted to positions at or before the query.

    Args:
      q: [N, Hq, D]; query head h reads K/V head h // (Hq / G).
      keys, values: [pages, G, page, D]; page_table: int32[B, P].
      row_sequence, positions: int32[N]; rows with position -1 return zeros.
      block_ids: int32[N, G, M] distinct blocks of each query, -1 for none; [N, 1, M]: one list serves all
        K/V heads. Block b of a sequence is its tokens b * block_size .. (b + 1) * block_size - 1.
      scale: factor on q . k.
      block_size: tokens per listed block, a divisor of the page size. Default: the page size.
      tiled: the rows come in tiles of 64 of one sequence each (a promise to implementations).

    Returns:
      [N, Hq, D] in the dtype of q. Scores and sums in float32, weights in the dtype of the values.

    Raises:
      ValueError: block_size does not divide the page size.
    """
    rows, heads, width = q.shape
    groups = keys.shape[1]
    block, per_page = _block_size(keys, block_size)
    index = jnp.maximum(block_ids, 0)
    column = (index // per_page).reshape(rows, -1)
    page = jnp.take_along_axis(page_table[row_sequence], column, axis=1).reshape(block_ids.shape)
    group = jnp.arange(groups)[None, :, None]
    # Only the listed tokens are gathered, not the pages that they lie in: [N, G, M, block, D].
    k, v = (
        x.reshape(-1, groups, per_page, block, width)[page, group, index % per_page] for x in (keys, values)
    )
    token = block_ids[..., None] * block + jnp.arange(block)
    seen = (block_ids >= 0)[..., None] & (token <= positions[:, None, None, None])
    seen = seen.reshape(rows, block_ids.shape[1], 1, -1)
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


def _block_size(keys: jax.Array, block_size: int | None) -> tuple[int, int]:
    """Tokens per block and blocks per page."""
    page = keys.shape[2]
    block = page if block_size is None else block_size
    if block < 1 or page % block:
        raise ValueError(f"block_size is {block}; it must divide the page size ({page})")
    return block, page // block


def _block_attention_tiled(
    q, keys, values, page_table, row_sequence, positions, block_ids, *, scale, block_size=None, tiled=True
):
    """One tile at a time: 64 queries share their sequence's keys, unlisted blocks are masked.

    The context is walked in fixed segments with an online softmax, so memory does not grow with it and
    a longer page table changes no float. Differentiable; tiles are recomputed in the backward pass.
    """
    tiles = q.shape[0] // TILE
    heads, pages = q.shape[1], page_table.shape[1]
    block, _ = _block_size(keys, block_size)
    segment = min(_SEGMENT, pages)
    padding = -pages % segment
    tables = jnp.pad(page_table, ((0, 0), (0, padding)))[row_sequence[::TILE]]
    one = jax.checkpoint(functools.partial(_attend_tile, keys, values, segment, block, scale))
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


def _block_attention_listed(
    q, keys, values, page_table, row_sequence, positions, block_ids, *, scale, block_size=None, tiled=True
):
    """For a CPU: as xla_tiled in the front of a long context, beyond it the listed blocks alone.

    Masking takes time in proportion to the context, gathering in proportion to the list. Which of them a
    tile gets depends on its position and the list's width only, so a longer page table changes no float.
    """
    tiles, page = q.shape[0] // TILE, keys.shape[2]
    block, _ = _block_size(keys, block_size)
    front = -(-_GATHERED_COST * block_ids.shape[2] * block // (_SEGMENT * page)) * _SEGMENT
    if page_table.shape[1] <= front:
        where = page_table, row_sequence, positions, block_ids
        return _block_attention_tiled(q, keys, values, *where, scale=scale, block_size=block_size)

    masked = functools.partial(_attend_tile, keys, values, _SEGMENT, block, scale, causal=True)
    gathered = functools.partial(_attend_listed, keys, values, block, scale)

    @jax.checkpoint
    def one(tile):
        q, table, positions, ids = tile
        return jax.lax.cond(
            jnp.max(positions) < front * page,
            lambda: masked((q, table[:front], positions, ids)),
            lambda: gathered(tile),
        )

    # A map without batches: in a batch, both sides of the condition would be computed.
    out = jax.lax.map(
        one,
        (
            q.reshape(tiles, TILE, *q.shape[1:]),
            page_table[row_sequence[::TILE]],
            positions.reshape(tiles, TILE),
            block_ids.reshape(tiles, TILE, *block_ids.shape[1:]),
        ),
    )
    return out.reshape(q.shape)


def _attend_listed(keys, values, block, scale, tile):
    """The definition on one tile, as many rows at a time as the cache holds."""
    q, table, positions, ids = tile
    per_row = 2 * keys.shape[1] * ids.shape[2] * block * keys.shape[3] * 4
    size = TILE
    while size > 1 and size * per_row > _GATHERED_BYTES:
        size //= 2

    def attend(rows):
        q, positions, ids = rows
        sequence = jnp.zeros((size,), jnp.int32)
        where = table[None], sequence, positions, ids
        return _block_attention(q, keys, values, *where, scale=scale, block_size=block)

    out = jax.lax.map(attend, [x.reshape(TILE // size, size, *x.shape[1:]) for x in (q, positions, ids)])
    return out.reshape(q.shape)


def _attend_tile(keys, values, segment, block, scale, tile, causal=False):
    """Online-softmax attention of one tile: q [64, Hq, D], table [P'], ids [64, G or 1, M].

    causal: skip segments beyond the tile, which would change nothing; not for batches of tiles.
    """
    q, table, positions, ids = tile
    _, groups, page, width = keys.shape
    lists, per_page = ids.shape[1], page // block
    steps, blocks = table.shape[0] // segment, table.shape[0] * per_page
    # Query heads of a group join the rows, so that scores are one plain matrix per group.
    q = jnp.moveaxis(q.reshape(TILE, groups, -1, width), 0, 1)
    per_group = q.shape[2]
    q = q.reshape(groups, TILE * per_group, width)
    row = jnp.arange(TILE)[:, None, None]
    group = jnp.arange(lists)[None, :, None]
    # -1 points one past the end and is dropped.
    target = jnp.where(ids >= 0, ids, blocks)
    listed = jnp.zeros((TILE, lists, blocks), bool).at[row, group, target].set(True, mode="drop")

    def step(carry, item):
        top, total, out = carry
        pages, listed, first = item
        token = (first + jnp.arange(segment * per_page))[:, None] * block + jnp.arange(block)
        seen = listed[..., None] & (token[None, None] <= positions[:, None, None, None])
        seen = jnp.moveaxis(seen.reshape(TILE, lists, -1), 0, 1)
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
        jnp.moveaxis(listed.reshape(TILE, lists, steps, segment * per_page), 2, 0),
        jnp.arange(steps, dtype=jnp.int32) * (segment * per_page),
    )
    last = jnp.max(positions)

    def step_or_skip(carry, item):
        skip = item[2] * block > last
        return jax.lax.cond(skip, lambda: carry, lambda: step(carry, item)[0]), None

    (_, total, out), _ = jax.lax.scan(step_or_skip if causal else step, start, items)
    out = out / jnp.where(total > 0, total, 1.0)
    out = jnp.moveaxis(out.reshape(groups, TILE, per_group, width), 1, 0)
    return out.reshape(TILE, -1, width).astype(q.dtype)


_LOWEST = -1e30  # finite, so that differences of masked scores stay finite


block_attention = Op("block_attention", _block_attention)
block_attention.register(
    "xla_listed",
    _block_attention_listed,
    platforms=("cpu",),
    supports=lambda *_, tiled=False, **__: tiled,
)
block_attention.register("xla_tiled", _block_attention_tiled, supports=lambda *_, tiled=False, **__: tiled)
