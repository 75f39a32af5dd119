"""What warps compute by themselves, run on threads made of numpy: the code for GPUs, not its plain form."""

import jax.numpy as jnp
import numpy as np
import pytest

from hybridjax.pallas_kernels.gated_delta import warps

THREADS = np.arange(128)
LANE, WARP = THREADS % 32, THREADS // 32
ROW, PAIR = LANE // 4, LANE % 4  # of a thread in 8 x 8 blocks


def unpacked(word):
    """float32[128, 2] of words of float16."""
    return np.stack([word & 0xFFFF, word >> 16], axis=1).astype(np.uint16).view(np.float16).astype(np.float32)


class Threads:
    """The instructions of ``warps.Emitter`` for four warps at once; a register is an array of 128."""

    lane, warp = LANE.astype(np.uint32), WARP.astype(np.uint32)

    def word(self, x):
        return np.full(128, x, np.uint32)

    def number(self, x):
        return np.full(128, x, np.float32)

    def both(self, x, y):
        return x & y

    def either(self, x, y):
        return x | y

    def left(self, x, by):
        return x << np.uint32(by)

    def right(self, x, by):
        return x >> np.uint32(by)

    def add(self, x, y):
        return x + y

    def multiply(self, x, y):
        return x * y

    def equal(self, x, y):
        return x == y

    def select(self, condition, x, y):
        return np.where(condition, x, y)

    def pair(self, low, high):
        halves = [np.asarray(x, np.float16).view(np.uint16).astype(np.uint32) for x in (low, high)]
        return halves[0] | halves[1] << 16

    def transposed(self, block):
        """Of 8 x 8 blocks of each warp."""
        halves = (
            np.stack([block & 0xFFFF, block >> 16], axis=1).reshape(4, 8, 8).swapaxes(1, 2).reshape(128, 2)
        )
        return halves[:, 0] | halves[:, 1] << 16

    def mma(self, acc, left, right, kind="f16"):
        """As PTX lays the fragments of m16n8k16 out."""
        a = np.zeros((4, 16, 16), np.float32)
        b, c = np.zeros((4, 16, 8), np.float32), np.zeros((4, 16, 8), np.float32)
        for word, (down, over) in zip(left, ((0, 0), (8, 0), (0, 8), (8, 8))):
            for e in (0, 1):
                a[WARP, ROW + down, 2 * PAIR + over + e] = unpacked(word)[:, e]
        for word, down in zip(right, (0, 8)):
            for e in (0, 1):
                b[WARP, 2 * PAIR + down + e, ROW] = unpacked(word)[:, e]
        places = [(WARP, ROW + down, 2 * PAIR + e) for down in (0, 8) for e in (0, 1)]
        for place, value in zip(places, acc):
            c[place] = value
        c = c + a @ b
        return [c[place] for place in places]


def words_of(x):
    """Of float16[64, 64], as a warpgroup holds it."""
    x, row = x.view(np.uint16).astype(np.uint32), 16 * WARP + ROW
    return [
        [x[row + down, start + 2 * PAIR] | x[row + down, start + 2 * PAIR + 1] << 16 for down in (0, 8)]
        for start in range(0, 64, 8)
    ]


def array_of(words):
    x, row = np.zeros((64, 64), np.float32), 16 * WARP + ROW
    for start, pair in zip(range(0, 64, 8), words):
        for down, word in zip((0, 8), pair):
            for e in (0, 1):
                x[row + down, start + 2 * PAIR + e] = unpacked(word)[:, e]
    return x


@pytest.mark.parametrize("alike", [False, True])
def test_four_warps_eliminate_what_their_own_rows_allow(alike):
    rng = np.random.default_rng(3)
    system = -np.ones((64, 64)) if alike else 0.4 * rng.uniform(-1, 1, (64, 64))
    system = np.tril(system).astype(np.float16)  # with a diagonal, which must not count
    beta = rng.random(64).astype(np.float32)
    pairs = [[beta[start + 2 * PAIR + e] for e in (0, 1)] for start in range(0, 64, 8)]
    got = [array_of(x) for x in warps.eliminate_words(Threads(), words_of(system), pairs)]
    plain = warps.eliminate(jnp.asarray(system), jnp.asarray(beta), jnp.int32(0), interpret=True)
    for x, y in zip(got, plain, strict=True):
        np.testing.assert_allclose(x, np.asarray(y, np.float32), rtol=0, atol=2e-3)
    # And together: (I + n^2) (I + n) d.
    n, n_and_one, d = (x.astype(np.float64) for x in got)
    exact = np.linalg.inv(np.eye(64) - np.tril(system.astype(np.float64), -1)) * beta
    np.testing.assert_allclose((np.eye(64) + n @ n) @ n_and_one @ d, exact, rtol=0, atol=2e-3)
