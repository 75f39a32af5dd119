"""Codes in the order that GPU kernels decode: 8 consecutive codes of a row to a 32-bit word.

In a checkpoint the codes of a word stand side by side, four bits each. A kernel wants them as bfloat16 pairs,
one of an even and an odd column, with the sign as bit 15 and the three other bits as bits 8:6 (see
``pallas_kernels.nvfp4.fragment``). ``to_words`` puts the bits of a word where few instructions take them
there: three pairs are a rotation and a mask, the fourth a mask, a product that moves each bit by the right
distance, and a mask. The order is a permutation of the bits of each word, found by exhaustive search.
"""

import jax
import jax.numpy as jnp

PAIR = 0x81C081C0  # bits of a pair
ROTATIONS = (0, 3, 6)  # to the right, that bring the first three pairs there
LAST = 0x001B001B  # bits of the fourth pair,
LAST_FACTOR = 1 << 14 | 1 << 8 | 1 << 3  # which the product takes there: bit 1 to 15, 0 to 8, 4:3 to 7:6

CODES = 8  # per word


def _rotated(x: jax.Array, left: int) -> jax.Array:
    return x << left | x >> (32 - left) if left else x


@jax.jit
def to_words(codes: jax.Array) -> jax.Array:
    """uint8[..., K / 2] of a checkpoint -> uint32[..., K / 8].

    Raises:
      ValueError: K is no multiple of 8.
    """
    if codes.shape[-1] % 4:
        raise ValueError(f"rows of {2 * codes.shape[-1]} codes are no whole words of {CODES}")
    whole = codes.reshape(*codes.shape[:-1], codes.shape[-1] // 4, 4)  # not -1: there may be no rows
    whole = jax.lax.bitcast_convert_type(whole, jnp.uint32)
    out = jnp.zeros_like(whole)
    for pair in range(4):
        for odd in (0, 1):
            code = whole >> (4 * (2 * pair + odd)) & 15
            if pair < 3:
                placed = (code & 8) << 12 | (code & 7) << 6
                out |= _rotated(placed << 16 * odd, ROTATIONS[pair])
            else:
                placed = (code & 8) >> 2 | (code & 4) >> 2 | (code & 3) << 3
                out |= placed << 16 * odd
    return out


@jax.jit
def from_words(words: jax.Array) -> jax.Array:
    """The inverse: uint32[..., K / 8] -> uint8[..., K / 2]."""
    pairs = [_rotated(words, (32 - places) % 32) & jnp.uint32(PAIR) for places in ROTATIONS]
    pairs.append((words & jnp.uint32(LAST)) * jnp.uint32(LAST_FACTOR) & jnp.uint32(PAIR))
    whole = jnp.zeros_like(words)
    for i, pair in enumerate(pairs):
        for odd in (0, 1):
            half = pair >> 16 * odd
            whole |= (half >> 12 & 8 | half >> 6 & 7) << (4 * (2 * i + odd))
    codes = jax.lax.bitcast_convert_type(whole, jnp.uint8)
    return codes.reshape(*words.shape[:-1], 4 * words.shape[-1])


def in_checkpoint_order(codes: jax.Array) -> jax.Array:
    """uint8[..., K / 2] of codes in either order."""
    return from_words(codes) if codes.dtype == jnp.uint32 else codes
