"""Products with NVFP4 weights (minicpm_sala 4.1 and 4.6).

W4A16 keeps activations as they are; W4A4 rounds them to NVFP4, too. Both leave the global scales to the
epilogue: what is multiplied before is exact in the activations' dtype.
"""

import jax
import jax.numpy as jnp

from hybridjax.ops.dispatch import Op, architecture, einsum_f32
from hybridjax.quantization import decode, in_checkpoint_order, pack, quantize_activations
from hybridjax.quantization.dispatch import BLACKWELL

_FLOAT32 = jnp.dtype(jnp.float32)
BLOCK_ROWS = 64  # of x that the GPU kernel multiplies at a time
_MOST_ROWS = 128  # up to which it is faster than decoding all weights to memory


def _w4a16(
    x: jax.Array,
    codes: jax.Array,
    scales: jax.Array,
    global_scale: jax.Array,
    out_dtype: jnp.dtype | None = None,
) -> jax.Array:
    """y = x W^T with weights decoded on the way.

    Args:
      x: [M, K] bfloat16, float16 or float32.
      codes: uint8[N, K / 2], the even column of each pair in the low nibble; or uint32[N, K / 8], the same
        codes as ``quantization.to_words`` arranges them, which is what the GPU kernel takes.
      scales: float8_e4m3fn[N, K / 16].
      global_scale: float32[N], of the matrix that each row belongs to.
      out_dtype: of the result; None: that of x.

    Returns:
      [M, N]; products are summed in float32 and multiplied by the global scale before they are rounded.
    """
    weight = decode(codes, scales).astype(x.dtype)
    return (einsum_f32("mk,nk->mn", x, weight) * global_scale).astype(out_dtype or x.dtype)


def _w4a16_decoded(x, codes, scales, global_scale, out_dtype=None):
    """Decodes all weights to the dtype of x, then multiplies: for so many rows that decoding is cheap."""
    weight = jax.lax.optimization_barrier(decode(codes, scales).astype(x.dtype))
    return (einsum_f32("mk,nk->mn", x, weight) * global_scale).astype(out_dtype or x.dtype)


def _w4a4(
    x: jax.Array,
    codes: jax.Array,
    scales: jax.Array,
    global_scale: jax.Array,
    input_scale: jax.Array,
    out_dtype: jnp.dtype | None = None,
) -> jax.Array:
    """y = Q(x) W^T, Q rounding activations to NVFP4 under a calibrated scale.

    Args:
      x, codes, scales, global_scale, out_dtype: as for ``nvfp4_w4a16``.
      input_scale: float32[], the calibrated largest activation / 2688.

    Returns:
      [M, N]; the reference emulates it: the rounded values are exact, their products summed in float32.
    """
    rounded, block = quantize_activations(x, input_scale)
    values = decode(pack(rounded), block)
    out = einsum_f32("mk,nk->mn", values, decode(codes, scales))
    return (out * (input_scale * global_scale)).astype(out_dtype or x.dtype)


def divides(features: int, columns: int) -> bool:
    """Whether the GPU kernel divides a matrix [features, columns]."""
    whole = columns % 64 == 0 and columns <= 1024
    return features % 64 == 0 and (columns % 256 == 0 or whole)


def kernel_fits(dtype: jnp.dtype, features: int, columns: int) -> bool:
    """Whether that kernel multiplies activations of a dtype with such a matrix here, arranged as words."""
    return dtype == jnp.bfloat16 and divides(features, columns) and architecture() == "sm_90"


def _hopper(x, codes, scales, global_scale, out_dtype=None) -> bool:
    """Few rows: for many, decoding all weights first costs little and leaves the product to XLA."""
    arranged = codes.dtype == jnp.uint32
    return arranged and x.shape[0] <= _MOST_ROWS and kernel_fits(x.dtype, codes.shape[0], x.shape[1])


def _blackwell(*args, **kwargs) -> bool:
    """Tensor cores that multiply block-scaled FP4."""
    return architecture() in BLACKWELL


def _w4a4_block_scaled(x, codes, scales, global_scale, input_scale, out_dtype=None):
    """cuDNN's block-scaled product, which XLA calls on Blackwell; elsewhere XLA decodes and multiplies."""
    rounded, block = quantize_activations(x, input_scale)
    codes = in_checkpoint_order(codes)
    weight = jax.lax.bitcast_convert_type(codes, jnp.float4_e2m1fn).reshape(codes.shape[0], -1)
    out = jax.nn.scaled_matmul(rounded[None], weight[None], block[None], scales[None], _FLOAT32)[0]
    return (out * (input_scale * global_scale)).astype(out_dtype or x.dtype)


nvfp4_w4a16 = Op("nvfp4_w4a16", _w4a16)
nvfp4_w4a16.register(
    "mosaic_gpu", "hybridjax.pallas_kernels.nvfp4:w4a16", platforms=("gpu",), supports=_hopper
)
nvfp4_w4a16.register("xla", _w4a16_decoded, platforms=("gpu",))
nvfp4_w4a4 = Op("nvfp4_w4a4", _w4a4)
nvfp4_w4a4.register("block_scaled", _w4a4_block_scaled, platforms=("gpu",), supports=_blackwell)
