"""Short depthwise convolutions over the past of each sequence."""

import jax
import jax.numpy as jnp

from hybridjax.batch import Batch
from hybridjax.ops.dispatch import Op
from hybridjax.ops.history import history


def _causal_conv(
    x: jax.Array, weight: jax.Array, batch: Batch, pool: jax.Array | None, *, dilation: int = 1
) -> tuple[jax.Array, jax.Array | None]:
    """y[t] = sum_j weight[:, j] * x[t - (K - 1 - j) * dilation]: the last tap weighs the row itself.

    Rows before a sequence's start are zero. No bias, no activation (qwen4_exp 4, step 2, and 8).

    Args:
      x: [N, C] one row per row of the batch.
      weight: [C, 1, K], as PyTorch stores a depthwise convolution; (K - 1) * dilation <= 64.
      batch: WHOLE, PREFILL or DECODE.
      pool: [slots, (K - 1) * dilation, C] the last rows of every sequence, oldest first; None in WHOLE mode.
        Slots not named by the batch are returned unchanged, slot 0 is scratch.
      dilation: tokens between taps.

    Returns:
      sums float32[N, C] (rows with position -1: meaningless) and the pool after the step.
    """
    taps = weight.shape[-1]
    offsets = tuple((taps - 1 - j) * dilation for j in range(taps - 1))
    earlier, pool = history(x, batch, pool, offsets) if offsets else ([], pool)
    wide = weight[:, 0].astype(jnp.float32)
    rows = [row.astype(jnp.float32) for row in (*earlier, x)]
    return sum((row * wide[:, j] for j, row in enumerate(rows[1:], 1)), rows[0] * wide[:, 0]), pool


causal_conv = Op("causal_conv", _causal_conv)
