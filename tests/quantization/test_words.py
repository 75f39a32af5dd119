"""The order in which GPU kernels want codes: a permutation of each word's bits, undone without loss."""

import jax.numpy as jnp
import numpy as np
import pytest

from hybridjax.quantization import decode, from_words, in_checkpoint_order, to_words, unpack
from hybridjax.quantization.words import LAST, LAST_FACTOR, PAIR, ROTATIONS


def random_codes(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)


def test_every_bit_of_a_word_goes_to_a_place_of_its_own():
    single = np.left_shift(np.uint32(1), np.arange(32, dtype=np.uint32)).view(np.uint8).reshape(32, 4)
    moved = np.asarray(to_words(jnp.asarray(single)))[:, 0]
    assert sorted(moved.tolist()) == [1 << i for i in range(32)]
    # Bits that are set together move independently of each other.
    some = np.random.default_rng(1).random((500, 32)) < 0.5
    together = np.bitwise_or.reduce(np.where(some, single.view(np.uint32)[:, 0], np.uint32(0)), axis=1)
    want = np.bitwise_or.reduce(np.where(some, moved, np.uint32(0)), axis=1)
    codes = jnp.asarray(together[:, None].view(np.uint8))
    np.testing.assert_array_equal(np.asarray(to_words(codes))[:, 0], want)


def test_pairs_are_where_a_rotation_or_a_product_takes_them():
    codes = random_codes(50, 4)
    nibbles = np.stack([codes & 15, codes >> 4], axis=-1).reshape(50, 4, 2).astype(np.uint64)
    placed = (nibbles & 8) << 12 | (nibbles & 7) << 6
    want = placed[..., 0] | placed[..., 1] << 16  # [words, pairs]
    word = np.asarray(to_words(jnp.asarray(codes)))[:, 0].astype(np.uint64)
    turned = [(word >> k | word << (32 - k)) & PAIR for k in ROTATIONS]
    product = (word & LAST) * LAST_FACTOR & PAIR
    np.testing.assert_array_equal(np.stack([*turned, product], axis=1), want)


def test_codes_come_back_and_mean_the_same():
    codes = jnp.asarray(random_codes(3, 5, 32))
    words = to_words(codes)
    assert (words.shape, words.dtype) == ((3, 5, 8), jnp.uint32)
    np.testing.assert_array_equal(from_words(words), codes)
    np.testing.assert_array_equal(in_checkpoint_order(words), codes)
    assert in_checkpoint_order(codes) is codes
    np.testing.assert_array_equal(unpack(words), unpack(codes))
    scales = jnp.asarray(random_codes(3, 5, 4) & 0x77).view(jnp.float8_e4m3fn)
    np.testing.assert_array_equal(decode(words, scales), decode(codes, scales))


def test_rows_must_be_whole_words():
    with pytest.raises(ValueError, match="rows of 12 codes are no whole words of 8"):
        to_words(jnp.zeros((2, 6), jnp.uint8))
