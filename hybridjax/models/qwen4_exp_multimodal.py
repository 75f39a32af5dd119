"""Qwen3.8-Flash-Next with its vision tower: the text model and what turns images into its rows."""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import nnx

from hybridjax.batch import Batch, Probe
from hybridjax.configs.qwen4_exp import Qwen4ExpConfig
from hybridjax.configs.qwen4_exp_multimodal import Qwen4ExpMultimodalConfig
from hybridjax.layers import VisionTower
from hybridjax.models.base import TensorEntry
from hybridjax.models.common import checked_ids
from hybridjax.models.qwen4_exp import Qwen4Exp, unpadded
from hybridjax.models.qwen4_exp_entries import checkpoint_entries
from hybridjax.models.qwen4_exp_vision import vision_entries


class Qwen4ExpMultimodal(Qwen4Exp):
    """A ``Qwen4Exp`` whose rows may be image features (qwen4_exp 11).

    Args: see ``Qwen4Exp``; the configuration holds that of the text model.
    """

    prefix = "model.language_model."
    config: Qwen4ExpMultimodalConfig

    def __init__(
        self,
        config: Qwen4ExpMultimodalConfig,
        *,
        dtype: jnp.dtype = jnp.bfloat16,
        rngs: nnx.Rngs,
        ngram_table: str = "device",
    ):
        super().__init__(config, dtype=dtype, rngs=rngs, ngram_table=ngram_table)  # pyright: ignore
        init = nnx.initializers.normal(config.vision_config.initializer_range)
        self.visual = VisionTower(config.vision_config, init=init, dtype=self.dtype, rngs=rngs)

    @property
    def text_config(self) -> Qwen4ExpConfig:
        """The configuration of the text model."""
        return self.config.text_config

    def __call__(
        self,
        input_ids: jax.Array,
        probe: Probe | None = None,
        *,
        features: jax.Array | None = None,
        feature_index: jax.Array | None = None,
        rope_positions: jax.Array | None = None,
    ) -> jax.Array:
        """Teacher-forced logits: int32[B, L] -> float32[B, L, vocab]; differentiable.

        Args:
          input_ids: token ids with one placeholder per image feature.
          probe: see ``Qwen4Exp.forward``.
          features: [M, hidden] of all images; feature_index: int32[B, L], -1 for text.
          rope_positions: int32[B, L, 3].

        Raises:
          ValueError: as for ``Qwen4Exp``.
        """
        input_ids = checked_ids(input_ids, self.text_config.vocab_size)
        batch = Batch.whole(input_ids)

        def rows(x: jax.Array | None) -> jax.Array | None:
            if x is None:
                return None
            padding = batch.tokens.shape[0] // x.shape[0] - x.shape[1]
            x = jnp.pad(x, ((0, 0), (0, padding), *((0, 0),) * (x.ndim - 2)))
            return x.reshape(-1, *x.shape[2:]).astype(jnp.int32)

        batch = dataclasses.replace(
            batch,
            features=features,
            feature_index=rows(feature_index),
            rope_positions=rows(rope_positions),
        )
        streams, _ = self.forward(batch, None, probe)
        return self.logits(unpadded(streams, input_ids))

    @classmethod
    def checkpoint_entries(
        cls,
        config: Qwen4ExpMultimodalConfig,  # pyright: ignore[reportIncompatibleMethodOverride]
        names: Mapping[str, tuple[int, ...]] | None = None,
    ) -> tuple[TensorEntry, ...]:
        """Every tensor of a checkpoint of this configuration; see ``Qwen4Exp.checkpoint_entries``."""
        text = checkpoint_entries(config.text_config, cls.prefix, names)
        return (*text, *vision_entries(config.vision_config, path=("visual",)))
