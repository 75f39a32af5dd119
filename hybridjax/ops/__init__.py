"""Ops: readable definitions, XLA paths, and the selection of implementations."""

from hybridjax.ops.block_attention import block_attention
from hybridjax.ops.causal_conv import causal_conv
from hybridjax.ops.dispatch import OPS, Op, override, parse_override
from hybridjax.ops.experts import experts
from hybridjax.ops.gated_delta import (
    gated_delta_decode,
    gated_delta_prefill,
    gated_delta_verify,
    gated_delta_whole,
)
from hybridjax.ops.history import history
from hybridjax.ops.index_loss import attention_by_block, index_loss
from hybridjax.ops.index_selection import SharedBlocks, select_index_blocks
from hybridjax.ops.infllm import select_blocks, update_compressed
from hybridjax.ops.mixers import (
    gated_delta_inputs,
    gated_delta_net_decode,
    gated_delta_output,
    lightning_decode,
    lightning_output,
    lightning_rows,
)
from hybridjax.ops.ngram_hash import NgramHash, ngram_rows, ngram_windows
from hybridjax.ops.norms import centered_rms_norm, gated, gated_rms_norm, rms_norm, swiglu
from hybridjax.ops.nvfp4 import nvfp4_w4a4, nvfp4_w4a16
from hybridjax.ops.nvfp4_experts import nvfp4_experts
from hybridjax.ops.rotary import rotary
from hybridjax.ops.router import load_balancing_loss, route
from hybridjax.ops.segment_attention import segment_attention
from hybridjax.ops.simple_gla import (
    simple_gla_decode,
    simple_gla_prefill,
    simple_gla_verify,
    simple_gla_whole,
)
from hybridjax.ops.tree import recurrent_commit, tree_ancestors, tree_history, tree_history_commit

__all__ = [
    "OPS",
    "NgramHash",
    "Op",
    "SharedBlocks",
    "attention_by_block",
    "block_attention",
    "causal_conv",
    "centered_rms_norm",
    "experts",
    "gated",
    "gated_delta_decode",
    "gated_delta_inputs",
    "gated_delta_net_decode",
    "gated_delta_output",
    "gated_delta_prefill",
    "gated_delta_verify",
    "gated_delta_whole",
    "gated_rms_norm",
    "history",
    "index_loss",
    "lightning_decode",
    "lightning_output",
    "lightning_rows",
    "load_balancing_loss",
    "ngram_rows",
    "ngram_windows",
    "nvfp4_experts",
    "nvfp4_w4a16",
    "nvfp4_w4a4",
    "override",
    "parse_override",
    "recurrent_commit",
    "rms_norm",
    "rotary",
    "route",
    "segment_attention",
    "select_blocks",
    "select_index_blocks",
    "simple_gla_decode",
    "simple_gla_prefill",
    "simple_gla_verify",
    "simple_gla_whole",
    "swiglu",
    "tree_ancestors",
    "tree_history",
    "tree_history_commit",
    "update_compressed",
]
