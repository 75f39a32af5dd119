"""NVFP4: E2M1 codes, an E4M3 scale per 16 values of a row, a float32 scale per tensor.

    w = value(code) * scale * global_scale

Two codes per byte along the last axis, the even column in the low nibble. ``value(code) * scale`` has at most
six significant bits, so it is exact in bfloat16, float16 and float32. Sources: minicpm_sala 4.1 and 4.4
(FourOverSix, arXiv 2512.02010).
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from hybridjax.quantization.words import in_checkpoint_order

GROUP = 16
LARGEST_CODE = 6.0
LARGEST_SCALE = 448.0
RULES = ("static_6", "static_4", "mse", "mae", "abs_max")

# With an adaptive rule the largest block's scale may be 1.5 times as large, which 448 leaves no room for.
_ADAPTIVE_SCALE = 256.0

_E4M3, _E2M1 = jnp.float8_e4m3fn, jnp.float4_e2m1fn


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NVFP4:
    """A quantised matrix, or a stack of them.

    Attributes:
      codes: uint8[..., N, K / 2] as in a checkpoint, or uint32[..., N, K / 8], see ``words``.
      scales: float8_e4m3fn[..., N, K / 16].
      global_scale: float32[...], one per matrix.
    """

    codes: jax.Array
    scales: jax.Array
    global_scale: jax.Array


def _largest(rule: str) -> float:
    return LARGEST_SCALE if rule.startswith("static") else _ADAPTIVE_SCALE


def _check(rule: str, columns: int) -> None:
    if rule not in RULES:
        raise ValueError(f"rule is {rule!r}; allowed: {', '.join(RULES)}")
    if columns % GROUP:
        raise ValueError(f"the last axis has {columns} values; NVFP4 needs a multiple of {GROUP}")


def _grouped(x: jax.Array) -> jax.Array:
    return x.reshape(*x.shape[:-1], x.shape[-1] // GROUP, GROUP)  # not -1: there may be no rows


def _divided(x: jax.Array, by: jax.Array | float) -> jax.Array:
    """x / by, rounded once: where XLA sees a broadcast divisor it multiplies by the reciprocal instead."""
    return x / jax.lax.optimization_barrier(jnp.broadcast_to(jnp.float32(by), x.shape))


def global_scale(amax: jax.Array, rule: str = "static_6") -> jax.Array:
    """float32: the scale of a tensor whose largest magnitude is ``amax``; 1 for a tensor of zeros."""
    amax = jnp.asarray(amax, jnp.float32)
    return jnp.where(amax > 0, _divided(amax, LARGEST_CODE * _largest(rule)), 1.0)


def encode(x: jax.Array, scales: jax.Array, global_scale: jax.Array) -> jax.Array:
    """The nearest codes to x under given scales, ties to even.

    Args:
      x: float32[..., K].
      scales: float8_e4m3fn[..., K / 16].
      global_scale: float32[], or anything that broadcasts against the scales.

    Returns:
      float4_e2m1fn[..., K]; zeros where a scale is zero.
    """
    step = (scales.astype(jnp.float32) * global_scale)[..., None]
    return nearest(_grouped(x), step).reshape(x.shape)


def nearest(x: jax.Array, step: jax.Array) -> jax.Array:
    """The codes nearest to x / step, ties to even: float32 that broadcast -> float4_e2m1fn; 0 for step 0."""
    ratio = jnp.where(step > 0, _divided(x, jnp.where(step > 0, step, 1.0)), 0.0)
    return jnp.clip(ratio, -LARGEST_CODE, LARGEST_CODE).astype(_E2M1)


def block_scales(x: jax.Array, amax: jax.Array, rule: str = "static_6") -> jax.Array:
    """The scale of each group of 16.

    The adaptive rules try a largest code of 6 and of 4, and take 4 where its error is smaller: the sum of
    squares ("mse") or of magnitudes ("mae"), or the largest ("abs_max").

    Args:
      x: float32[..., K].
      amax: float32, broadcastable to [..., 1]: what the tensor's ``global_scale`` was made from.
      rule: one of RULES.

    Returns:
      float8_e4m3fn[..., K / 16].

    Raises:
      ValueError: the rule is unknown, or K is no multiple of 16.
    """
    _check(rule, x.shape[-1])
    whole = LARGEST_CODE * _largest(rule)
    largest = jnp.max(jnp.abs(_grouped(x)), axis=-1)
    exact = _divided(largest, LARGEST_CODE) * jnp.where(amax > 0, whole / amax, 0.0)
    six = jnp.minimum(exact, LARGEST_SCALE).astype(_E4M3)
    four = jnp.minimum(exact * 1.5, LARGEST_SCALE).astype(_E4M3)
    if rule == "static_6":
        return six
    if rule == "static_4":
        return four

    unit = _power_of_two_near(amax)
    scaled, scaled_amax = _grouped(x) / unit[..., None], (amax / unit)[..., None]

    def error(scales: jax.Array) -> jax.Array:
        codes = _grouped(encode(x, scales, global_scale(amax, rule)).astype(jnp.float32))
        near = _divided(codes * scales.astype(jnp.float32)[..., None] * scaled_amax, whole)
        difference = near - scaled
        if rule == "mse":
            return _sum16(difference * difference)
        return _sum16(jnp.abs(difference)) if rule == "mae" else jnp.max(jnp.abs(difference), axis=-1)

    return jnp.where(error(four) < error(six), four, six)


def _power_of_two_near(x: jax.Array) -> jax.Array:
    """A power of two by which x can be divided to be near 1, exactly, so that its square has room."""
    exponent = jax.lax.bitcast_convert_type(jnp.asarray(x, jnp.float32), jnp.int32) >> 23
    return jax.lax.bitcast_convert_type(jnp.clip(exponent, 2, 252) << 23, jnp.float32)


def _sum16(x: jax.Array) -> jax.Array:
    """[..., 16] -> [...], in one order on every backend: near ties decide alike everywhere."""
    halves = x[..., :8] + x[..., 8:]
    total = halves[..., 0]
    for i in range(1, 8):
        total = total + halves[..., i]
    return total


def pack(codes: jax.Array) -> jax.Array:
    """float4_e2m1fn[..., K] -> uint8[..., K / 2]."""
    nibbles = jax.lax.bitcast_convert_type(codes, jnp.uint4).astype(jnp.uint8)
    pairs = nibbles.reshape(*nibbles.shape[:-1], nibbles.shape[-1] // 2, 2)
    return pairs[..., 0] | pairs[..., 1] << 4


def unpack(codes: jax.Array) -> jax.Array:
    """uint8[..., K / 2] or uint32[..., K / 8] -> float32[..., K]: the values of the codes."""
    codes = in_checkpoint_order(codes)
    pairs = jnp.stack([codes & 15, codes >> 4], axis=-1).astype(jnp.int32)
    # Arithmetic, not a table or a cast: both are gathers or library calls on some backends.
    exponent, mantissa = (pairs >> 1) & 3, pairs & 1
    normal = (2 + mantissa) << exponent
    size = jnp.where(exponent > 0, normal, 2 * mantissa).astype(jnp.float32) * 0.25
    values = jnp.where(pairs & 8, -size, size)
    return values.reshape(*codes.shape[:-1], 2 * codes.shape[-1])


def decode(codes: jax.Array, scales: jax.Array) -> jax.Array:
    """codes, float8_e4m3fn[..., K / 16] -> float32[..., K], without the global scale: exact.

    Raises:
      ValueError: a dtype is none of NVFP4's (bytes of scales have to be viewed as float8_e4m3fn), or there is
        not one scale for every 16 codes.
    """
    if codes.dtype not in (jnp.uint8, jnp.uint32):
        raise ValueError(f"codes are {codes.dtype}; they must be uint8 or, arranged as words, uint32")
    if not jnp.issubdtype(scales.dtype, jnp.floating):
        raise ValueError(f"scales are {scales.dtype}; view them as float8_e4m3fn")
    columns = codes.shape[-1] * 2 * codes.dtype.itemsize
    if columns % GROUP or scales.shape != (*codes.shape[:-1], columns // GROUP):
        raise ValueError(
            f"codes {list(codes.shape)} of {columns} columns and scales {list(scales.shape)} do not fit: "
            f"there must be one scale for every {GROUP} columns"
        )
    grouped = _grouped(unpack(codes)) * scales.astype(jnp.float32)[..., None]
    return grouped.reshape(*codes.shape[:-1], columns)


def quantize(x: jax.Array, rule: str = "mse", amax: jax.Array | None = None) -> NVFP4:
    """Rounds a matrix, or each of a stack.

    Args:
      x: [..., N, K] of a floating dtype, finite.
      rule: how a block's scale is chosen, see ``block_scales``.
      amax: float32[...] the largest magnitude, of all matrices that share a global scale; None: that of x.

    Raises:
      ValueError: the rule is unknown, or K is no multiple of 16.
    """
    _check(rule, x.shape[-1])
    x = x.astype(jnp.float32)
    amax = jnp.max(jnp.abs(x), axis=(-2, -1)) if amax is None else jnp.asarray(amax, jnp.float32)
    scales = block_scales(x, amax[..., None, None], rule)
    scale = global_scale(amax, rule)
    return NVFP4(pack(encode(x, scales, scale[..., None, None])), scales, scale)


def dequantize(weight: NVFP4) -> jax.Array:
    """float32[..., N, K]."""
    return decode(weight.codes, weight.scales) * weight.global_scale[..., None, None]


def quantize_activations(x: jax.Array, input_scale: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Activations as W4A4 takes them: a static scale for all, one per 16 values from the values (plain rule).

    Args:
      x: [..., K] of a floating dtype.
      input_scale: float32[], the calibrated largest magnitude / 2688; larger values are clipped.

    Returns:
      (float4_e2m1fn[..., K], float8_e4m3fn[..., K / 16]); their products times ``input_scale`` are near x.
    """
    _check("static_6", x.shape[-1])
    x = x.astype(jnp.float32)
    amax = jnp.max(jnp.abs(_grouped(x)), axis=-1)
    scales = jnp.minimum(_divided(_divided(amax, LARGEST_CODE), input_scale), LARGEST_SCALE).astype(_E4M3)
    return encode(x, scales, input_scale), scales


