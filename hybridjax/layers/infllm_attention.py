"""The sparse mixer of MiniCPM-SALA: grouped-query attention over InfLLM-v2 selected blocks."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from hybridjax.batch import Batch, Mode, PagedCache, Probe
from hybridjax.configs import MiniCPMSALAConfig, SparseConfig
from hybridjax.layers.linear import Initializer, Linear
from hybridjax.layers.paging import as_pages, row_pages, whole_page_table, write_rows
from hybridjax.ops import block_attention, gated, rotary, select_blocks, update_compressed
from hybridjax.ops.infllm import PER_BLOCK


class InfLLMAttention(nnx.Module):
    """minicpm_sala 3.1: no QK norm, no RoPE, block-sparse softmax attention, sigmoid output gate.

    The projections q, k, v and (with an output gate) o_gate share one matrix, in this order.
    """

    def __init__(self, config: MiniCPMSALAConfig, *, init: Initializer, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.config = config
        width = config.num_attention_heads * config.head_dim
        kv_width = config.num_key_value_heads * config.head_dim
        sizes = (width, kv_width, kv_width) + ((width,) if config.attn_use_output_gate else ())
        self.in_proj = Linear(
            config.hidden_size, sizes, init=init, dtype=dtype, rngs=rngs, axes=("heads", "hidden")
        )
        self.o_proj = Linear(
            width, config.hidden_size, init=init, dtype=dtype, rngs=rngs, axes=("hidden", "heads")
        )

    def __call__(
        self, x: jax.Array, batch: Batch, cache: PagedCache | None, probe: Probe | None = None
    ) -> tuple[jax.Array, PagedCache | None]:
        """x [N, hidden] -> y [N, hidden] and the cache after the step (None in WHOLE mode)."""
        config = self.config
        q, k, v, *gate = self.in_proj.split(x)
        q, k, v = (t.reshape(t.shape[0], -1, config.head_dim) for t in (q, k, v))
        if config.attn_use_rope:
            q, k = (rotary(t, batch.positions, theta=config.rope_theta) for t in (q, k))
        if batch.mode is Mode.WHOLE:
            pages, page_table = _whole_pages(k, v, batch, config.sparse_config.block_size)
        elif batch.mode in (Mode.PREFILL, Mode.DECODE):
            assert cache is not None
            pages, page_table = _write(cache, k, v, batch), batch.page_table
        else:
            raise NotImplementedError(f"InfLLM-v2 attention in mode {batch.mode}")
        out = self._attend(q, pages, page_table, batch, probe)
        if gate:
            out = gated(out, gate[0])
        return self.o_proj(out), None if batch.mode is Mode.WHOLE else pages

    def _attend(self, q, pages: PagedCache, page_table, batch: Batch, probe: Probe | None):
        scale = self.config.head_dim**-0.5
        tiled = batch.mode is not Mode.DECODE
        rows = batch.row_sequence
        # A choice of blocks has no gradient.
        chosen = select_blocks(
            jax.lax.stop_gradient(q),
            jax.lax.stop_gradient(pages.compressed),
            jax.lax.stop_gradient(pages.coarse),
            page_table,
            rows,
            batch.positions,
            self._sparse_config(batch),
            scale=scale,
            tiled=tiled,
        )
        if probe is not None:
            probe("block_ids", chosen)
        out = block_attention(
            q,
            pages.keys,
            pages.values,
            page_table,
            rows,
            batch.positions,
            chosen,
            scale=scale,
            tiled=tiled,
        )
        return out.reshape(out.shape[0], -1)

    def _sparse_config(self, batch: Batch) -> SparseConfig:
        """The selection settings; under the call rule the length of the call decides dense or sparse."""
        sparse = self.config.sparse_config
        if self.config.dense_switch == "position":
            return sparse
        if batch.mode is not Mode.WHOLE:
            raise NotImplementedError("dense_switch='call' exists for teacher-forced calls only")
        dense = batch.whole_length < sparse.dense_len
        return dataclasses.replace(sparse, dense_len=batch.whole_length + 1 if dense else 0)


def _whole_pages(k, v, batch: Batch, block: int) -> tuple[PagedCache, jax.Array]:
    """The step's own keys and values [B * L, G, D] as pages, and the identity page table."""
    sequences = batch.slot.shape[0]
    keys, values = as_pages(k, block), as_pages(v, block)
    pages, groups, _, width = keys.shape
    table = whole_page_table(sequences, pages)
    block_index = jnp.tile(jnp.arange(table.shape[1], dtype=jnp.int32), sequences)
    page = table.reshape(-1)
    last = jnp.max(jnp.where(batch.positions >= 0, batch.positions % block, -1).reshape(pages, block), axis=1)
    compressed, coarse = update_compressed(
        keys,
        jnp.zeros((pages, groups, PER_BLOCK, width), k.dtype),
        jnp.zeros((pages, groups, width), k.dtype),
        page,
        jnp.maximum(page - 1, 0),
        block_index,
        last,
    )
    return PagedCache(keys, values, compressed, coarse), table


def _write(cache: PagedCache, k, v, batch: Batch) -> PagedCache:
    """Writes the step's keys and values, then the compressed keys that they complete."""
    block = cache.keys.shape[2]
    page, column = row_pages(batch, block)
    keys = write_rows(cache.keys, page, column, k)
    values = write_rows(cache.values, page, column, v)
    index = jnp.maximum(batch.positions, 0) // block

    # One row per block that the step touches: its last one.
    if batch.mode is Mode.PREFILL:
        tiles = batch.tile_sequence.shape[0]
        newest = jnp.argmax(batch.positions.reshape(tiles, -1), axis=1)
        rows = jnp.arange(tiles) * (batch.tokens.shape[0] // tiles) + newest
    else:
        rows = jnp.arange(batch.tokens.shape[0])
    table = batch.page_table[batch.row_sequence[rows]]
    before = jnp.take_along_axis(table, jnp.maximum(index[rows] - 1, 0)[:, None], axis=1)[:, 0]
    last = jnp.where(batch.positions[rows] >= 0, column[rows], -1)
    compressed, coarse = update_compressed(
        keys, cache.compressed, cache.coarse, page[rows], before, index[rows], last
    )
    return PagedCache(keys, values, compressed, coarse)
