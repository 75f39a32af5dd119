"""The sparse mixer of Qwen4Exp (QSA): gated grouped-query attention over blocks chosen by an index."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from hybridjax.batch import Batch, IndexedPagedCache, Mode, Probe
from hybridjax.configs import Qwen4ExpConfig
from hybridjax.configs.qwen4_exp import PAGE_SIZE
from hybridjax.layers.linear import Initializer, Linear
from hybridjax.layers.norm import CenteredRMSNorm
from hybridjax.layers.paging import as_pages, row_pages, whole_page_table, write_rows
from hybridjax.ops import SharedBlocks, block_attention, gated, rotary, scatter, select_index_blocks


class IndexedAttention(nnx.Module):
    """qwen4_exp 5 and 6: QK norm, partial rotary, softmax over the selected blocks, sigmoid output gate.

    The projections share one matrix, in this order: q (per head D rows, then the head's D gate rows), k, v,
    and the index projection (Hi queries, then one key). With ``attention_bias``, in_bias [q | k | v rows] and
    o_bias [hidden]; the index projection has none. Index parameters get no gradient from the output: a choice
    of blocks has none. Their own loss is ops.index_loss of ``index_inputs``.
    """

    def __init__(self, config: Qwen4ExpConfig, *, init: Initializer, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.config = config
        hidden, width = config.hidden_size, config.head_dim
        heads, kv_width = config.num_attention_heads, config.num_key_value_heads * width
        sizes = (
            heads * 2 * width,
            kv_width,
            kv_width,
            (config.indexer_n_heads + 1) * config.indexer_head_dim,
        )
        self.in_proj = Linear(hidden, sizes, init=init, dtype=dtype, rngs=rngs, axes=("heads", "hidden"))
        self.o_proj = Linear(
            heads * width, hidden, init=init, dtype=dtype, rngs=rngs, axes=("hidden", "heads")
        )
        if config.attention_bias:
            self.in_bias = nnx.Param(jnp.zeros((sum(sizes[:3]),), dtype))
            self.o_bias = nnx.Param(jnp.zeros((hidden,), dtype))
        eps = config.rms_norm_eps
        self.q_norm = CenteredRMSNorm(width, eps=eps, dtype=dtype)
        self.k_norm = CenteredRMSNorm(width, eps=eps, dtype=dtype)
        self.index_q_norm = CenteredRMSNorm(config.indexer_head_dim, eps=eps, dtype=dtype)
        self.index_k_norm = CenteredRMSNorm(config.indexer_head_dim, eps=eps, dtype=dtype)

    def __call__(
        self,
        x: jax.Array,
        batch: Batch,
        cache: IndexedPagedCache | None,
        probe: Probe | None = None,
        *,
        shared: SharedBlocks | None = None,
    ) -> tuple[jax.Array, IndexedPagedCache | None]:
        """x [N, hidden] -> y [N, hidden] and the cache after the step (None in WHOLE mode).

        Args:
          shared: DECODE only: attend to this selection and the blocks after it, and write no index keys.
        """
        config = self.config
        if probe is not None:
            probe("attention_input", x)
        q, k, v, gate, index_q, index_k = self._project(x)
        rope = batch.positions if batch.rope_positions is None else batch.rope_positions
        q, k = (self._rotate(t, rope) for t in (self.q_norm(q), self.k_norm(k)))
        if batch.mode is Mode.WHOLE:
            # A choice of blocks has no gradient.
            index_keys = jax.lax.stop_gradient(self._index_keys(index_k, rope))
            keys, values = as_pages(k, PAGE_SIZE), as_pages(v, PAGE_SIZE)
            table = whole_page_table(batch.slot.shape[0], keys.shape[0])
            index_keys = index_keys.reshape(keys.shape[0], -1, index_keys.shape[-1])
        elif batch.mode in (Mode.PREFILL, Mode.DECODE):
            assert cache is not None
            cache = self._write(cache, k, v, batch)
            if shared is None:
                cache = self._write_index(cache, index_k, rope, batch)
            keys, values, table = cache.keys, cache.values, batch.page_table
            index_keys = cache.index_keys
        else:
            raise NotImplementedError(f"indexed attention in mode {batch.mode}")
        where = table, batch.row_sequence, batch.positions
        tiled = batch.mode is not Mode.DECODE
        ratio = config.indexer_compress_ratio
        if shared is None:
            index_q = jax.lax.stop_gradient(self._rotate(self.index_q_norm(index_q), rope))
            top_k = config.indexer_budget // ratio
            chosen = select_index_blocks(
                index_q, index_keys, *where, block_size=ratio, top_k=top_k, tiled=tiled
            )
        else:
            chosen = shared.at(batch.positions, ratio)
        if probe is not None:
            probe("block_ids", chosen)
        scale = config.head_dim**-0.5
        out = block_attention(q, keys, values, *where, chosen, scale=scale, block_size=ratio, tiled=tiled)
        out = self.o_proj(gated(out, gate).reshape(x.shape[0], -1))
        if config.attention_bias:
            out = out + self.o_bias[...]
        return out, cache

    def index_inputs(self, x: jax.Array, batch: Batch) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """What the indexer's loss compares, differentiable in the index parameters alone.

        Args:
          x: [N, hidden] the layer's input (probe "attention_input") in a WHOLE batch.
          batch: the batch.

        Returns:
          rotated q [N, Hq, D] and k [N, G, D], index queries [N, Hi, Di] and index keys [N / ratio, Di].
        """
        q, k, _, _, index_q, index_k = self._project(jax.lax.stop_gradient(x))
        rope = batch.positions if batch.rope_positions is None else batch.rope_positions
        q, k = (self._rotate(t, rope) for t in (self.q_norm(q), self.k_norm(k)))
        index_q = self._rotate(self.index_q_norm(index_q), rope)
        return *jax.lax.stop_gradient((q, k)), index_q, self._index_keys(index_k, rope)

    def _project(self, x):
        """q, k, v, gate [N, heads, D], index queries [N, Hi, Di] and raw index keys [N, Di]."""
        config = self.config
        width, index_width = config.head_dim, config.indexer_head_dim
        qg, k, v, index = self.in_proj.split(x)
        if config.attention_bias:
            bounds = [qg.shape[1], qg.shape[1] + k.shape[1]]
            qg, k, v = (t + b for t, b in zip((qg, k, v), jnp.split(self.in_bias[...], bounds), strict=True))
        q, gate = jnp.split(qg.reshape(-1, config.num_attention_heads, 2 * width), 2, axis=-1)
        k, v = (t.reshape(-1, config.num_key_value_heads, width) for t in (k, v))
        index = index.reshape(-1, config.indexer_n_heads + 1, index_width)
        return q, k, v, gate, index[:, :-1], index[:, -1]

    def _rotate(self, x, rope):
        parameters = self.config.rope_parameters
        return rotary(
            x,
            rope,
            theta=parameters.rope_theta,
            width=self.config.rotary_dim,
            sections=parameters.mrope_section,
        )

    def _compress(self, raw, rope):
        """Keys of complete blocks: raw [blocks, ratio, Di], rope of their first tokens -> [blocks, Di]."""
        mean = jnp.mean(raw.astype(jnp.float32), axis=1).astype(raw.dtype)
        return self._rotate(self.index_k_norm(mean)[:, None], rope)[:, 0]

    def _index_keys(self, raw, rope):
        """Keys of the blocks that tiled rows hold: raw [N, Di] -> [N / ratio, Di]."""
        ratio = self.config.indexer_compress_ratio
        return self._compress(raw.reshape(-1, ratio, raw.shape[-1]), rope[::ratio])

    def _write(self, cache: IndexedPagedCache, k, v, batch: Batch) -> IndexedPagedCache:
        page, column = row_pages(batch, cache.keys.shape[2])
        return dataclasses.replace(
            cache,
            keys=write_rows(cache.keys, page, column, k),
            values=write_rows(cache.values, page, column, v),
        )

    def _write_index(self, cache: IndexedPagedCache, raw, rope, batch: Batch) -> IndexedPagedCache:
        """Writes the keys of the blocks that the step completes, and what is known of those it begins.

        A compressed key is written once, from raw keys that are kept apart from it (qwen4_exp 12, 43).
        """
        ratio = self.config.indexer_compress_ratio
        positions, live = batch.positions, batch.positions >= 0
        page, column = row_pages(batch, cache.keys.shape[2])
        slot = batch.slot[batch.row_sequence]
        raw = raw.astype(cache.pending.dtype)
        ends = live & ((positions + 1) % ratio == 0)
        if batch.mode is Mode.PREFILL:
            # Tiles lie on the 64-grid, so the step holds every row of a block that it completes.
            ends = ends[ratio - 1 :: ratio]
            keys = self._index_keys(raw, rope)
            page, column = page[ratio - 1 :: ratio], column[ratio - 1 :: ratio]
            live = live & ~jnp.repeat(ends, ratio)
        pending = scatter.write_rows(cache.pending, live, raw, slot, positions % ratio)
        first = live & (positions % ratio == 0)
        triple = rope if rope.ndim == 2 else jnp.broadcast_to(rope[:, None], (rope.shape[0], 3))
        pending_rope = scatter.write_rows(cache.pending_rope, first, triple, slot)
        if batch.mode is Mode.DECODE:
            keys = self._compress(pending[slot], pending_rope[slot])
        index_keys = scatter.write_rows(cache.index_keys, ends, keys, page, column // ratio)
        return dataclasses.replace(cache, index_keys=index_keys, pending=pending, pending_rope=pending_rope)
