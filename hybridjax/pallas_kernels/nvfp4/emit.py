"""``fragment`` as instructions inside a Pallas kernel."""

# The bindings of MLIR have no complete types.
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false

import itertools
from typing import Any

import jax.experimental.mosaic.gpu as mgpu
import numpy as np
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm, vector

from hybridjax.pallas_kernels.nvfp4 import fragment


def _i32() -> ir.Type:
    return ir.IntegerType.get_signless(32)


def _number(value: Any) -> ir.Value:
    if isinstance(value, ir.Value):
        return value
    return arith.constant(_i32(), ir.IntegerAttr.get(_i32(), value - 2**32 if value >= 2**31 else value))


def _element(values: ir.Value, index: int) -> ir.Value:
    return vector.extract(values, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([index]))


class Ptx:
    """A ``fragment.Machine`` that emits code; ``arrays`` are references to shared memory by name."""

    def __init__(self, **arrays: ir.Value):
        self._pointers = {name: utils.memref_ptr(array) for name, array in arrays.items()}
        self._kept: dict[int, ir.Value] = {}

    def kept(self, constant):
        if constant not in self._kept:
            # Plus a zero that the assembler does not know: it would make shifts and adds for the integer
            # pipe, which masks keep busy, of what the floating-point pipe does as one multiply-add.
            zero = utils.inline_ptx(
                "{ .reg .b32 t; mov.u32 t, %smid; shr.u32 $0, t, 24; }", result_types=_i32()
            )
            self._kept[constant] = arith.ori(zero, _number(constant))
        return self._kept[constant]

    def both(self, a, b):
        return arith.andi(_number(a), _number(b))

    def either(self, a, b):
        return arith.ori(_number(a), _number(b))

    def apart(self, a, b):
        return arith.xori(_number(a), _number(b))

    def right(self, a, places):
        return arith.shrui(_number(a), _number(places))

    def rotated(self, a, places):
        a = _number(a)
        return utils.inline_ptx(f"shf.r.wrap.b32 $0, $1, $1, {places};", a, result_types=_i32())

    def fused(self, a, factor, term):
        product = a if isinstance(factor, int) and factor == 1 else arith.muli(_number(a), _number(factor))
        return product if isinstance(term, int) and term == 0 else arith.addi(product, _number(term))

    def least(self, a, limit):
        return arith.minui(_number(a), _number(limit))

    def permute(self, a, b, selector):
        operands = map(_number, (a, b, selector))
        return utils.inline_ptx("prmt.b32 $0, $1, $2, $3;", *operands, result_types=_i32())

    def times(self, a, b):
        operands = map(_number, (a, b))
        return utils.inline_ptx("mul.rn.bf16x2 $0, $1, $2;", *operands, result_types=_i32())

    def load(self, array, offset, words):
        pointer = self._pointers[array]
        byte = ir.IntegerType.get_signless(8)
        flags = llvm.GEPNoWrapFlags.none
        at = llvm.getelementptr(pointer.type, pointer, [_number(offset)], [-(2**31)], byte, flags)
        if words == 1:
            return [llvm.load(_i32(), at, alignment=4)]
        loaded = llvm.load(ir.VectorType.get((words,), _i32()), at, alignment=4 * words)
        return [_element(loaded, i) for i in range(words)]

    def product(self, sums, a, b):
        done = utils.inline_ptx(
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
            "{$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};",
            *a,
            *b,
            *sums,
            result_types=[ir.F32Type.get()] * 4,
            convergent=True,
        )
        return list(done)


def _thread(m: Ptx) -> tuple[ir.Value, ir.Value]:
    """Lane and warp."""
    index = arith.index_cast(_i32(), gpu.thread_id(gpu.Dimension.x))
    return m.both(index, 31), m.right(index, 5)


def _scalars(sums: mgpu.FragmentedArray) -> list:
    """[row tiles][token tiles] of the 4 registers that an instruction takes."""
    rows, tokens = sums.registers.shape[:2]
    return [
        [
            [_element(pair, i) for pair in sums.registers[row, token].flatten() for i in (0, 1)]
            for token in range(tokens)
        ]
        for row in range(rows)
    ]


