"""A machine for ``nvfp4.fragment`` that computes on arrays of 32 lanes, as a warp's registers would."""

import ml_dtypes
import numpy as np

U32 = np.uint32


def halves(words):
    """float64[..., 2]: the two bfloat16 of registers."""
    words = np.asarray(words, U32)
    both = np.stack([words & U32(0xFFFF), words >> U32(16)], axis=-1).astype(np.uint16)
    return both.view(ml_dtypes.bfloat16).astype(np.float64)


def registers(values):
    """The registers of bfloat16 pairs [..., 2]; the values must be exact."""
    rounded = np.asarray(values, np.float32).astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(rounded.astype(np.float64), values)
    bits = rounded.view(np.uint16).astype(U32)
    return bits[..., 0] | bits[..., 1] << U32(16)


class Lanes:
    """See ``fragment.Machine``; shared arrays are bytes. Refuses reads that a GPU would."""

    def __init__(self, **arrays):
        self.arrays = arrays
        self.worst: dict[str, int] = {}  # banks' conflicts of any load, by array

    def kept(self, constant):
        return constant

    def both(self, a, b):
        return U32(a) & U32(b)

    def either(self, a, b):
        return U32(a) | U32(b)

    def apart(self, a, b):
        return U32(a) ^ U32(b)

    def right(self, a, places):
        return U32(a) >> U32(places)

    def rotated(self, a, places):
        a = U32(a)
        return a >> U32(places) | a << U32(32 - places)

    def fused(self, a, factor, term):
        return (np.asarray(a, np.uint64) * np.uint64(factor) + np.asarray(term, np.uint64)).astype(U32)

    def least(self, a, limit):
        return np.minimum(U32(a), U32(limit))

    def permute(self, a, b, selector):
        a, b, selector = np.broadcast_arrays(U32(a), U32(b), U32(selector))
        eight = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
        out = np.zeros(a.shape, U32)
        for i in range(4):
            nibble = (selector >> U32(4 * i) & U32(15)).astype(np.uint64)
            assert (nibble < 8).all()
            out |= (eight >> nibble * np.uint64(8) & np.uint64(255)).astype(U32) << U32(8 * i)
        return out

    def times(self, a, b):
        product = halves(a) * halves(b)
        sizes = np.abs(product[product != 0])
        assert (sizes < 2.0**128).all() and (sizes >= 2.0**-126).all()  # neither infinite nor subnormal
        return registers(product)

    def load(self, array, offset, words):
        offset = np.broadcast_to(offset, (32,)).astype(np.int64)
        assert (offset % (4 * words) == 0).all()
        group = 32 // words  # lanes whose reads are one access
        for lanes in offset.reshape(-1, group):
            lines = {}
            for at in {int(x) + 4 * i for x in lanes for i in range(words)}:
                lines[at % 128] = lines.get(at % 128, 0) + 1
            self.worst[array] = max(self.worst.get(array, 0), *lines.values())
        whole = self.arrays[array]
        assert offset.min() >= 0 and offset.max() + 4 * words <= whole.size
        read = whole[offset[:, None] + np.arange(4 * words)]
        return list(read.copy().view(U32).T)

    def product(self, sums, a, b):
        lane = np.arange(32)
        group, quarter = lane >> 2, lane & 3
        weights, tokens = np.zeros((16, 16)), np.zeros((16, 8))
        for index, register in enumerate(a):
            row, column = group + 8 * (index % 2), 2 * quarter + 8 * (index // 2)
            for half in (0, 1):
                weights[row, column + half] = halves(register)[:, half]
        for index, register in enumerate(b):
            for half in (0, 1):
                tokens[2 * quarter + 8 * index + half, group] = halves(register)[:, half]
        out = weights @ tokens
        return [sums[i] + out[group + 8 * (i // 2), 2 * quarter + i % 2] for i in range(4)]


def swizzled(lines):
    """Bytes [lines, 128] as the copy engine leaves them: 16-byte units permuted within every 8 lines."""
    units = lines.reshape(-1, 8, 16)
    row = np.arange(len(units))[:, None] % 8
    out = np.empty_like(units)
    out[np.arange(len(units))[:, None], np.arange(8) ^ row] = units
    return out.reshape(-1)
