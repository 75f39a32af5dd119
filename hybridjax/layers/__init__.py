"""Flax nnx modules that hold parameters only; all sequence state is passed in and returned."""

from hybridjax.layers.gated_delta_net import GatedDeltaNet
from hybridjax.layers.gated_residual import GatedResidual
from hybridjax.layers.indexed_attention import IndexedAttention
from hybridjax.layers.infllm_attention import InfLLMAttention
from hybridjax.layers.lightning_attention import LightningAttention
from hybridjax.layers.linear import DenseWeight, Embedding, Linear
from hybridjax.layers.mlp import SwiGLU
from hybridjax.layers.ngram_embedding import MappedTable, NgramEmbedding
from hybridjax.layers.norm import CenteredRMSNorm, RMSNorm
from hybridjax.layers.sparse_moe import DenseExperts, SparseMoE
from hybridjax.layers.vision import VisionTower

__all__ = [
    "CenteredRMSNorm",
    "DenseExperts",
    "DenseWeight",
    "Embedding",
    "GatedDeltaNet",
    "GatedResidual",
    "IndexedAttention",
    "InfLLMAttention",
    "LightningAttention",
    "Linear",
    "MappedTable",
    "NgramEmbedding",
    "RMSNorm",
    "SparseMoE",
    "SwiGLU",
    "VisionTower",
]
