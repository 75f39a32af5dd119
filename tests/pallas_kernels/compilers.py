"""Tests that compile for GPUs."""

import os

import pytest

from hybridjax.pallas_kernels import aot

# ``make aot`` installs the compilers and sets the variable, so that nothing is left out there.
needs_compilers = pytest.mark.skipif(
    not aot.available() and "HYBRIDJAX_REQUIRE_COMPILERS" not in os.environ,
    reason="needs jax-cuda13-plugin, -pjrt, nvidia-cuda-nvcc, nvidia-nvvm",
)
