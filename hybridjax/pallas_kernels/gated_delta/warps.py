"""What each warp of a warpgroup computes by itself, in registers, and Pallas has no operations for.

Arrays of 64 rows have the layout of a wgmma accumulator: warp w holds rows 16 w to 16 w + 15, so a product of
what a warp holds is an ``mma.sync`` of 16 rows, whose operands and result lie like that, too; a right operand
must be transposed, in 8 x 8 blocks. Every function has a plain form for interpretation that rounds alike.

``eliminate`` is written over ``Emitter``, the few instructions it needs, so that tests can run it on other
threads.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from hybridjax.batch import TILE

BLOCK = 16  # rows of a warp
_WGMMA = plgpu.Layout.WGMMA
_SCALAR = plgpu.Layout.WG_SPLAT
_FLOAT16_ONE = 0x3C00


class Emitter:
    """Instructions on the registers of all threads; words are pairs of 16-bit numbers in 32 bits.

    Attributes:
      lane, warp: of a thread, within its warp and warpgroup.
    """

    def __init__(self, zero: Any = None):
        """``zero``: a zero that the compiler cannot know, so that it keeps nothing of this over a loop."""
        thread = utils.thread_idx()
        thread = thread if zero is None else arith.addi(thread, zero)
        self.lane = self.both(thread, self.word(31))
        self.warp = self.both(self.right(thread, 5), self.word(3))

    def word(self, x: int) -> Any:
        kind = ir.IntegerType.get_signless(32)
        return arith.constant(kind, ir.IntegerAttr.get(kind, x - 2**32 if x >= 2**31 else x))

    def number(self, x: float) -> Any:
        kind = ir.F32Type.get()
        return arith.constant(kind, ir.FloatAttr.get(kind, x))

    def both(self, x: Any, y: Any) -> Any:
        return arith.andi(x, y)

    def either(self, x: Any, y: Any) -> Any:
        return arith.ori(x, y)

    def left(self, x: Any, by: int) -> Any:
        return arith.shli(x, self.word(by))

    def right(self, x: Any, by: int) -> Any:
        return arith.shrui(x, self.word(by))

    def add(self, x: Any, y: Any) -> Any:
        return arith.addi(x, y)

    def multiply(self, x: Any, y: Any) -> Any:
        """Of float32."""
        return arith.mulf(x, y)

    def equal(self, x: Any, y: Any) -> Any:
        return arith.cmpi(arith.CmpIPredicate.eq, x, y)

    def at_most(self, x: Any, y: int) -> Any:
        """Of signed numbers."""
        return arith.cmpi(arith.CmpIPredicate.sle, x, self.word(y % 2**32))

    def select(self, condition: Any, x: Any, y: Any) -> Any:
        return arith.select(condition, x, y)

    def pair(self, low: Any, high: Any) -> Any:
        """A word of two float32, rounded to float16."""
        return _assembly("cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", ir.IntegerType.get_signless(32), low, high)

    def transposed(self, block: Any) -> Any:
        """A word per thread is an 8 x 8 block."""
        code = "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;"
        return _assembly(code, "=r,r", ir.IntegerType.get_signless(32), block)

    def mma(self, acc: list, left: list, right: list) -> list:
        """acc + left @ right of 16 x 16 and 16 x 8, of float16 with float32 sums."""
        code = (
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
            "{$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};"
        )
        number = ir.F32Type.get()
        kinds = ",".join(["=f"] * 4 + ["r"] * 6 + ["f"] * 4)
        found = _assembly(code, kinds, llvm.StructType.get_literal([number] * 4), *left, *right, *acc)
        return [llvm.extractvalue(number, found, [i]) for i in range(4)]


def _assembly(code: str, kinds: str, result: Any, *operands: Any) -> Any:
    return llvm.inline_asm(result, list(operands), code, kinds, has_side_effects=False)


def _elements(register: Any) -> list:
    """Of a pair of float32."""
    return [
        vector.extract(register, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([i]))
        for i in (0, 1)
    ]


def _words(x: Any) -> list[list]:
    """Of a 16-bit array: [block of 8 columns][upper and lower 8 rows of the warp]."""
    kind = ir.IntegerType.get_signless(32)
    words = [utils.bitcast(register, kind) for register in x.registers.flatten()]
    return [words[i : i + 2] for i in range(0, len(words), 2)]


def _array(registers: list, layout: Any, shape: tuple[int, ...]) -> Any:
    held = np.empty(len(registers), dtype=object)
    held[:] = registers
    held = held.reshape(layout.registers_shape(shape))
    return mgpu.FragmentedArray(_registers=held, _layout=layout, _is_signed=None)


def _run(body: Any, layouts: tuple, results: Any, *operands: Any) -> Any:
    return plgpu.inline_mgpu(arg_types=layouts, return_type=results)(body)(*operands)


# A 16 x 16 matrix of a warp is its words [half of the rows][half of the columns], None where it is zero.


def _left(emit: Any, x: list) -> list:
    zero = emit.word(0)
    return [zero if w is None else w for w in (x[0][0], x[1][0], x[0][1], x[1][1])]


def _right(emit: Any, x: list) -> list:
    return [[None if w is None else emit.transposed(w) for w in row] for row in x]


def _product(emit: Any, left: list, right: list) -> list:
    """float32 [half of the columns][4] of operands as ``_left`` and ``_right`` give them."""
    zero = emit.word(0)
    return [
        emit.mma([emit.number(0.0)] * 4, left, [zero if right[i][j] is None else right[i][j] for i in (0, 1)])
        for j in (0, 1)
    ]


def _lower(emit: Any, acc: list) -> list:
    """The words of a product that is a lower triangle."""
    halves = [[emit.pair(*acc[j][2 * i : 2 * i + 2]) for j in (0, 1)] for i in (0, 1)]
    return [[halves[0][0], None], halves[1]]


def eliminate_words(emit: Any, words: list[list], beta: list[list]) -> tuple[list, list, list]:
    """``eliminate`` on a thread's registers.

    Args:
      words: of the system, as ``_words`` gives them.
      beta: float32 pairs, [block of 8 columns][2].

    Returns:
      words of what ``eliminate`` returns.
    """
    zero = emit.word(0)
    across, along = emit.right(emit.lane, 2), emit.left(emit.both(emit.lane, emit.word(3)), 1)
    here = [emit.equal(emit.warp, emit.word(w)) for w in range(TILE // BLOCK)]
    first, second = (emit.equal(emit.both(emit.warp, emit.word(b)), emit.word(b)) for b in (1, 2))

    def own(of_warps: list) -> Any:
        upper, lower = (emit.select(first, y, x) for x, y in (of_warps[:2], of_warps[2:]))
        return emit.select(second, lower, upper)

    after = emit.add(along, emit.word(1))
    diagonal = emit.select(
        emit.equal(across, along),
        emit.word(0x0000FFFF),
        emit.select(emit.equal(across, after), emit.word(0xFFFF0000), zero),
    )
    ones = emit.both(diagonal, emit.word(_FLOAT16_ONE * 0x10001))
    low_off = emit.select(emit.equal(across, along), emit.word(0xFFFF0000), emit.word(0xFFFFFFFF))
    off = emit.select(emit.equal(across, after), emit.word(0x0000FFFF), low_off)

    def with_ones(x: list) -> list:
        """I + x for a strictly lower triangle."""
        upper = ones if x[0][0] is None else emit.either(x[0][0], ones)
        return [[upper, None], [x[1][0], emit.either(x[1][1], ones)]]

    mine = [[own([words[2 * w + j][i] for w in range(4)]) for j in (0, 1)] for i in (0, 1)]
    upper, lower = (emit.both(mine[i][i], off) for i in (0, 1))
    near = emit.equal(emit.right(across, 2), emit.right(along, 2))  # within blocks of 4 x 4
    blocks = [[emit.select(near, upper, zero), None], [None, emit.select(near, lower, zero)]]
    rest = [[emit.select(near, zero, upper), None], [mine[1][0], emit.select(near, zero, lower)]]
    # Blocks of 4: (I - b)^-1 = (I + b^2) (I + b).
    blocks_right = _right(emit, blocks)
    square = _lower(emit, _product(emit, _left(emit, blocks), blocks_right))
    square[1][0] = None
    blocks_right = [
        [emit.either(blocks_right[0][0], ones), None],
        [None, emit.either(blocks_right[1][1], ones)],
    ]
    inverse = _lower(emit, _product(emit, _left(emit, with_ones(square)), blocks_right))
    inverse[1][0] = None
    # Of 16, likewise with n = inverse @ rest, whose fourth power is zero.
    n = _lower(emit, _product(emit, _left(emit, inverse), _right(emit, rest)))
    square = _lower(emit, _product(emit, _left(emit, n), _right(emit, n)))
    half = _lower(emit, _product(emit, _left(emit, with_ones(n)), _right(emit, inverse)))
    wide = _product(emit, _left(emit, with_ones(square)), _right(emit, half))
    left = _left(emit, _lower(emit, wide))
    far = []
    for w in range(TILE // BLOCK - 1):
        block = [[words[2 * w + j][i] for j in (0, 1)] for i in (0, 1)]
        found = _product(emit, left, _right(emit, block))
        for j in (0, 1):
            pairs = [emit.pair(*found[j][2 * i : 2 * i + 2]) for i in (0, 1)]
            far.append([emit.select(here[w], zero, pair) for pair in pairs])
    far += [[zero, zero]] * 2  # nothing has values to the right of the diagonal
    far_and_one = [
        [emit.select(here[c // 2], ones, far[c][i]) if i == c % 2 else far[c][i] for i in (0, 1)]
        for c in range(8)
    ]
    scale = [[own([beta[2 * w + j][e] for w in range(4)]) for e in (0, 1)] for j in (0, 1)]
    scaled = [
        [emit.multiply(wide[j][2 * i + e], scale[j][e]) for e in (0, 1)] for j in (0, 1) for i in (0, 1)
    ]
    scaled = [emit.pair(*x) for x in scaled]  # [columns, rows]
    own_blocks = [
        [emit.select(here[c // 2], scaled[2 * (c % 2) + i], zero) for i in (0, 1)] for c in range(8)
    ]
    return far, far_and_one, own_blocks


def eliminate(
    system: jax.Array, beta: jax.Array, zero: jax.Array, interpret: Any
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The part of (I - system)^-1 that needs no other warp's rows.

    With d the inverse of the 16 x 16 blocks on the diagonal of I - system and n = d @ (system without them):
    (I - system)^-1 = (I + n^2) (I + n) d, as the fourth power of n is zero. d is made of 4 x 4 blocks in the
    same way. With no more than four terms each is about as small as the result, unlike in a longer series.

    Args:
      system: float16[64, 64], zero above the diagonal; what is on it does not count.
      beta: float32[64], an element per column.
      zero: int32, zero, see ``Emitter``.

    Returns:
      n, I + n and d diag(beta), float16[64, 64].
    """
    if interpret:
        return _eliminate(system, beta)

    def body(_, system, beta, zero):
        emit = Emitter(zero.registers.item())
        scale = [_elements(register) for register in beta.registers.flatten()]
        kind = ir.VectorType.get((2,), ir.F16Type.get())
        return [
            _array([utils.bitcast(w, kind) for pair in x for w in pair], system.layout, (TILE, TILE))
            for x in eliminate_words(emit, _words(system), scale)
        ]

    result = plgpu.ShapeDtypeStruct((TILE, TILE), jnp.float16, layout=_WGMMA)
    return _run(body, (_WGMMA, _WGMMA.reduce(0), _SCALAR), (result,) * 3, system, beta, zero)


