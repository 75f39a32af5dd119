"""MiniCPM-SALA: InfLLM-v2 sparse attention and SimpleGLA linear attention with muP scalings."""

from collections.abc import Iterator, Mapping

import jax
import jax.numpy as jnp
from flax import nnx

from hybridjax.batch import Batch, LayerCache, PagedCache, Probe, RecurrentCache, State
from hybridjax.configs import MiniCPMSALAConfig
from hybridjax.configs.minicpm_sala import SPARSE
from hybridjax.layers import Embedding, InfLLMAttention, LightningAttention, Linear, RMSNorm, SwiGLU
from hybridjax.models.base import Path, StateSize, TensorEntry
from hybridjax.models.common import checked_ids, prefixed, rematerialised, state_size
from hybridjax.ops.infllm import PER_BLOCK


class DecoderLayer(nnx.Module):
    """h += r * mixer(norm(h)); h += r * mlp(norm(h)), r = scale_depth / sqrt(layers)."""

    def __init__(self, config: MiniCPMSALAConfig, kind: str, *, init, dtype: jnp.dtype, rngs: nnx.Rngs):
        mixer = InfLLMAttention if kind == SPARSE else LightningAttention
        self.input_norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, dtype=dtype)
        self.mixer = mixer(config, init=init, dtype=dtype, rngs=rngs)
        self.mlp_norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, dtype=dtype)
        self.mlp = SwiGLU(config.hidden_size, config.intermediate_size, init=init, dtype=dtype, rngs=rngs)
        self.residual_scale = config.residual_scale

    def __call__(
        self, h: jax.Array, batch: Batch, cache: LayerCache | None, probe: Probe | None = None
    ) -> tuple[jax.Array, LayerCache | None]:
        """h [N, hidden] -> h [N, hidden] and the layer's cache after the step."""
        mixed, cache = self.mixer(self.input_norm(h), batch, cache, probe)  # pyright: ignore[reportArgumentType]
        h = h + mixed * self.residual_scale
        h = h + self.mlp(self.mlp_norm(h)) * self.residual_scale
        return h, cache

    def whole(self, h: jax.Array, batch: Batch, ngram_rows: None = None) -> jax.Array:
        """The layer on its own in a WHOLE batch: h [N, hidden] -> h [N, hidden]."""
        return self(h, batch, None)[0]


class MiniCPMSALA(nnx.Module):
    """The language model (minicpm_sala 1.4).

    Args:
      config: the architecture.
      dtype: of all parameters and activations; recurrent states are float32 whatever it is.
      rngs: for random initialisation.

    Attributes:
      remat: recompute each layer in the backward pass of a teacher-forced call.
    """

    def __init__(self, config: MiniCPMSALAConfig, *, dtype: jnp.dtype = jnp.bfloat16, rngs: nnx.Rngs):
        self.config = config
        self.dtype = jnp.dtype(dtype)
        self.remat = False
        # muP: matrices shrink with width, the embedding does not.
        base = config.initializer_range
        init = nnx.initializers.normal(base / config.logit_divisor**0.5)
        table = nnx.initializers.normal(base)
        self.embed_tokens = Embedding(
            config.vocab_size, config.hidden_size, init=table, dtype=dtype, rngs=rngs
        )
        self.layers = nnx.List(
            [DecoderLayer(config, kind, init=init, dtype=dtype, rngs=rngs) for kind in config.mixer_types]
        )
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, dtype=dtype)
        if not config.tie_word_embeddings:
            self.lm_head = Linear(
                config.hidden_size,
                config.vocab_size,
                init=table,
                dtype=dtype,
                rngs=rngs,
                axes=("vocab", "hidden"),
            )

    def __call__(self, input_ids: jax.Array, probe: Probe | None = None) -> jax.Array:
        """Teacher-forced logits: int32[B, L] -> float32[B, L, vocab]; differentiable.

        Raises:
          ValueError: another shape or dtype, nothing to compute, or ids outside the vocabulary (where
            their values are known, that is outside jit).
        """
        input_ids = checked_ids(input_ids, self.config.vocab_size)
        length = input_ids.shape[1]
        hidden, _ = self.forward(Batch.whole(input_ids), None, probe)
        hidden = hidden.reshape(input_ids.shape[0], -1, hidden.shape[-1])[:, :length]
        return self.logits(hidden)

    def forward(
        self, batch: Batch, state: State | None, probe: Probe | None = None
    ) -> tuple[jax.Array, State | None]:
        """Hidden states [N, hidden] of every row (before the final norm) and the state after the step.

        The probe sees ``layers.{i}.hidden`` (the layer's input), ``layers.{i}.state`` (linear layers in
        WHOLE mode), ``layers.{i}.block_ids`` (sparse layers) and ``hidden`` (the result).
        """
        h = self.embed(batch)
        caches: list[LayerCache | None] = []
        for i, layer in enumerate(self.layers):
            inner = None
            if probe is not None:
                probe(f"layers.{i}.hidden", h)
                inner = prefixed(probe, f"layers.{i}.")
            if self.remat and state is None:
                h, cache = rematerialised(lambda layer, h: layer(h, batch, None), layer, h)
            else:
                h, cache = layer(h, batch, None if state is None else state[i], inner)
            caches.append(cache)
        if probe is not None:
            probe("hidden", h)
        return h, None if state is None else tuple(c for c in caches if c is not None)

    def embed(self, batch: Batch) -> jax.Array:
        """Hidden states [N, hidden] before the first layer."""
        return self.embed_tokens(batch.tokens) * self.config.scale_emb

    def logits(self, hidden: jax.Array) -> jax.Array:
        """float32[..., vocab] from hidden states [..., hidden].

        The released code multiplies in bfloat16 and then widens; products are kept in float32 here.
        """
        x = self.norm(hidden) * (1.0 / self.config.logit_divisor)
        head = self.embed_tokens if self.config.tie_word_embeddings else self.lm_head
        return head.weight.matmul(x, jnp.dtype(jnp.float32))

    @property
    def page_size(self) -> int:
        """Tokens per page: one sparse block."""
        return self.config.sparse_config.block_size

    def state_size(self) -> StateSize:
        """Bytes of sequence state per page and per slot, over all layers."""
        return state_size(self.init_state)

    def init_state(self, num_pages: int, num_slots: int) -> State:
        """Zeroed caches; page 0 and slot 0 belong to nobody."""
        config = self.config
        paged = (num_pages, config.num_key_value_heads, self.page_size, config.head_dim)
        few = (num_pages, config.num_key_value_heads, PER_BLOCK, config.head_dim)
        width = config.lightning_head_dim
        recurrent = (num_slots, config.lightning_nh, width, width)

        def cache(kind: str) -> LayerCache:
            if kind != SPARSE:
                return RecurrentCache(jnp.zeros(recurrent, jnp.float32))
            keys, values = jnp.zeros(paged, self.dtype), jnp.zeros(paged, self.dtype)
            coarse = jnp.zeros((*few[:2], few[3]), self.dtype)
            return PagedCache(keys, values, jnp.zeros(few, self.dtype), coarse)

        return tuple(cache(kind) for kind in config.mixer_types)

    @classmethod
    def checkpoint_entries(
        cls, config: MiniCPMSALAConfig, names: Mapping[str, tuple[int, ...]] | None = None
    ) -> tuple[TensorEntry, ...]:
        """Every tensor of a checkpoint of this configuration (minicpm_sala 1.3); there is one layout."""
        return tuple(_entries(config))


