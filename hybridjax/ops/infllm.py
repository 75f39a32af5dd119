"""InfLLM-v2 block selection: compressed keys, block scores, and the list of blocks of each query.

Source: minicpm_sala 3.2-3.5 under the position rule of docs/design.md: every query is answered as a
decode step would answer it, so a window of compressed keys is visible exactly when it ends at or
before the query. Pages are blocks; block b of a sequence is ``page_table[sequence, b]``.
"""

import functools

import jax
import jax.numpy as jnp

from hybridjax.batch import TILE
from hybridjax.configs.minicpm_sala import SparseConfig
from hybridjax.ops.dispatch import Op, einsum_f32, tiles_at_once
from hybridjax.ops.scatter import write_rows

PER_BLOCK = 4  # compressed keys per block
_SEGMENT = 128  # blocks whose scores are computed together on a CPU


def compress_block(previous: jax.Array, current: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Means of the key windows that end in a block.

    Args:
      previous, current: [..., block, D] keys of two neighbouring blocks.

    Returns:
      compressed [..., 4, D]: entry c is the mean of the block / 2 keys that end with a quarter c of
      the current block; coarse [..., D]: the mean of both blocks. Accumulated in float32, in the
      dtype of the keys. Entries whose window is not complete are meaningless.
    """
    both = jnp.concatenate([previous, current], axis=-2).astype(jnp.float32)
    quarter = both.reshape(*both.shape[:-2], 2 * PER_BLOCK, -1, both.shape[-1]).mean(axis=-2)
    compressed = 0.5 * (quarter[..., PER_BLOCK - 1 : -1, :] + quarter[..., PER_BLOCK:, :])
    return compressed.astype(current.dtype), quarter.mean(axis=-2).astype(current.dtype)


def _update_compressed(
    keys: jax.Array,
    compressed: jax.Array,
    coarse: jax.Array,
    page: jax.Array,
    previous_page: jax.Array,
    block: jax.Array,
    last: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Writes the compressed keys that M blocks have completed so far; call after writing the keys.

    Args:
      keys: [pages, G, block, D]; compressed: [pages, G, 4, D]; coarse: [pages, G, D].
      page, previous_page: int32[M] pages of the block, distinct where it holds keys, and of the one before it
        (any page for block 0).
      block: int32[M] index of the block in its sequence.
      last: int32[M] column of the last key written in it, -1 for none.

    Returns:
      compressed and coarse with the completed entries written, all others unchanged.
    """
    fine, wide = compress_block(keys[previous_page], keys[page])
    stride = keys.shape[2] // PER_BLOCK
    entry = jnp.arange(PER_BLOCK)
    done = last[:, None] >= (entry + 1) * stride - 1
    done = done & ((entry > 0)[None, :] | (block > 0)[:, None])
    fine = jnp.where(done[:, None, :, None], fine, compressed[page])
    wide = jnp.where(((last == keys.shape[2] - 1) & (block > 0))[:, None, None], wide, coarse[page])
    held = last >= 0
    return write_rows(compressed, held, fine, page), write_rows(coarse, held, wide, page)


def block_scores(
    q: jax.Array,
    compressed: jax.Array,
    coarse: jax.Array,
    positions: jax.Array,
    *,
    block_size: int,
    scale: float,
) -> jax.Array:
    """Scores of all blocks of one sequence for R of its queries (minicpm_sala 3.5 a to e).

    The normaliser comes from the coarse keys; normalised scores are summed over the query heads of a
    key/value head, rounded to the dtype of q, and max-pooled over the windows that touch a block.

    Args:
      q: [R, Hq, D]; compressed: [P, G, 4, D]; coarse: [P, G, D] in block order.
      positions: int32[R].
      block_size: tokens per block.
      scale: softmax scale.

    Returns:
      float32[R, G, P]; -inf for a block that no visible window touches.
    """
    rows, heads, width = q.shape
    blocks, groups = coarse.shape[:2]
    q = q.reshape(rows, groups, heads // groups, width)

    # Entry e ends with token (e + 1) * stride - 1 and is the mean of 2 * stride keys, so e = 0 is void.
    entry = jnp.arange(blocks * PER_BLOCK)
    seen = ((entry + 1) * (block_size // PER_BLOCK) - 1)[None, :] <= positions[:, None]
    seen = seen & (entry > 0)[None, :]
    index = jnp.arange(blocks)
    seen_coarse = (((index + 1) * block_size - 1)[None, :] <= positions[:, None]) & (index > 0)[None, :]

    fine = jnp.moveaxis(compressed, 1, 0).reshape(groups, blocks * PER_BLOCK, width)
    raw = einsum_f32("rghd,ged->rghe", q, fine)
    rough = einsum_f32("rghd,bgd->rghb", q, coarse)
    rough = jnp.where(seen_coarse[:, None, None, :], scale * rough, -jnp.inf)
    top = jnp.max(rough, axis=-1, keepdims=True)
    top = jnp.where(jnp.isfinite(top), top, 0.0)
    total = jnp.sum(jnp.exp(rough - top), axis=-1, keepdims=True)
    visible = seen[:, None, None, :] & (total > 0)
    share = jnp.where(visible, jnp.exp(scale * raw - top) / jnp.where(total > 0, total, 1.0), 0.0)
    summed = jnp.sum(share, axis=2).astype(q.dtype).astype(jnp.float32)

    # Window j touches block b for j in 4b-1 .. 4b+3, that is e = j + 1 in 4b .. 4b+4.
    summed = jnp.where(seen[:, None, :], summed, -jnp.inf)
    own = summed.reshape(rows, groups, blocks, PER_BLOCK).max(axis=-1)
    after = jnp.pad(summed[..., PER_BLOCK::PER_BLOCK], ((0, 0), (0, 0), (0, 1)), constant_values=-jnp.inf)
    return jnp.maximum(own, after)


def choose_blocks(scores: jax.Array, positions: jax.Array, config: SparseConfig) -> jax.Array:
    """The blocks of each query from their scores (minicpm_sala 3.5 f to h, decisions 1).

    Args:
      scores: float32[R, G, P].
      positions: int32[R]; -1 lists nothing.
      config: selection settings.

    Returns:
      int32[R, G, M] block ids, ascending, padded with -1; M = min(P, max_listed_blocks). Dense queries
      list all their blocks. Ties go to the smaller id.
    """
    blocks = scores.shape[-1]
    listed = min(blocks, config.max_listed_blocks)
    current = (positions // config.block_size)[:, None, None]
    index = jnp.arange(blocks)[None, None, :]
    forced = (index < config.init_blocks) | (index >= current - config.local_blocks)
    scores = jnp.where(forced, jnp.inf, scores)
    scores = jnp.where(index <= current, scores, -jnp.inf)
    best, ids = jax.lax.top_k(scores, min(blocks, config.selected_blocks))
    ids = jnp.sort(jnp.where(best > -jnp.inf, ids, blocks), axis=-1)
    ids = jnp.pad(ids, ((0, 0), (0, 0), (0, listed - ids.shape[-1])), constant_values=blocks)
    ids = jnp.where(ids == blocks, -1, ids)
    dense = ((positions + 1) < config.dense_len)[:, None, None]
    return jnp.where(dense, all_blocks(positions, scores.shape[1], listed, config), ids)


def all_blocks(positions: jax.Array, groups: int, listed: int, config: SparseConfig) -> jax.Array:
    """int32[R, G, listed]: the causal blocks of each query in order, -1 beyond; needs no scores."""
    index = jnp.arange(listed, dtype=jnp.int32)[None, :]
    current = jnp.where(positions >= 0, positions // config.block_size, -1)
    ids = jnp.where(index <= current[:, None], index, -1)
    return jnp.broadcast_to(ids[:, None, :], (positions.shape[0], groups, listed))


def _select_blocks(
    q: jax.Array,
    compressed: jax.Array,
    coarse: jax.Array,
    page_table: jax.Array,
    row_sequence: jax.Array,
    positions: jax.Array,
    config: SparseConfig,
    *,
    scale: float,
    tiled: bool = False,
) -> jax.Array:
    """The blocks that each query attends to.

    Args:
      q: [N, Hq, D] queries of a ragged batch; positions: int32[N]; row_sequence: int32[N].
      compressed: [pages, G, 4, D]; coarse: [pages, G, D]; page_table: int32[B, P].
      config: selection settings.
      scale: softmax scale.
      tiled: the rows come in tiles of 64 of one sequence each (a promise to implementations).

    Returns:
      int32[N, G, M] block ids per query and K/V head, ascending, -1 padded (see choose_blocks).
    """
    if not selects(page_table, config):
        listed = min(page_table.shape[1], config.max_listed_blocks)
        return all_blocks(positions, coarse.shape[1], listed, config)

    score = functools.partial(block_scores, block_size=config.block_size, scale=scale)

    def one(q, table, position):
        scores = score(q[None], compressed[table], coarse[table], position[None])
        return choose_blocks(scores, position[None], config)[0]

    return jax.vmap(one)(q, page_table[row_sequence], positions)


def _select_blocks_tiled(
    q, compressed, coarse, page_table, row_sequence, positions, config, *, scale, tiled=True
):
    """One tile at a time: its 64 queries share the gather of their sequence's compressed keys."""
    if not selects(page_table, config):
        return _select_blocks(q, compressed, coarse, page_table, row_sequence, positions, config, scale=scale)
    tiles = q.shape[0] // TILE
    score = functools.partial(block_scores, block_size=config.block_size, scale=scale)

    def one(tile):
        q, table, positions = tile
        scores = score(q, compressed[table], coarse[table], positions)
        return choose_blocks(scores, positions, config)

    per_tile = TILE * q.shape[1] * page_table.shape[1] * PER_BLOCK * 4
    ids = jax.lax.map(
        one,
        (
            q.reshape(tiles, TILE, *q.shape[1:]),
            page_table[row_sequence[::TILE]],
            positions.reshape(tiles, TILE),
        ),
        batch_size=tiles_at_once(tiles, per_tile),
    )
    return ids.reshape(tiles * TILE, *ids.shape[2:])


def _select_blocks_causal(
    q, compressed, coarse, page_table, row_sequence, positions, config, *, scale, tiled=True
):
    """For a CPU: as xla_tiled, but what a tile cannot see is skipped and the rest is walked in segments.

    Time follows the position instead of the page table, and scores stay in the cache. The normaliser is
    summed segment by segment, so from one segment on a longer page table changes no float.
    """
    if not selects(page_table, config):
        return _select_blocks(q, compressed, coarse, page_table, row_sequence, positions, config, scale=scale)
    tiles, blocks = q.shape[0] // TILE, page_table.shape[1]
    segment = min(_SEGMENT, blocks)
    score = functools.partial(_tile_scores, compressed, coarse, segment, config.block_size, scale)

    def one(tile):
        q, table, positions = tile
        return choose_blocks(score(q, table, positions)[..., :blocks], positions, config)

    # A map without batches: in a batch, segments could not be skipped.
    ids = jax.lax.map(
        one,
        (
            q.reshape(tiles, TILE, *q.shape[1:]),
            jnp.pad(page_table, ((0, 0), (0, -blocks % segment)))[row_sequence[::TILE]],
            positions.reshape(tiles, TILE),
        ),
    )
    return ids.reshape(tiles * TILE, *ids.shape[2:])


def _tile_scores(compressed, coarse, segment, block_size, scale, q, table, positions):
    """block_scores of one tile: q [64, Hq, D], table [P] of whole segments, positions int32[64]."""
    _, heads, width = q.shape
    groups, stride = coarse.shape[1], block_size // PER_BLOCK
    # Query heads of a group join the rows, so that scores are one plain matrix per group.
    q = jnp.moveaxis(q.reshape(TILE, groups, -1, width), 0, 1).reshape(groups, -1, width)
    last = jnp.max(positions)

    def walk(step, skipped, carry):
        """Scan of step(carry, pages, index of the first block) -> (carry, y) over the visible segments."""

        def one(carry, item):
            pages, first = item
            visible = first * block_size <= last
            return jax.lax.cond(visible, lambda: step(carry, pages, first), lambda: (carry, skipped))

        first = jnp.arange(0, table.shape[0], segment, dtype=jnp.int32)
        return jax.lax.scan(one, carry, (table.reshape(-1, segment), first))

    def per_row(seen):
        """bool[64, keys] -> bool[1, 64 * heads per group, keys]"""
        return jnp.repeat(seen, heads // groups, axis=0)[None]

    def normalise(carry, pages, first):
        top, total = carry
        index = first + jnp.arange(segment)
        seen = (((index + 1) * block_size - 1) <= positions[:, None]) & (index > 0)
        rough = einsum_f32("gmd,gbd->gmb", q, jnp.moveaxis(coarse[pages], 1, 0))
        rough = jnp.where(per_row(seen), scale * rough, -jnp.inf)
        new_top = jnp.maximum(top, jnp.max(rough, axis=-1, keepdims=True))
        base = jnp.where(jnp.isfinite(new_top), new_top, 0.0)
        shrink = jnp.exp(top - base)
        return (new_top, total * shrink + jnp.sum(jnp.exp(rough - base), axis=-1, keepdims=True)), None

    start = jnp.full((*q.shape[:2], 1), -jnp.inf, jnp.float32), jnp.zeros((*q.shape[:2], 1), jnp.float32)
    (top, total), _ = walk(normalise, None, start)
    top = jnp.where(jnp.isfinite(top), top, 0.0)
    total = jnp.where(total > 0, total, jnp.inf)

    def pool(carry, pages, first):
        entry = first * PER_BLOCK + jnp.arange(segment * PER_BLOCK)
        seen = (((entry + 1) * stride - 1) <= positions[:, None]) & (entry > 0)
        fine = jnp.moveaxis(compressed[pages], 1, 0).reshape(groups, -1, width)
        share = jnp.exp(scale * einsum_f32("gmd,ged->gme", q, fine) - top) / total
        share = jnp.where(per_row(seen), share, 0.0).reshape(groups, TILE, -1, segment * PER_BLOCK)
        summed = jnp.sum(share, axis=2).astype(q.dtype).astype(jnp.float32)
        summed = jnp.where(seen, summed, -jnp.inf).reshape(groups, TILE, segment, PER_BLOCK)
        return carry, (jnp.max(summed, axis=-1), summed[..., 0])

    nothing = jnp.full((groups, TILE, segment), -jnp.inf, jnp.float32)
    _, found = walk(pool, (nothing, nothing), None)
    # [segments, G, 64, segment] -> [64, G, P]
    own, first = (jnp.moveaxis(x, 0, 2).reshape(groups, TILE, -1).swapaxes(0, 1) for x in found)
    after = jnp.pad(first[..., 1:], ((0, 0), (0, 0), (0, 1)), constant_values=-jnp.inf)
    return jnp.maximum(own, after)


def selects(page_table: jax.Array, config: SparseConfig) -> bool:
    """Whether any query that fits this page table can have blocks left out."""
    blocks = page_table.shape[1]
    return blocks > config.selected_blocks and blocks * config.block_size >= config.dense_len


update_compressed = Op("update_compressed", _update_compressed)
select_blocks = Op("select_blocks", _select_blocks)
select_blocks.register(
    "xla_causal",
    _select_blocks_causal,
    platforms=("cpu",),
    supports=lambda *_, tiled=False, **__: tiled,
)
select_blocks.register("xla_tiled", _select_blocks_tiled, supports=lambda *_, tiled=False, **__: tiled)
