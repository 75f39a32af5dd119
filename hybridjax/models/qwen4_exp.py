"""Qwen3.8-Flash-Next (Qwen4Exp): Gated DeltaNet and indexed attention over four residual streams, a
mixture of experts after each, n-gram embeddings on the way, and an MTP head."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from hybridjax.batch import (
    Batch,
    GatedDeltaCache,
    IndexedPagedCache,
    LayerCache,
    NgramCache,
    Probe,
    State,
)
from hybridjax.configs import Qwen4ExpConfig
from hybridjax.configs.qwen4_exp import INDEXED, PAGE_SIZE
from hybridjax.layers import (
    CenteredRMSNorm,
    Embedding,
    GatedDeltaNet,
    GatedResidual,
    IndexedAttention,
    Linear,
    MappedTable,
    NgramEmbedding,
    SparseMoE,
)
from hybridjax.models import qwen4_exp_training
from hybridjax.models.base import StateSize, TensorEntry
from hybridjax.models.common import checked_ids, prefixed, rematerialised, state_size
from hybridjax.models.qwen4_exp_entries import checkpoint_entries
from hybridjax.ops.index_selection import SharedBlocks
from hybridjax.ops.ngram_hash import NgramHash

_FLOAT32 = jnp.dtype(jnp.float32)


def _residual(config: Qwen4ExpConfig, *, inject: bool = True, **kwargs) -> GatedResidual:
    return GatedResidual(
        config.hidden_size,
        config.hc_count,
        config.hc_lowrank,
        eps=config.rms_norm_eps,
        inject=inject,
        **kwargs,
    )


class DecoderLayer(nnx.Module):
    """A mixer and a mixture of experts, each between a mix of the streams and a combine."""

    def __init__(
        self,
        config: Qwen4ExpConfig,
        kind: str,
        ple: NgramEmbedding | None = None,
        *,
        init,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
    ):
        shared: dict[str, Any] = {"init": init, "dtype": dtype, "rngs": rngs}
        mixer = IndexedAttention if kind == INDEXED else GatedDeltaNet
        self.attn_mix = _residual(config, **shared)
        self.mixer = mixer(config, **shared)
        self.mlp_mix = _residual(config, **shared)
        self.mlp = SparseMoE(config, **shared)
        self.ple = ple

    def __call__(
        self,
        streams: jax.Array,
        batch: Batch,
        cache: LayerCache | None,
        probe: Probe | None = None,
        **mixer_options: Any,
    ) -> tuple[jax.Array, LayerCache | None]:
        """streams [N, C * H] -> streams [N, C * H] and the layer's cache after the step."""
        x, normed = self.attn_mix.mix(streams)
        y, cache = self.mixer(x, batch, cache, probe, **mixer_options)  # pyright: ignore[reportArgumentType]
        streams = self.attn_mix.combine(streams, normed, y)
        x, normed = self.mlp_mix.mix(streams)
        streams = self.mlp_mix.combine(streams, normed, self.mlp(x, batch, probe))
        return streams, cache

    def add_ngrams(
        self, streams: jax.Array, batch: Batch, cache: NgramCache | None, rows: jax.Array | None = None
    ) -> tuple[jax.Array, NgramCache | None]:
        """What reaches a layer with an n-gram embedding, and that one's cache; see ``NgramEmbedding``."""
        assert self.ple is not None
        delta, cache = self.ple(streams, batch, cache, rows)
        return streams + delta, cache

    def whole(self, streams: jax.Array, batch: Batch, ngram_rows: jax.Array | None = None) -> jax.Array:
        """The layer on its own in a WHOLE batch, its n-gram embedding first: streams -> streams."""
        if self.ple is not None:
            streams, _ = self.add_ngrams(streams, batch, None, ngram_rows)
        return self(streams, batch, None)[0]


class MTPHead(nnx.Module):
    """The draft layer (qwen4_exp 10): one indexed-attention layer over the trunk's streams and the next
    token. Embedding and lm_head are the trunk's."""

    def __init__(self, config: Qwen4ExpConfig, *, init, dtype: jnp.dtype, rngs: nnx.Rngs):
        shared: dict[str, Any] = {"init": init, "dtype": dtype, "rngs": rngs}
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.streams = config.hc_count
        self.fc_embedding = Linear(hidden, hidden, **shared)
        self.fc_hidden = Linear(hidden, hidden, **shared)
        self.norm_embedding = CenteredRMSNorm(hidden, eps=eps, dtype=dtype)
        # One norm over all streams at once, unlike every other norm of streams.
        self.norm_hidden = CenteredRMSNorm(config.hc_count * hidden, eps=eps, dtype=dtype)
        self.layer = DecoderLayer(config, INDEXED, **shared)
        self.mix = _residual(config, inject=False, **shared)

    def __call__(
        self,
        embedded: jax.Array,
        streams: jax.Array,
        batch: Batch,
        cache: IndexedPagedCache | None,
        probe: Probe | None = None,
        shared: SharedBlocks | None = None,
    ) -> tuple[jax.Array, LayerCache | None]:
        """embedded [N, H] of the newly known tokens, streams [N, C * H] -> streams and the cache."""
        rows = streams.shape[0]
        known = self.fc_embedding(self.norm_embedding(embedded))
        before = self.fc_hidden(self.norm_hidden(streams).reshape(rows, self.streams, -1))
        streams = (before + known[:, None, :]).reshape(rows, -1)
        return self.layer(streams, batch, cache, probe, shared=shared)