def _entries(config: MiniCPMSALAConfig) -> Iterator[TensorEntry]:
    hidden, ffn = config.hidden_size, config.intermediate_size
    yield TensorEntry(
        "model.embed_tokens.weight", (config.vocab_size, hidden), ("embed_tokens", "weight", "value")
    )
    for i, kind in enumerate(config.mixer_types):
        name, path = f"model.layers.{i}.", ("layers", i)
        yield TensorEntry(name + "input_layernorm.weight", (hidden,), (*path, "input_norm", "weight"))
        yield from _mixer_entries(config, kind, name + "self_attn.", (*path, "mixer"))
        yield TensorEntry(name + "post_attention_layernorm.weight", (hidden,), (*path, "mlp_norm", "weight"))
        fused = (*path, "mlp", "gate_up", "weight", "value")
        yield from _fused(name + "mlp.", {"gate_proj": ffn, "up_proj": ffn}, hidden, fused)
        yield TensorEntry(
            name + "mlp.down_proj.weight", (hidden, ffn), (*path, "mlp", "down", "weight", "value")
        )
    yield TensorEntry("model.norm.weight", (hidden,), ("norm", "weight"))
    if not config.tie_word_embeddings:
        yield TensorEntry("lm_head.weight", (config.vocab_size, hidden), ("lm_head", "weight", "value"))


def _mixer_entries(config: MiniCPMSALAConfig, kind: str, name: str, path: Path) -> Iterator[TensorEntry]:
    hidden = config.hidden_size
    if kind == SPARSE:
        width = config.num_attention_heads * config.head_dim
        kv_width = config.num_key_value_heads * config.head_dim
        parts = {"q_proj": width, "k_proj": kv_width, "v_proj": kv_width}
        if config.attn_use_output_gate:
            parts["o_gate"] = width
    else:
        width = config.lightning_nh * config.lightning_head_dim
        parts = {"q_proj": width, "k_proj": width, "v_proj": width}
        if config.use_output_gate:
            parts["z_proj"] = width
    yield from _fused(name, parts, hidden, (*path, "in_proj", "weight", "value"))
    yield TensorEntry(name + "o_proj.weight", (hidden, width), (*path, "o_proj", "weight", "value"))
    if kind != SPARSE:
        if config.qk_norm:
            for norm in ("q_norm", "k_norm"):
                yield TensorEntry(
                    f"{name}{norm}.weight", (config.lightning_head_dim,), (*path, norm, "weight")
                )
        if config.use_output_norm:
            yield TensorEntry(name + "o_norm.weight", (width,), (*path, "o_norm", "weight"))


def _fused(name: str, parts: dict[str, int], columns: int, path: Path) -> Iterator[TensorEntry]:
    start = 0
    for part, rows in parts.items():
        yield TensorEntry(f"{name}{part}.weight", (rows, columns), path, start)
        start += rows
