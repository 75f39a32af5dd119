"""Grouped matmuls over blocks of tokens that share an expert."""

from hybridjax.pallas_kernels.experts.hopper import experts_mosaic_gpu

__all__ = ["experts_mosaic_gpu"]