def round_stochastically(
    x: jax.Array, scales: jax.Array, global_scale: jax.Array, key: jax.Array
) -> jax.Array:
    """``encode`` with one of the two neighbours drawn so that the expectation is x (within the range).

    Args:
      x, scales, global_scale: as for ``encode``.
      key: a JAX random key.

    Returns:
      float4_e2m1fn[..., K].
    """
    step = (scales.astype(jnp.float32) * global_scale)[..., None]
    ratio = jnp.where(step > 0, _divided(_grouped(x), jnp.where(step > 0, step, 1.0)), 0.0).reshape(x.shape)
    size = jnp.minimum(jnp.abs(ratio), LARGEST_CODE)
    gap = jnp.where(size < 2, 0.5, jnp.where(size < 4, 1.0, 2.0))
    below = jnp.floor(size / gap) * gap
    up = jax.random.uniform(key, x.shape) < (size - below) / gap
    return jnp.copysign(below + jnp.where(up, gap, 0.0), ratio).astype(_E2M1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def straight_through(x: jax.Array, rule: str, amax: jax.Array) -> jax.Array:
    """The values that x has in NVFP4, float32[..., N, K]; the gradient passes as if it were x.

    Args:
      x: [..., N, K] of a floating dtype, finite.
      rule, amax: as for ``quantize``.
    """
    return dequantize(quantize(x, rule, amax))


def _straight_forward(x: jax.Array, rule: str, amax: jax.Array) -> tuple[jax.Array, jax.Array]:
    return straight_through(x, rule, amax), amax


def _straight_backward(rule: str, amax: jax.Array, gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    return gradient, jnp.zeros_like(amax)


straight_through.defvjp(_straight_forward, _straight_backward)
