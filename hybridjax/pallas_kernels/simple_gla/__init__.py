"""SimpleGLA: one token per sequence (any GPU from Hopper on) and chunked prompts (Hopper)."""

from hybridjax.pallas_kernels.simple_gla import decode, hopper

__all__ = ["decode", "hopper"]
