"""Ops: readable definitions, XLA paths, and the selection of implementations."""

from hybridjax.ops.block_attention import block_attention
from hybridjax.ops.dispatch import OPS, Op, override, parse_override
from hybridjax.ops.history import history
from hybridjax.ops.infllm import select_blocks, update_compressed
from hybridjax.ops.norms import centered_rms_norm, gated, gated_rms_norm, rms_norm, swiglu
from hybridjax.ops.rotary import rotary
from hybridjax.ops.simple_gla import simple_gla_decode, simple_gla_prefill, simple_gla_whole

__all__ = [
    "OPS",
    "Op",
    "block_attention",
    "centered_rms_norm",
    "gated",
    "gated_rms_norm",
    "history",
    "override",
    "parse_override",
    "rms_norm",
    "rotary",
    "select_blocks",
    "simple_gla_decode",
    "simple_gla_prefill",
    "simple_gla_whole",
    "swiglu",
    "update_compressed",
]
