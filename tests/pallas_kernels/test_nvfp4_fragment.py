"""What the lanes of a warp do with NVFP4 weights, bit by bit, against the definition of the format."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from lanes import U32, Lanes, halves, swizzled

from hybridjax.pallas_kernels.nvfp4 import fragment
from hybridjax.quantization import decode, to_words, unpack

BYTES = np.arange(256, dtype=U32)
SCALES = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)


def test_every_code_at_every_place_with_every_scale_is_exact():
    machine = Lanes()
    same = np.arange(16, dtype=U32) * U32(0x11111111)
    words = np.concatenate([same, np.random.default_rng(0).integers(0, 2**32, 1000, dtype=U32)])
    stored = jnp.asarray(words.view(np.uint8).reshape(-1, 4))
    codes, words = np.asarray(unpack(stored), np.float64), np.asarray(to_words(stored))[:, 0]
    # Scales have no sign, and a NaN is not a number that a quantiser writes.
    first = np.where(np.isnan(SCALES), 480.0, np.abs(SCALES))
    for quarter in range(4):
        place = U32(8 * quarter)
        read = fragment.scales(machine, BYTES << place, BYTES[::-1] << place, U32(quarter))
        for pairs, want in zip(read, (first, first[::-1]), strict=True):
            np.testing.assert_array_equal(halves(pairs) * 2.0**-118, np.stack([want, want], axis=-1))
            for j, pair in enumerate(fragment.decode(machine, words)):
                np.testing.assert_array_equal(halves(pair) * 2.0**126, codes[:, [2 * j, 2 * j + 1]])
                got = halves(machine.times(pair[:, None], pairs)) * fragment.SCALE
                np.testing.assert_array_equal(got, codes[:, None, [2 * j, 2 * j + 1]] * want[:, None])


def case(stage, slots, seed=0):
    """Random bytes of slots and, for each slot, the products in float64 [rows, tokens]."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 256, (slots, stage.rows, stage.code_row), dtype=np.uint8)
    scales = rng.integers(0, 127, (slots, stage.rows, stage.scale_row), dtype=np.uint8)
    lines = stage.token_lines
    x = rng.standard_normal((slots, stage.chunks, lines, 64)).astype(ml_dtypes.bfloat16)
    x[:, :, stage.tokens :] = np.nan  # never written
    image = x
    if stage.full:
        image = x.reshape(slots, stage.chunks, -1, 8, 64).swapaxes(1, 2)
    image = np.ascontiguousarray(image).view(np.uint8).reshape(-1, 128)
    words = np.asarray(to_words(jnp.asarray(codes))).view(np.uint8)
    arrays = {
        "codes": swizzled(words.reshape(-1, 128)) if stage.tiled else words.reshape(-1),
        "scales": scales.reshape(-1),
        "x": swizzled(image) if stage.tokens > 1 else image.reshape(-1),
    }
    weights = decode(jnp.asarray(codes), jnp.asarray(scales.view(ml_dtypes.float8_e4m3fn)))
    tokens = x.astype(np.float64)[:, :, : stage.tokens].swapaxes(1, 2).reshape(slots, stage.tokens, -1)
    return arrays, np.asarray(weights, np.float64) @ tokens.swapaxes(1, 2)


@pytest.mark.parametrize(
    "stage",
    [
        fragment.Stage(rows=64, tokens=1, chunks=4, tiled=True),
        fragment.Stage(rows=128, tokens=5, chunks=4, tiled=True),
        fragment.Stage(rows=64, tokens=16, chunks=4, tiled=True),
        fragment.Stage(rows=64, tokens=13, chunks=10, tiled=False),
        fragment.Stage(rows=64, tokens=24, chunks=3, tiled=False),
        fragment.Stage(rows=64, tokens=1, chunks=3, tiled=False),
    ],
    ids=str,
)
def test_a_warpgroup_multiplies_a_slot(stage):
    arrays, want = case(stage, slots=2)
    lane = np.arange(32, dtype=U32)
    for slot in range(2):
        got = np.full((stage.rows, stage.token_tiles * 8), np.nan)
        for warp in range(4):
            machine = Lanes(**arrays)
            zero = [[[np.zeros(32)] * 4 for _ in range(stage.token_tiles)] for _ in range(stage.rows // 64)]
            sums = fragment.multiply(machine, stage, U32(slot), lane, U32(warp), zero)
            for i, row_sums in enumerate(sums):
                for j, four in enumerate(row_sums):
                    for (row, token), values in zip(fragment.places(machine, lane, U32(warp), i, j), four):
                        assert np.isnan(got[row, token]).all()
                        got[row, token] = values * fragment.SCALE
            if stage.tiled:
                # Lanes' reads of one access go to different banks.
                assert machine.worst == {"codes": 1, "scales": 1, "x": 1}
        np.testing.assert_allclose(got[:, : stage.tokens], want[slot], rtol=1e-12, atol=1e-9)
