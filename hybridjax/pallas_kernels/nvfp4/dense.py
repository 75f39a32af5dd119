"""The implementation of ``nvfp4_w4a16`` for few rows, in equal blocks of up to 64: see ``kernel``."""

import functools

import jax
import jax.numpy as jnp

from hybridjax.ops.nvfp4 import BLOCK_ROWS
from hybridjax.pallas_kernels.nvfp4.fragment import TOKENS
from hybridjax.pallas_kernels.nvfp4.kernel import Tuning, product


@functools.partial(jax.jit, static_argnames=("out_dtype", "tuning", "interpret"))
def w4a16(x, codes, scales, global_scale, out_dtype=None, *, tuning: Tuning | None = None, interpret=None):
    """See ops.nvfp4_w4a16; x is bfloat16[M, K].

    Raises:
      ValueError: sizes that the kernel does not divide.
    """
    rows, dtype = x.shape[0], out_dtype or x.dtype
    tokens = rows
    if rows > BLOCK_ROWS:
        blocks = -(-rows // BLOCK_ROWS)
        tokens = -(-rows // (blocks * TOKENS)) * TOKENS
        x = jnp.pad(x, ((0, blocks * tokens - rows), (0, 0)))
    out = product(
        x,
        codes[None],
        scales[None],
        global_scale[None],
        tokens=tokens,
        share=1,
        out_dtype=dtype,
        tuning=tuning,
        interpret=interpret,
    )
    return (out[0] if out.shape[0] == 1 else jnp.sum(out, axis=0).astype(dtype))[:rows]
