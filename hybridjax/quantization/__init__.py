"""Number formats of quantised weights and how weights are brought into them; arrays only, no models."""

from hybridjax.quantization.gptq import ORDERINGS, gptq
from hybridjax.quantization.nvfp4 import (
    GROUP,
    NVFP4,
    RULES,
    block_scales,
    decode,
    dequantize,
    encode,
    global_scale,
    nearest,
    pack,
    quantize,
    quantize_activations,
    round_stochastically,
    straight_through,
    unpack,
)
from hybridjax.quantization.swizzle import swizzle_scales, unswizzle_scales
from hybridjax.quantization.words import from_words, in_checkpoint_order, to_words

__all__ = [
    "GROUP",
    "NVFP4",
    "ORDERINGS",
    "RULES",
    "block_scales",
    "decode",
    "dequantize",
    "encode",
    "from_words",
    "global_scale",
    "gptq",
    "in_checkpoint_order",
    "nearest",
    "pack",
    "quantize",
    "quantize_activations",
    "round_stochastically",
    "straight_through",
    "swizzle_scales",
    "to_words",
    "unpack",
    "unswizzle_scales",
]