class Qwen4Exp(nnx.Module):
    """The text model (qwen4_exp 3).

    Args:
      config: the architecture.
      dtype: of parameters and activations; recurrent states, A_log and dt_bias are float32 whatever it is.
      rngs: for random initialisation.
      ngram_table: "device": the n-gram tables are parameters; "host": they are not part of the model, and
        every batch brings ``ngram_rows``.

    Attributes:
      remat: recompute each layer in the backward pass of a teacher-forced call.
      host_tables: with ngram_table="host", the tables (host_table.HostTable), one per PLE layer; set by
        the loader.
    """

    prefix = "model."
    float32_parameters = ("A_log", "dt_bias")

    def __init__(
        self,
        config: Qwen4ExpConfig,
        *,
        dtype: jnp.dtype = jnp.bfloat16,
        rngs: nnx.Rngs,
        ngram_table: str = "device",
    ):
        self.config = config
        self.dtype = jnp.dtype(dtype)
        self.remat = False
        self.ngram_table = ngram_table
        self.host_tables = None
        text = self.text_config
        init = nnx.initializers.normal(text.initializer_range)
        shared: dict[str, Any] = {"init": init, "dtype": self.dtype, "rngs": rngs}
        self.embed_tokens = Embedding(text.vocab_size, text.hidden_size, **shared)
        with_table = ngram_table == "device"
        ngrams = {
            index: NgramEmbedding(text, number, with_table=with_table, **shared)
            for number, index in enumerate(text.ple_layers)
        }
        layers = [
            DecoderLayer(text, kind, ngrams.get(i), **shared) for i, kind in enumerate(text.layer_types)
        ]
        self.layers = nnx.List(layers)
        self.final_mix = _residual(text, inject=False, **shared)
        if not text.tie_word_embeddings:
            self.lm_head = Linear(text.hidden_size, text.vocab_size, axes=("vocab", "hidden"), **shared)
        if text.mtp_num_hidden_layers:
            self.mtp = MTPHead(text, **shared)

    @property
    def text_config(self) -> Qwen4ExpConfig:
        """The configuration of the text model, also where images come with it."""
        return self.config

    def __call__(self, input_ids: jax.Array, probe: Probe | None = None) -> jax.Array:
        """Teacher-forced logits: int32[B, L] -> float32[B, L, vocab]; differentiable.

        Raises:
          ValueError: another shape or dtype, nothing to compute, or ids outside the vocabulary (where
            their values are known, that is outside jit).
        """
        input_ids = checked_ids(input_ids, self.text_config.vocab_size)
        streams, _ = self.forward(Batch.whole(input_ids), None, probe)
        return self.logits(unpadded(streams, input_ids))

    def forward(
        self, batch: Batch, state: State | None, probe: Probe | None = None
    ) -> tuple[jax.Array, State | None]:
        """Residual streams [N, C * H] of every row before the final mix, and the state after the step.

        The probe sees ``layers.{i}.hidden`` (the streams before the layer), what its parts show under
        ``layers.{i}.`` (see there), and ``hidden`` (the result).
        """
        streams, state = self.run_layers(self.embed(batch), batch, state, probe)
        if probe is not None:
            probe("hidden", streams)
        return streams, state

    def embed(self, batch: Batch) -> jax.Array:
        """Streams [N, C * H] before the first layer: token embeddings or image features, C times."""
        x = self.embed_tokens(batch.tokens)
        if batch.features is not None and batch.feature_index is not None:
            chosen = batch.features[jnp.maximum(batch.feature_index, 0)].astype(x.dtype)
            x = jnp.where(batch.feature_index[:, None] >= 0, chosen, x)
        return jnp.tile(x, (1, self.text_config.hc_count))

    @property
    def ngram_hashes(self) -> tuple[NgramHash, ...]:
        """The hash of each PLE layer, in order of depth."""
        return tuple(ple.hash for ple in self._ples())

    def _ples(self) -> list[NgramEmbedding]:
        """The n-gram embeddings in order of depth."""
        return [layer.ple for layer in self.layers if layer.ple is not None]

    def use_tables(self, tables: Sequence[MappedTable]) -> None:
        """Gives each PLE layer a table that the device reads in place of ``host_tables``."""
        for ple, table in zip(self._ples(), tables, strict=True):
            ple.table = table
        self.ngram_table, self.host_tables = "mapped", None

    @property
    def layers_before_ngrams(self) -> int:
        """Layers that can run before any n-gram row is needed."""
        return min(self.text_config.ple_layers, default=len(self.layers))

    def uses(self, path: Sequence[Any], start: int, stop: int) -> bool:
        """Whether layers start .. stop - 1 use the parameter at this path.

        The embedding belongs to the first layer, the final mix and lm_head to the last.
        """
        ends = stop == len(self.layers)
        match path[0]:
            case "layers":
                return start <= path[1] < stop
            case "embed_tokens":
                return start == 0 or (ends and self.text_config.tie_word_embeddings)
            case name:
                return ends and name in ("final_mix", "lm_head")

    def caches_of(self, start: int, stop: int) -> tuple[int, ...]:
        """Indices in a state of the caches that layers start .. stop - 1 use."""
        ngrams = (
            len(self.layers) + n for n, i in enumerate(self.text_config.ple_layers) if start <= i < stop
        )
        return (*range(start, stop), *ngrams)

    def run_layers(
        self,
        streams: jax.Array,
        batch: Batch,
        state: State | None,
        probe: Probe | None = None,
        *,
        start: int = 0,
        stop: int | None = None,
    ) -> tuple[jax.Array, State | None]:
        """Runs layers start .. stop - 1; the state of all others comes back unchanged.

        A state holds the layers' caches and after them those of the PLE layers, in order.
        """
        text = self.text_config
        count = len(self.layers)
        caches: list[Any] | None = None if state is None else list(state)
        for i in range(start, count if stop is None else stop):
            layer = self.layers[i]
            if probe is not None:
                probe(f"layers.{i}.hidden", streams)
            if layer.ple is not None:
                number = text.ple_layers.index(i)
                rows = None if batch.ngram_rows is None else batch.ngram_rows[number]
                cache = None if caches is None else caches[count + number]
                streams, cache = layer.add_ngrams(streams, batch, cache, rows)
                if caches is not None:
                    caches[count + number] = cache
            inner = prefixed(probe, f"layers.{i}.")
            if self.remat and caches is None:
                probed = inner is not None
                streams, seen = rematerialised(
                    lambda layer, x, probed=probed: _probed_layer(layer, x, batch, probed), layer, streams
                )
                if inner is not None:
                    for name, value in seen.items():
                        inner(name, value)
            else:
                streams, cache = layer(streams, batch, None if caches is None else caches[i], inner)
                if caches is not None:
                    caches[i] = cache
        return streams, None if caches is None else tuple(caches)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """float32[..., vocab] from residual streams [..., C * H]."""
        return self._head(self.final_mix, hidden)

    def draft(
        self,
        batch: Batch,
        streams: jax.Array,
        cache: IndexedPagedCache | None,
        probe: Probe | None = None,
        shared: SharedBlocks | None = None,
    ) -> tuple[jax.Array, LayerCache | None]:
        """One step of the MTP head (qwen4_exp 10).

        Args:
          batch: row t holds the token at position t + 1 and the position t.
          streams: [N, C * H] of the trunk at position t (before its final mix), or of the last draft step.
          cache: of the head's own layer (``init_draft_cache``), None in WHOLE mode.
          shared: the selected blocks of an earlier row, to be used instead of selecting (IndexShare);
            see IndexedAttention.

        Returns:
          streams [N, C * H], for ``draft_logits`` and the next draft step, and the cache.
        """
        embedded = self.embed_tokens(batch.tokens)
        return self.mtp(embedded, streams, batch, cache, prefixed(probe, "mtp."), shared)

    def draft_logits(self, streams: jax.Array) -> jax.Array:
        """float32[..., vocab] of the token at position t + 2, from the streams of ``draft``."""
        return self._head(self.mtp.mix, streams)

    @property
    def training_loss_names(self) -> tuple[str, ...]:
        """Names of the losses that ``training_losses`` gives."""
        return qwen4_exp_training.loss_names(self.text_config)

    def training_losses(
        self, input_ids: jax.Array, targets: jax.Array, mask: jax.Array
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Teacher-forced logits and what is trained beside them; see qwen4_exp_training."""
        return qwen4_exp_training.training_losses(self, input_ids, targets, mask)

    def _head(self, mix: GatedResidual, streams: jax.Array) -> jax.Array:
        flat = streams.reshape(-1, streams.shape[-1])
        x, _ = mix.mix(flat)
        head = self.embed_tokens if self.text_config.tie_word_embeddings else self.lm_head
        out = head.weight.matmul(x, _FLOAT32)
        return out.reshape(*streams.shape[:-1], out.shape[-1])

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return PAGE_SIZE

    def state_size(self) -> StateSize:
        """Bytes of sequence state per page and per slot, over all layers."""
        return state_size(self.init_state)

    def init_state(self, num_pages: int, num_slots: int) -> State:
        """Zeroed caches; page 0 and slot 0 belong to nobody."""
        text = self.text_config
        heads, keys = text.linear_num_value_heads, text.linear_num_key_heads
        d_key, d_value = text.linear_key_head_dim, text.linear_value_head_dim
        channels = 2 * keys * d_key + heads * d_value

        def cache(kind: str) -> LayerCache:
            if kind == INDEXED:
                return self.init_draft_cache(num_pages, num_slots)
            conv = (num_slots, text.linear_conv_kernel_dim - 1, channels)
            return GatedDeltaCache(
                jnp.zeros((num_slots, heads, d_key, d_value), jnp.float32), jnp.zeros(conv, self.dtype)
            )

        reach = (text.ple_conv_kernel_size - 1) * text.ngram_size
        width = text.hc_count * text.hidden_size
        layers = [cache(kind) for kind in text.layer_types]
        ngrams = [
            NgramCache(
                jnp.zeros((num_slots, reach, width), self.dtype),
                jnp.zeros((num_slots, text.ngram_size - 1), jnp.int32),
            )
            for _ in text.ple_layers
        ]
        return (*layers, *ngrams)

    def init_draft_cache(self, num_pages: int, num_slots: int) -> IndexedPagedCache:
        """The zeroed cache of one indexed-attention layer, such as the MTP head's."""
        text = self.text_config
        paged = (num_pages, text.num_key_value_heads, PAGE_SIZE, text.head_dim)
        ratio, width = text.indexer_compress_ratio, text.indexer_head_dim
        return IndexedPagedCache(
            keys=jnp.zeros(paged, self.dtype),
            values=jnp.zeros(paged, self.dtype),
            index_keys=jnp.zeros((num_pages, PAGE_SIZE // ratio, width), self.dtype),
            pending=jnp.zeros((num_slots, ratio, width), self.dtype),
            pending_rope=jnp.zeros((num_slots, 3), jnp.int32),
        )

    @classmethod
    def checkpoint_entries(
        cls, config: Qwen4ExpConfig, names: Mapping[str, tuple[int, ...]] | None = None
    ) -> tuple[TensorEntry, ...]:
        """Every tensor of a checkpoint of this configuration (qwen4_exp 2).

        Args:
          config: the architecture.
          names: the tensors that a checkpoint has, with their shapes; they decide between released variants
            of the layout. None: the layout that is saved.
        """
        return tuple(checkpoint_entries(config, cls.prefix, names))

    def checkpoint_constants(self) -> dict[str, np.ndarray]:
        """int64 buffers that a checkpoint holds beside its parameters: the n-gram hashes."""
        out = {}
        for index, hash in zip(self.text_config.ple_layers, self.ngram_hashes):
            name = f"{self.prefix}layers.{index}.ple.ple_embedding."
            out[name + "layer_multipliers"] = np.asarray(hash.multipliers, np.int64)
            out[name + "ngram_heads_vocab_sizes"] = np.asarray(hash.head_sizes, np.int64)
            out[name + "ngram_heads_offsets"] = np.asarray(hash.head_offsets, np.int64)
        return out

    def set_checkpoint_constants(self, constants: Mapping[str, np.ndarray]) -> None:
        """Takes over hash constants under the names of ``checkpoint_constants``."""
        for index, ple in zip(self.text_config.ple_layers, self._ples()):
            name = f"{self.prefix}layers.{index}.ple.ple_embedding."
            ple.hash = dataclasses.replace(
                ple.hash,
                multipliers=tuple(constants[name + "layer_multipliers"].tolist()),
                head_sizes=tuple(constants[name + "ngram_heads_vocab_sizes"].tolist()),
                head_offsets=tuple(constants[name + "ngram_heads_offsets"].tolist()),
            )


def unpadded(rows: jax.Array, input_ids: jax.Array) -> jax.Array:
    """Rows [N, D] of a WHOLE batch as [B, L, D], without the padding to tiles."""
    sequences, length = input_ids.shape
    return rows.reshape(sequences, -1, rows.shape[-1])[:, :length]


def _probed_layer(layer: DecoderLayer, streams, batch, probed: bool):
    """A layer with what a probe would see as a value: under remat nothing may leave by another way."""
    seen: dict[str, jax.Array] = {}
    streams, _ = layer(streams, batch, None, seen.__setitem__ if probed else None)
    return streams, seen
