"""Products with NVFP4 weights that are decoded in registers, dense and grouped."""

from hybridjax.pallas_kernels.nvfp4.dense import w4a16
from hybridjax.pallas_kernels.nvfp4.grouped import experts

__all__ = ["experts", "w4a16"]
