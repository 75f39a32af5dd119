"""The gated delta rule: one token per sequence (any GPU from Hopper on) and chunked prompts (Hopper)."""

from hybridjax.pallas_kernels.gated_delta import decode, hopper

__all__ = ["decode", "hopper"]
