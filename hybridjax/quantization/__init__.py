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

__all__ = [
    "GROUP",
    "NVFP4",
    "ORDERINGS",
    "RULES",
    "block_scales",
    "decode",
    "dequantize",
    "encode",
    "global_scale",
    "gptq",
    "nearest",
    "pack",
    "quantize",
    "quantize_activations",
    "round_stochastically",
    "straight_through",
    "swizzle_scales",
    "unpack",
    "unswizzle_scales",
]
