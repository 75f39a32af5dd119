"""What a warp does with NVFP4 weights in shared memory, written once for the GPU and for tests.

The functions here are given a *machine*: ``emit.Ptx`` emits the instructions, a test's machine computes the
same on arrays of 32 lanes. Values are 32-bit registers, one per lane.

**Which lane holds what.** In ``mma.m16n8k16`` lane 4 g + t holds rows g and g + 8 of the weights, and token
g, at four of the 16 places along K. Which columns stand at these places is free as long as both operands
agree: of 64 columns lane t takes columns 16 t to 16 t + 15, which are two words of 8 codes, one group under
one scale, and 32 bytes of x.

**Decoding.** The three lower bits of a code, placed as bits 8:6 of a bfloat16, are its size times 2^-126, the
subnormal 0.5 included; the sign belongs to bit 15. ``quantization.words`` has the bits of 8 codes where 8
instructions take them there. Likewise an E4M3 scale placed as bits 10:4 is 2^-120 of its value; its sign is
left out, and a NaN is read as 480. Codes times 2^-126 and scales times 2^118 give products times 2^-8, all
exact in bfloat16 and none of them subnormal.
"""

import dataclasses
import itertools
from typing import Any, Protocol

from hybridjax.quantization import words

CHUNK = 64  # columns of a step
ROWS = 64  # of a row tile: 16 for each of four warps
TOKENS = 8  # of a token tile
SCALE = 2.0**8  # what sums have to be multiplied by

_TWO_119 = 0x7B007B00  # bfloat16 2^119, twice


class Machine(Protocol):
    """32-bit operations on registers; plain numbers stand for constants."""

    def kept(self, constant: int) -> Any:
        """A constant that stays in a register: so that multiply and add are one instruction."""
        ...

    def both(self, a: Any, b: Any) -> Any:
        """a & b."""
        ...

    def either(self, a: Any, b: Any) -> Any:
        """a | b."""
        ...

    def apart(self, a: Any, b: Any) -> Any:
        """a ^ b."""
        ...

    def right(self, a: Any, places: int) -> Any:
        """a >> places, zeros from the left."""
        ...

    def rotated(self, a: Any, places: int) -> Any:
        """a >> places, what leaves on the right coming back on the left."""
        ...

    def fused(self, a: Any, factor: Any, term: Any) -> Any:
        """a * factor + term."""
        ...

    def least(self, a: Any, limit: int) -> Any:
        """min(a, limit)."""
        ...

    def permute(self, a: Any, b: Any, selector: Any) -> Any:
        """The four bytes of (a, b) that the nibbles of the selector name."""
        ...

    def times(self, a: Any, b: Any) -> Any:
        """The two bfloat16 products."""
        ...

    def load(self, array: str, offset: Any, words: int) -> list:
        """Words of the shared array 'codes', 'scales' or 'x' from an offset in bytes."""
        ...

    def product(self, sums: list, a: list, b: list) -> list:
        """mma.m16n8k16 of bfloat16 fragments of 4 and 2 registers, added to 4 float32 sums."""
        ...


