"""The n-gram embedding (PLE): hashed n-grams add to every residual stream, gated by what it holds."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from hybridjax.batch import Batch, NgramCache
from hybridjax.configs.qwen4_exp import Qwen4ExpConfig
from hybridjax.errors import ConfigError
from hybridjax.layers.linear import Embedding, Initializer, Linear
from hybridjax.layers.norm import CenteredRMSNorm
from hybridjax.ops.causal_conv import causal_conv
from hybridjax.ops.ngram_hash import NgramHash, ngram_rows, ngram_windows

_SMALLEST_GATE = 1e-6  # of |score|, before its square root


class MappedTable(nnx.Module):
    """A table whose rows stay as they are stored, in memory that the device reads in place.

    Args:
      codes: unsigned integers [rows, dim], see mapped_memory.MappedMemory.
      stored_dtype: what the codes are, unless ``values`` says.
      values: what each of 256 codes stands for, as unsigned integers of the width of ``dtype``.
      dtype: of the rows.
    """

    def __init__(self, codes: jax.Array, stored_dtype: Any, values: np.ndarray | None, dtype: jnp.dtype):
        self.codes = nnx.Param(codes)
        self.values = None if values is None else nnx.Param(jnp.asarray(values))
        self.stored_dtype, self.dtype = jnp.dtype(stored_dtype), jnp.dtype(dtype)

    def __call__(self, rows: jax.Array) -> jax.Array:
        """int32[...] -> [..., dim] in ``dtype``; the same bits as HostTable.gather."""
        codes = jnp.take(self.codes[...], rows, axis=0, mode="clip")
        if self.values is not None:
            return jax.lax.bitcast_convert_type(self.values[...][codes], self.dtype)
        return jax.lax.bitcast_convert_type(codes, self.stored_dtype).astype(self.dtype)


class NgramEmbedding(nnx.Module):
    """Keys and a value from the rows of a token's n-grams; streams ask, a short convolution follows.

    Source: qwen4_exp 8.3. Arithmetic in float32; what is named there is rounded to the model dtype.

    Args:
      config: the model's.
      ple_index: which PLE layer this is, counted from zero in order of depth; it decides the hash.
      with_table: whether the table is a parameter; otherwise every call brings the rows.
    """

    def __init__(
        self,
        config: Qwen4ExpConfig,
        ple_index: int,
        *,
        init: Initializer,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
        with_table: bool = True,
    ):
        hidden, embed = config.hidden_size, config.ple_embed_dim
        self.streams = config.hc_count
        width = self.streams * hidden
        self.hash = NgramHash.from_config(config, ple_index)
        self.key_proj = Linear(embed, width, init=init, dtype=dtype, rngs=rngs, axes=("streams", "ngram"))
        self.value_proj = Linear(embed, hidden, init=init, dtype=dtype, rngs=rngs, axes=("hidden", "ngram"))
        eps = config.rms_norm_eps
        self.norm_key = CenteredRMSNorm(width, eps=eps, dtype=dtype, groups=self.streams)
        self.norm_query = CenteredRMSNorm(width, eps=eps, dtype=dtype, groups=self.streams)
        self.norm_conv = CenteredRMSNorm(width, eps=eps, dtype=dtype, groups=self.streams)
        self.conv_weight = nnx.Param(jnp.zeros((width, 1, config.ple_conv_kernel_size), dtype))
        size, columns = self.hash.rows, embed // len(self.hash.head_sizes)
        table = Embedding(size, columns, init=init, dtype=dtype, rngs=rngs) if with_table else None
        self.table: Embedding | MappedTable | None = nnx.data(table)

    def __call__(
        self,
        streams: jax.Array,
        batch: Batch,
        cache: NgramCache | None,
        rows: jax.Array | None = None,
    ) -> tuple[jax.Array, NgramCache | None]:
        """What to add to the residual streams.

        Args:
          streams: [N, C * H] the residual streams.
          batch: WHOLE, PREFILL or DECODE.
          cache: None in WHOLE mode.
          rows: [N, E] the n-gram embeddings of the batch's tokens, gathered elsewhere.

        Returns:
          [N, C * H] in the model dtype, zeros on padding rows, and the cache after the step.

        Raises:
          ConfigError: neither a table nor rows.
        """
        windows, context = ngram_windows(batch.tokens, batch, cache.context if cache else None, self.hash)
        if rows is None:
            rows = self._look_up(windows)
        gated = self._gated_value(streams, rows.astype(streams.dtype))
        normed, weight, pool = self.norm_conv(gated), self.conv_weight[...], cache.conv if cache else None
        convolved, conv = causal_conv(normed, weight, batch, pool, dilation=self.hash.ngram_size)
        delta = gated.astype(jnp.float32) + jax.nn.silu(convolved)
        delta = jnp.where(batch.positions[:, None] >= 0, delta, 0).astype(streams.dtype)
        if conv is None or context is None:
            return delta, None
        return delta, NgramCache(conv, context)

    def _look_up(self, windows: jax.Array) -> jax.Array:
        if self.table is None:
            raise ConfigError("this n-gram embedding has no table: the call must bring Batch.ngram_rows")
        found = self.table(ngram_rows(windows, self.hash))
        return found.reshape(found.shape[0], -1)

    def _gated_value(self, streams: jax.Array, embedding: jax.Array) -> jax.Array:
        """U of qwen4_exp 8.3, [N, C * H]: the value, through one gate per stream."""
        n, c = streams.shape[0], self.streams
        key = self.norm_key(self.key_proj(embedding)).reshape(n, c, -1)
        query = self.norm_query(streams).reshape(n, c, -1)
        value = self.value_proj(embedding)
        score = jnp.sum(key.astype(jnp.float32) * query.astype(jnp.float32), axis=-1)
        score = score / math.sqrt(key.shape[-1])
        score = jnp.sign(score) * jnp.sqrt(jnp.maximum(jnp.abs(score), _SMALLEST_GATE))
        out = jax.nn.sigmoid(score)[:, :, None] * value.astype(jnp.float32)[:, None, :]
        return out.astype(streams.dtype).reshape(n, -1)
