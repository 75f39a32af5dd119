"""Flax nnx modules that hold parameters only; all sequence state is passed in and returned."""

from hybridjax.layers.infllm_attention import InfLLMAttention
from hybridjax.layers.lightning_attention import LightningAttention
from hybridjax.layers.linear import DenseWeight, Embedding, Linear
from hybridjax.layers.mlp import SwiGLU
from hybridjax.layers.norm import CenteredRMSNorm, RMSNorm

__all__ = [
    "CenteredRMSNorm",
    "DenseWeight",
    "Embedding",
    "InfLLMAttention",
    "LightningAttention",
    "Linear",
    "RMSNorm",
    "SwiGLU",
]