@dataclasses.dataclass(frozen=True)
class Stage:
    """Weights and activations in shared memory; several such slots stand one behind the other.

    Tiled, a stage has 256 columns: codes [rows, 128] as the copy engine swizzles rows of 128 bytes. Otherwise
    it has whole rows of a matrix as they are. Scales are [rows, 4 bytes per chunk]. x, swizzled likewise, is
    [token tiles, chunks, 8, 64] if all tiles are full, else [chunks, tokens up to a multiple of 8, 64].
    Of one token it is [chunks, 64], as it is.

    Attributes:
      rows: of the weights, a multiple of 64.
      tokens: whose products are wanted, at most those that x has room for.
      chunks: of 64 columns.
      tiled: see above.
    """

    rows: int
    tokens: int
    chunks: int
    tiled: bool

    @property
    def token_tiles(self) -> int:
        return -(-self.tokens // TOKENS)

    @property
    def full(self) -> bool:
        """Whether all token tiles are."""
        return self.tokens % TOKENS == 0

    @property
    def token_lines(self) -> int:
        """Tokens that a chunk of x has room for."""
        return 1 if self.tokens == 1 else self.token_tiles * TOKENS

    @property
    def code_row(self) -> int:
        """Bytes of a row's codes."""
        return self.chunks * CHUNK // 2

    @property
    def scale_row(self) -> int:
        return self.chunks * CHUNK // 16


def decode(m: Machine, word: Any) -> list:
    """A word of 8 codes -> bfloat16 pairs of codes (2 i, 2 i + 1) for i = 0..3, times 2^-126."""
    last = m.fused(m.both(word, words.LAST), m.kept(words.LAST_FACTOR), 0)
    turned = [word, *(m.rotated(word, places) for places in words.ROTATIONS[1:])]
    return [m.both(x, words.PAIR) for x in (*turned, last)]


def scales(m: Machine, first: Any, second: Any, quarter: Any) -> list:
    """This lane's of the 4 E4M3 scales in each of two words, times 2^118: [pairs of equal bfloat16]."""
    chosen = m.permute(first, second, m.fused(quarter, 0x1111, 0x4400))
    small = m.both(m.fused(chosen, m.kept(16), 0), 0x07F007F0)
    value = m.times(m.times(small, _TWO_119), _TWO_119)
    return [m.permute(value, value, 0x1010), m.permute(value, value, 0x3232)]


def row_of(m: Machine, lane: Any) -> Any:
    """0..7: which of 8 rows of the weights lane 4 g + t holds.

    Even rows first: with the copy engine's swizzle of 128-byte rows, half a warp's reads of 8 bytes then go
    to different banks.
    """
    group = m.right(lane, 2)
    return m.either(m.fused(m.both(group, 3), 2, 0), m.right(group, 2))


@dataclasses.dataclass(frozen=True)
class _Addresses:
    """Offsets of a lane's operands in a slot."""

    stage: Stage
    codes: Any
    inside: Any
    scales: Any
    x: list[tuple[Any, Any]]

    def load_codes(self, m: Machine, chunk: int, tile: int, half: int) -> list:
        inside = self.inside
        inside = m.apart(inside, 32 * chunk) if self.stage.tiled else m.fused(inside, 1, 32 * chunk)
        row = (tile * ROWS + half) * self.stage.code_row
        return m.load("codes", m.fused(m.fused(inside, 1, self.codes), 1, row), 2)

    def load_scales(self, m: Machine, chunk: int, tile: int, half: int, words: int) -> list:
        offset = (tile * ROWS + half) * self.stage.scale_row + 4 * chunk
        return m.load("scales", m.fused(self.scales, 1, offset), words)

    def load_x(self, m: Machine, chunk: int, tile: int, half: int) -> list:
        start, unit = self.x[tile]
        at = m.fused(m.apart(unit, 16 * half), 1, start)
        lines = TOKENS if self.stage.full else self.stage.token_lines
        return m.load("x", m.fused(at, 1, chunk * lines * 128), 4)


def _addresses(m: Machine, stage: Stage, slot: Any, lane: Any, warp: Any) -> _Addresses:
    quarter, row = m.both(lane, 3), row_of(m, lane)
    own = m.fused(warp, 16, row)
    if stage.tiled:
        unit = m.apart(m.right(quarter, 1), row)
        inside = m.fused(unit, 16, m.fused(m.both(quarter, 1), 8, 0))
    else:
        inside = m.fused(quarter, 8, 0)
    start = m.fused(slot, stage.chunks * stage.token_lines * 128, 0)
    x = []
    for tile in range(stage.token_tiles):
        if stage.full:
            token, lines = m.right(lane, 2), tile * stage.chunks * TOKENS
        else:
            token, lines = m.least(m.fused(m.right(lane, 2), 1, tile * TOKENS), stage.tokens - 1), 0
        unit = m.fused(quarter, 2, 0)
        if stage.tokens > 1:
            unit = m.apart(unit, m.both(token, 7))
        x.append((m.fused(m.fused(token, 1, lines), 128, start), m.fused(unit, 16, 0)))
    return _Addresses(
        stage,
        codes=m.fused(slot, stage.rows * stage.code_row, m.fused(own, stage.code_row, 0)),
        inside=inside,
        scales=m.fused(slot, stage.rows * stage.scale_row, m.fused(own, stage.scale_row, 0)),
        x=x,
    )


def multiply(m: Machine, stage: Stage, slot: Any, lane: Any, warp: Any, sums: list) -> list:
    """sums[row tile][token tile], 4 registers each, plus the products of a slot."""
    quarter = m.both(lane, 3)
    at = _addresses(m, stage, slot, lane, warp)
    parts = [(tile, half) for tile in range(stage.rows // ROWS) for half in (0, 8)]
    together = 4 if stage.tiled else 1  # words of scales per load
    scale_words: dict = {}

    def loaded(chunk: int) -> tuple:
        if chunk % together == 0:
            for part in parts:
                scale_words[part, chunk // together] = at.load_scales(m, chunk, *part, together)
        x = [[at.load_x(m, chunk, tile, half) for half in (0, 1)] for tile in range(stage.token_tiles)]
        return {part: at.load_codes(m, chunk, *part) for part in parts}, x

    out = [list(row_sums) for row_sums in sums]
    following = loaded(0)
    for chunk in range(stage.chunks):
        codes, x = following
        if chunk + 1 < stage.chunks:
            following = loaded(chunk + 1)
        for tile in range(stage.rows // ROWS):
            low, high = (scale_words[(tile, half), chunk // together][chunk % together] for half in (0, 8))
            factors = scales(m, low, high, quarter)
            for word in (0, 1):
                a, b = (
                    [m.times(pair, factor) for pair in decode(m, codes[tile, half][word])]
                    for half, factor in zip((0, 8), factors, strict=True)
                )
                for j, token in itertools.product((0, 2), range(stage.token_tiles)):
                    weights = [a[j], b[j], a[j + 1], b[j + 1]]
                    out[tile][token] = m.product(out[tile][token], weights, x[token][word][j : j + 2])
    return out


def places(m: Machine, lane: Any, warp: Any, row_tile: int, token_tile: int) -> list:
    """(row, token) of the 4 sums of a row tile and a token tile."""
    row = m.fused(warp, 16, m.fused(row_of(m, lane), 1, row_tile * ROWS))
    token = m.fused(m.both(lane, 3), 2, token_tile * TOKENS)
    return [(m.fused(row, 1, 8 * half), m.fused(token, 1, one)) for half in (0, 1) for one in (0, 1)]
