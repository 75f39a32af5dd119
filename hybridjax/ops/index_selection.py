"""QSA block selection: which blocks of ``ratio`` tokens each query attends to (qwen4_exp 6).

A block is visible once it is complete; its score is the sum over the index heads of relu(q . k). The
incomplete tail block is always listed, the query's own block only if it is incomplete or chosen.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from hybridjax.batch import TILE
from hybridjax.ops.dispatch import Op, einsum_f32, platform, tiles_at_once

_SEGMENT = 128  # pages whose blocks are scored together on a CPU


def index_scores(q: jax.Array, keys: jax.Array) -> jax.Array:
    """Scores of all blocks of one sequence: q [R, Hi, Di], keys [blocks, Di] -> float32[R, blocks], >= 0.

    The constant 1 / sqrt(Di) of the original changes no choice and is left out.
    """
    dots = einsum_f32("rhd,bd->rhb", q, keys)
    # Unlike maximum, this gives no negative zero, which a sort would rank below zero.
    return jnp.sum(jnp.where(dots > 0, dots, 0.0), axis=1)


def choose_by_sorting(scores: jax.Array, positions: jax.Array, *, block_size: int, top_k: int) -> jax.Array:
    """The listed blocks of each query from its scores; the definition.

    Args:
      scores: float32[R, blocks], >= 0; those of blocks that are not complete may be anything.
      positions: int32[R]; -1 lists nothing.
      block_size: tokens per block.
      top_k: how many complete blocks are listed at most. Ties go to the smaller id (decisions 3).

    Returns:
      int32[R, M] ids, ascending, -1 padded; M = min(blocks, top_k + 1).
    """
    blocks = scores.shape[-1]
    complete, tail = _visible(positions, block_size)
    scores = jnp.where(jnp.arange(blocks) < complete[:, None], scores, -1.0)
    best, ids = jax.lax.top_k(scores, min(top_k, blocks))
    ids = jnp.where(best >= 0, ids, blocks)
    last = jnp.where(tail, complete, blocks)[:, None]
    ids = jnp.sort(jnp.concatenate([ids, last], axis=-1), axis=-1)[:, : min(blocks, top_k + 1)]
    return jnp.where(ids < blocks, ids, -1)


def choose_by_threshold(scores: jax.Array, positions: jax.Array, *, block_size: int, top_k: int) -> jax.Array:
    """choose_by_sorting without a sort: finds the top_k-th score bit by bit, then compacts.

    Scores are >= 0, so their bit patterns are ordered as the scores are. Exact whatever the scores.
    """
    rows, blocks = scores.shape
    complete, tail = _visible(positions, block_size)
    index = jnp.arange(blocks, dtype=jnp.int32)
    visible = index < complete[:, None]
    bits = jnp.where(visible, jax.lax.bitcast_convert_type(scores, jnp.int32), -1)
    chosen = _largest(bits, top_k) | (tail[:, None] & (index == complete[:, None]))
    return _ids(chosen, min(blocks, top_k + 1))


def _largest(bits: jax.Array, count: int) -> jax.Array:
    """bool[R, n]: the ``count`` largest of each row of int32[R, n] that are >= 0; ties go to the front."""

    def settle(i, threshold):
        """Sets the next bit of the threshold if ``count`` stay at or above it."""
        candidate = threshold | (1 << (30 - i))
        enough = jnp.sum(bits >= candidate, axis=-1, keepdims=True, dtype=jnp.int32) >= count
        return jnp.where(enough, candidate, threshold)

    threshold = jax.lax.fori_loop(0, 31, settle, jnp.zeros((bits.shape[0], 1), jnp.int32))
    above, equal = bits > threshold, bits == threshold
    room = count - jnp.sum(above, axis=-1, keepdims=True, dtype=jnp.int32)
    return above | (equal & (jnp.cumsum(equal, axis=-1, dtype=jnp.int32) <= room))


def _ids(chosen: jax.Array, width: int) -> jax.Array:
    """The true places of bool[R, n], at most ``width`` each: int32[R, width], ascending, -1 padded."""
    count = jnp.cumsum(chosen, axis=-1, dtype=jnp.int32)
    # Entry j is the first place by which j + 1 are chosen.
    entry = jnp.arange(1, width + 1, dtype=jnp.int32)
    ids = jax.vmap(functools.partial(jnp.searchsorted, method="scan"), (0, None))(count, entry)
    return jnp.where(entry <= count[:, -1:], ids.astype(jnp.int32), -1)


def _visible(positions: jax.Array, block_size: int) -> tuple[jax.Array, jax.Array]:
    """int32[R] complete blocks at or before each position, and whether an incomplete one follows."""
    length = positions + 1
    return length // block_size, length % block_size != 0


def _select_index_blocks(
    q: jax.Array,
    index_keys: jax.Array,
    page_table: jax.Array,
    row_sequence: jax.Array,
    positions: jax.Array,
    *,
    block_size: int,
    top_k: int,
    tiled: bool = False,
) -> jax.Array:
    """The blocks that each query attends to: the best complete ones and the incomplete tail.

    Args:
      q: [N, Hi, Di] normalised and rotated index queries; row_sequence, positions: int32[N].
      index_keys: [pages, page / block_size, Di]; page_table: int32[B, P].
      block_size: tokens per block (the compress ratio).
      top_k: how many complete blocks a query may attend to.
      tiled: the rows come in tiles of 64 of one sequence each (a promise to implementations).

    Returns:
      int32[N, 1, M] block ids, ascending, -1 padded; M = min(blocks of the page table, top_k + 1). Ties go
      to the smaller id. A page table that holds at most top_k blocks lists all without scoring.
    """
    if not selects(index_keys, page_table, top_k):
        return _all_blocks(index_keys, page_table, positions, block_size)
    choose = functools.partial(choose_by_sorting, block_size=block_size, top_k=top_k)

    def one(q, table, position):
        return choose(index_scores(q[None], _flat(index_keys[table])), position[None])

    return jax.vmap(one)(q, page_table[row_sequence], positions)


def _select_index_blocks_mapped(
    choose: Callable[..., jax.Array],
    q: jax.Array,
    index_keys: jax.Array,
    page_table: jax.Array,
    row_sequence: jax.Array,
    positions: jax.Array,
    *,
    block_size: int,
    top_k: int,
    tiled: bool = False,
) -> jax.Array:
    """One tile at a time: its 64 queries share the gather of their sequence's index keys.

    Without tiles, one row at a time. What is worked on together is bounded by its scratch.
    """
    if not selects(index_keys, page_table, top_k):
        return _all_blocks(index_keys, page_table, positions, block_size)
    size = TILE if tiled else 1
    tiles = q.shape[0] // size
    choose = functools.partial(choose, block_size=block_size, top_k=top_k)

    def one(tile):
        q, table, positions = tile
        return choose(index_scores(q, _flat(index_keys[table])), positions)

    width = max(size * q.shape[1], q.shape[2])
    ids = jax.lax.map(
        one,
        (
            q.reshape(tiles, size, *q.shape[1:]),
            page_table[row_sequence[::size]],
            positions.reshape(tiles, size),
        ),
        batch_size=tiles_at_once(tiles, page_table.shape[1] * index_keys.shape[1] * width * 4),
    )
    return ids.reshape(tiles * size, 1, -1)


def _select_index_blocks_causal(
    q: jax.Array,
    index_keys: jax.Array,
    page_table: jax.Array,
    row_sequence: jax.Array,
    positions: jax.Array,
    *,
    block_size: int,
    top_k: int,
    tiled: bool = False,
) -> jax.Array:
    """For a CPU: as xla_threshold, but pages behind a tile are skipped, and pages are chosen before blocks.

    The best top_k blocks lie in the top_k pages with the best blocks (ties to the front in both), so all
    other pages need no more than their largest score. Exact whatever the scores.
    """
    tiles, pages, per_page = q.shape[0] // TILE, page_table.shape[1], index_keys.shape[1]
    if not selects(index_keys, page_table, top_k):
        return _all_blocks(index_keys, page_table, positions, block_size)
    segment = min(_SEGMENT, pages)
    width = min(pages * per_page, top_k + 1)

    def one(tile):
        q, table, positions = tile
        complete, tail = _visible(positions, block_size)
        last = jnp.max(complete)

        def step(_, item):
            pages, first = item

            def score():
                index = first * per_page + jnp.arange(segment * per_page)
                # Heads join the rows, so that scores are one plain matrix.
                dots = einsum_f32("md,bd->mb", q.reshape(-1, q.shape[-1]), _flat(index_keys[pages]))
                dots = dots.reshape(TILE, -1, segment * per_page)
                scores = jnp.sum(jnp.where(dots > 0, dots, 0.0), axis=1)
                bits = jax.lax.bitcast_convert_type(scores, jnp.int32)
                bits = jnp.where(index < complete[:, None], bits, -1).reshape(TILE, segment, per_page)
                return bits, jnp.max(bits, axis=-1)

            nothing = (
                jnp.full((TILE, segment, per_page), -1, jnp.int32),
                jnp.full((TILE, segment), -1, jnp.int32),
            )
            return None, jax.lax.cond(first * per_page < last, score, lambda: nothing)

        first = jnp.arange(0, table.shape[0], segment, dtype=jnp.int32)
        _, (bits, best) = jax.lax.scan(step, None, (table.reshape(-1, segment), first))
        best = jnp.moveaxis(best, 0, 1).reshape(TILE, -1)
        page = _ids(_largest(best, top_k), min(table.shape[0], top_k))
        bits = bits[page // segment, jnp.arange(TILE)[:, None], page % segment]
        bits = jnp.where(page[..., None] >= 0, bits, -1).reshape(TILE, -1)
        place = _ids(_largest(bits, top_k), width)
        ids = jnp.take_along_axis(page, jnp.maximum(place, 0) // per_page, axis=1) * per_page
        ids = jnp.where(place >= 0, ids + place % per_page, -1)
        # The tail is later than all complete blocks.
        end = jnp.sum(ids >= 0, axis=-1, keepdims=True)
        return jnp.where(tail[:, None] & (jnp.arange(width) == end), complete[:, None], ids)

    # A map without batches: in a batch, segments could not be skipped.
    ids = jax.lax.map(
        one,
        (
            q.reshape(tiles, TILE, *q.shape[1:]),
            jnp.pad(page_table, ((0, 0), (0, -pages % segment)))[row_sequence[::TILE]],
            positions.reshape(tiles, TILE),
        ),
    )
    return ids.reshape(tiles * TILE, 1, width)


def _flat(keys: jax.Array) -> jax.Array:
    """[P, per page, Di] -> [blocks, Di]."""
    return keys.reshape(-1, keys.shape[-1])


def _all_blocks(index_keys, page_table, positions, block_size) -> jax.Array:
    """int32[N, 1, blocks]: every block up to the query's own."""
    index = jnp.arange(page_table.shape[1] * index_keys.shape[1], dtype=jnp.int32)
    # -1 // block_size is -1: padding lists nothing.
    return jnp.where(index <= (positions // block_size)[:, None], index, -1)[:, None, :]


def selects(index_keys: jax.Array, page_table: jax.Array, top_k: int) -> bool:
    """Whether any query that fits this page table can have blocks left out."""
    return page_table.shape[1] * index_keys.shape[1] > top_k


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=("block_ids", "length"), meta_fields=("steps",)
)
@dataclasses.dataclass(frozen=True)
class SharedBlocks:
    """A selection made by one row of each sequence, for rows that follow it closely (qwen4_exp 10).

    Fields:
      block_ids: int32[N, 1, M] what select_index_blocks gave for that row.
      length: int32[N] tokens up to and including that row.
      steps: the most tokens from there to the rows that use it; static.
    """

    block_ids: jax.Array
    length: jax.Array
    steps: int

    def at(self, positions: jax.Array, block_size: int) -> jax.Array:
        """The blocks of rows at int32[N] positions: those of the row, and all that hold later tokens.

        Returns:
          int32[N, 1, M + E] ascending, -1 padded, with E blocks for ``steps`` tokens.
        """
        ids = self.block_ids[:, 0]
        rows, width = ids.shape
        extra = -(-self.steps // block_size)
        # The incomplete block of the row itself is listed already.
        later = -(-self.length // block_size)[:, None] + jnp.arange(extra, dtype=jnp.int32)
        later = jnp.where(later <= (positions // block_size)[:, None], later, -1)
        column = jnp.sum(ids >= 0, axis=-1, keepdims=True) + jnp.arange(extra)
        ids = jnp.pad(ids, ((0, 0), (0, extra)), constant_values=-1)
        ids = ids.at[jnp.arange(rows)[:, None], column].set(later)
        return jnp.where((positions >= 0)[:, None], ids, -1)[:, None]


select_index_blocks = Op("select_index_blocks", _select_index_blocks)


def _searching_pays(*_, tiled=False, **__) -> bool:
    """Not for single rows on a GPU: 31 rounds of small kernels took ten times as long as one sort.

    Measured: benchmarks/results/h200_qwen4_exp_layers.txt.
    """
    return tiled or platform() != "gpu"


select_index_blocks.register(
    "xla_causal",
    _select_index_blocks_causal,
    platforms=("cpu",),
    supports=lambda *_, tiled=False, **__: tiled,
)
select_index_blocks.register(
    "xla_threshold",
    functools.partial(_select_index_blocks_mapped, choose_by_threshold),
    supports=_searching_pays,
)
select_index_blocks.register(
    "xla_tiled",
    functools.partial(_select_index_blocks_mapped, choose_by_sorting),
    supports=lambda *_, tiled=False, **__: tiled,
)