def _eliminate(system: jax.Array, beta: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    row, column = (jax.lax.broadcasted_iota(jnp.int32, (TILE, TILE), axis) for axis in (0, 1))

    def rounded(x):
        return x.astype(jnp.float16).astype(jnp.float32)

    def product(x, y):
        return jax.lax.dot(x, y, precision="highest")

    one = jnp.where(row == column, 1.0, 0.0)
    system = jnp.where(row > column, system.astype(jnp.float32), 0.0)
    near, own = row // 4 == column // 4, row // BLOCK == column // BLOCK
    blocks, rest = jnp.where(near, system, 0.0), jnp.where(own & ~near, system, 0.0)
    inverse = rounded(product(one + rounded(product(blocks, blocks)), one + blocks))
    n = rounded(product(inverse, rest))
    half = rounded(product(one + n, inverse))
    inverse = product(one + rounded(product(n, n)), half)
    far = rounded(product(rounded(inverse), jnp.where(own, 0.0, system)))
    scaled = inverse * beta[None, :]
    return far.astype(jnp.float16), (one + far).astype(jnp.float16), scaled.astype(jnp.float16)


def lower(x: jax.Array, zero: jax.Array, interpret: Any) -> jax.Array:
    """float32[64, 64] with zeros above the diagonal, by a comparison with a constant for each element."""
    if interpret:
        row, column = (jax.lax.broadcasted_iota(jnp.int32, x.shape, axis) for axis in (0, 1))
        return jnp.where(row >= column, x, 0.0)

    def body(_, x, zero):
        emit = Emitter(zero.registers.item())
        row = emit.add(emit.right(emit.lane, 2), emit.left(emit.warp, 4))
        ahead = arith.subi(emit.left(emit.both(emit.lane, emit.word(3)), 1), row)
        kind = ir.VectorType.get((2,), ir.F32Type.get())
        kept = []
        for n, register in enumerate(x.registers.flatten()):
            most = 8 * (n % 2) - 8 * (n // 2)
            pair = [
                emit.select(emit.at_most(ahead, most - e), value, emit.number(0.0))
                for e, value in enumerate(_elements(register))
            ]
            kept.append(vector.from_elements(kind, pair))
        return _array(kept, x.layout, (TILE, TILE))

    result = plgpu.ShapeDtypeStruct((TILE, TILE), jnp.float32, layout=_WGMMA)
    return _run(body, (_WGMMA, _SCALAR), result, x, zero)


def store_transposed(ref: Any, x: jax.Array, interpret: Any) -> None:
    """ref[column, row] = x[row, column] for float32[64, 64] in global memory, 32 bytes of a row at a time.

    No value changes its thread, unlike where a thread is to write several neighbours.
    """
    if interpret:
        ref.T[...] = plgpu.layout_cast(x, plgpu.Layout.WGMMA_TRANSPOSED)
        return

    def body(_, ref, x):
        emit, number = Emitter(), ir.F32Type.get()
        (stride, one), _ = ir.MemRefType(ref.type).get_strides_and_offset()
        assert one == 1
        row = emit.add(emit.right(emit.lane, 2), emit.left(emit.warp, 4))
        column = arith.muli(emit.both(emit.lane, emit.word(3)), emit.word(2 * stride))
        start = utils.getelementptr(utils.memref_ptr(ref), [emit.add(row, column)], number)
        for n, register in enumerate(x.registers.flatten()):
            for e, value in enumerate(_elements(register)):
                at = (8 * (n // 2) + e) * stride + 8 * (n % 2)
                llvm.store(value, utils.getelementptr(start, [at], number))

    _run(body, (plgpu.RefType(), _WGMMA), None, ref, x)
