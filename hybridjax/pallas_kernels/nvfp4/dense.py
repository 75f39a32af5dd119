"""The implementation of ``nvfp4_w4a16`` for few rows: see ``kernel``."""

import functools

import jax
import jax.numpy as jnp

from hybridjax.pallas_kernels.nvfp4.kernel import Tuning, product


@functools.partial(jax.jit, static_argnames=("out_dtype", "tuning", "interpret"))
def w4a16(x, codes, scales, global_scale, out_dtype=None, *, tuning: Tuning | None = None, interpret=None):
    """See ops.nvfp4_w4a16; x is bfloat16[M, K] with M up to 64.

    Raises:
      ValueError: sizes that the kernel does not divide.
    """
    dtype = out_dtype or x.dtype
    out = product(
        x,
        codes[None],
        scales[None],
        global_scale[None],
        tokens=x.shape[0],
        share=1,
        out_dtype=dtype,
        tuning=tuning,
        interpret=interpret,
    )
    return out[0] if out.shape[0] == 1 else jnp.sum(out, axis=0).astype(dtype)