def multiply(stage: fragment.Stage, slot, codes, scales, x, sums: mgpu.FragmentedArray):
    """What ``fragment.multiply`` does, in ``plgpu.inline_mgpu``; sums in the layout of mma's sums."""
    m = Ptx(codes=codes, scales=scales, x=x)
    out = fragment.multiply(m, stage, slot.registers.item(), *_thread(m), _scalars(sums))
    pair = ir.VectorType.get((2,), ir.F32Type.get())
    flat = list(itertools.chain.from_iterable(itertools.chain.from_iterable(out)))
    registers = np.empty(len(flat) // 2, dtype=object)
    registers[:] = [vector.from_elements(pair, flat[i : i + 2]) for i in range(0, len(flat), 2)]
    shaped = registers.reshape(sums.registers.shape)
    return mgpu.FragmentedArray(_registers=shaped, _layout=sums.layout, _is_signed=None)


def factors(stage: fragment.Stage) -> int:
    """Rows of the weights of which a lane holds sums."""
    return 2 * stage.rows // fragment.ROWS


def _at(array: ir.Value, of: ir.Type, width: int, line: ir.Value, column: ir.Value) -> ir.Value:
    """The address of an element of an array whose rows are ``width`` long."""
    i64 = ir.IntegerType.get_signless(64)
    pointer = utils.memref_ptr(array)
    wide = arith.addi(arith.muli(arith.extui(i64, line), utils.c(width, i64)), arith.extui(i64, column))
    return llvm.getelementptr(pointer.type, pointer, [wide], [-(2**31)], of, llvm.GEPNoWrapFlags.none)


def load_factors(stage: fragment.Stage, width: int, row, scale_row, scale) -> mgpu.FragmentedArray:
    """scale[scale_row, row + r] * 2^8 for the rows r of a lane, a register each, as ``store`` takes them."""
    m = Ptx()
    lane, warp = _thread(m)
    row, scale_row = (x.registers.item() for x in (row, scale_row))
    f32 = ir.F32Type.get()
    registers = np.empty(factors(stage), dtype=object)
    for i in range(factors(stage)):
        r, _ = fragment.places(m, lane, warp, i // 2, 0)[2 * (i % 2)]
        loaded = llvm.load(f32, _at(scale, f32, width, scale_row, m.fused(row, 1, r)), alignment=4)
        scaled = arith.mulf(loaded, utils.c(fragment.SCALE, f32))
        registers[i] = vector.from_elements(ir.VectorType.get((1,), f32), [scaled])
    layout = mgpu.WGStridedFragLayout((len(registers) * 128,), vec_size=1)
    return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)


def store(stage: fragment.Stage, width: int, first, row, scale, out, sums: mgpu.FragmentedArray):
    """Writes out[first + token, row + r] = sums[r, token] * scale of r, which ``load_factors`` gave.

    ``width`` is that of the array's rows, ``first`` counts such rows.
    """
    m = Ptx()
    lane, warp = _thread(m)
    first, row = (x.registers.item() for x in (first, row))
    f32 = ir.F32Type.get()
    element = ir.MemRefType(out.type).element_type
    for i, tiles in enumerate(_scalars(sums)):
        for j, registers in enumerate(tiles):
            for index, ((r, token), value) in enumerate(zip(fragment.places(m, lane, warp, i, j), registers)):
                scaled = arith.mulf(value, _element(scale.registers[2 * i + index // 2], 0))
                live = arith.cmpi(arith.CmpIPredicate.ult, token, _number(stage.tokens))
                with mgpu.when(live):
                    narrow = scaled if element == f32 else arith.truncf(element, scaled)
                    at = _at(out, element, width, m.fused(first, 1, token), m.fused(row, 1, r))
                    llvm.store(narrow, at, alignment=element.width // 8)
    return ()
