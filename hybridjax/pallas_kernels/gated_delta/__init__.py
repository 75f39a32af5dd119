"""The gated delta rule: one token per sequence (any GPU from Hopper on)."""

from hybridjax.pallas_kernels.gated_delta import decode

__all__ = ["decode"]
