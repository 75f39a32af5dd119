"""Verification of draft trees on Hopper GPUs: both recurrences, the live states read once and never written.

A program owns one tree and head, and all or half of the state's columns. Nodes attend to their ancestors
within a tile of 64, masked by a bit per pair. The state and what a float32 product takes from another go into
the tensor cores as two 16-bit halves, so that verifying a token gives what decoding it gives to 1e-5, not
to the rounding of bfloat16.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from hybridjax.batch import TILE
from hybridjax.ops.tree import first_position
from hybridjax.pallas_kernels.gated_delta.hopper import by_column, by_row, invert, multiply, spread
from hybridjax.pallas_kernels.state_update import SIZE, multiprocessors, swizzled

_NORM_EPS = 1e-6
_LEAST = -100.0  # see gated_delta.hopper
_WGMMA = plgpu.Layout.WGMMA
_ACC = plgpu.ACC  # pyright: ignore[reportPrivateImportUsage]
_SQUARE = (TILE, TILE)
_WORDS, _LIVE = 2, 2  # rows of the node masks: words of ancestors, then whether a node is live


def node_masks(ancestors: jax.Array, positions: jax.Array) -> jax.Array:
    """int32[B, 3, 64]: per node the bits of its ancestors and itself in two words, and whether it is live."""
    live = positions >= 0
    own = ancestors & live[:, :, None] & live[:, None, :]
    extra = TILE - own.shape[1]
    own = jnp.pad(own, [(0, 0), (0, extra), (0, extra)])
    bits = jnp.left_shift(jnp.uint32(1), jnp.arange(TILE, dtype=jnp.uint32) % 32)
    words = (
        jnp.where(own, bits, jnp.uint32(0)).reshape(*own.shape[:2], _WORDS, 32).sum(axis=-1, dtype=jnp.uint32)
    )
    words = jax.lax.bitcast_convert_type(jnp.swapaxes(words, 1, 2), jnp.int32)
    alive = jnp.pad(live, [(0, 0), (0, extra)]).astype(jnp.int32)
    return jnp.concatenate([words, alive[:, None]], axis=1)


def _halves(x: jax.Array, dtype) -> tuple[jax.Array, jax.Array]:
    high = x.astype(dtype)
    return high, (x - high.astype(jnp.float32)).astype(dtype)


def _products(pairs: list[tuple[Any, Any]], staged) -> jax.Array:
    """The sum of left @ right over pairs, float32[64, 64]; a left side in registers or in memory."""

    def run(acc):
        for left, right in pairs:
            if isinstance(left, jax.Array):
                multiply(acc, left, right, staged)
            else:
                plgpu.wgmma(acc, left, right)
        return acc[...]

    return pl.run_scoped(run, _ACC(_SQUARE))


def _put_halves(x: jax.Array, smem) -> tuple[Any, Any]:
    high, low = smem.at[0], smem.at[1]
    high[...], low[...] = _halves(x, smem.dtype)
    return high, low


def _exact_product(left: tuple[Any, Any], right: jax.Array, smem) -> jax.Array:
    """left @ right, both in halves; what the low halves give together is left out."""
    high, low = _put_halves(right, smem)
    plgpu.commit_smem()
    return _products([(left[0], high), (left[0], low), (left[1], high)], None)


class _Program:
    """What both kernels do with the refs of a program; see ``_run``."""

    def __init__(self, refs: dict[str, Any], nodes: int, parts: int):
        self.refs, self.nodes, self.parts = refs, nodes, parts
        self.tree, self.head = jax.lax.axis_index("tree"), jax.lax.axis_index("head")
        self.row, self.column = (
            plgpu.broadcasted_iota(jnp.int32, _SQUARE, axis, layout=_WGMMA) for axis in range(2)
        )
        masks = refs["masks"]
        words = [spread(self._row(masks, i), TILE) for i in range(_WORDS)]
        word = jnp.where(self.column < 32, words[0], words[1])
        self.own = (jax.lax.shift_right_logical(word, self.column & 31) & 1) == 1
        self.live = spread(self._row(masks, _LIVE), TILE) > 0

    def _row(self, masks, i: int) -> jax.Array:
        return by_row(masks.at[self.tree, i])

    def columns(self, part: int):
        return pl.ds((jax.lax.axis_index("group") * self.parts + part) * TILE, TILE)

    def fetch(self, inputs: tuple, key_head) -> None:
        q_ref, k_ref, v_ref = inputs
        some, loaded = pl.ds(0, self.nodes), self.refs["loaded"]
        plgpu.copy_gmem_to_smem(q_ref.at[self.tree, :, key_head], self.refs["q"].at[some], loaded)
        plgpu.copy_gmem_to_smem(k_ref.at[self.tree, :, key_head], self.refs["k"].at[some], loaded)
        for part in range(self.parts):
            values = v_ref.at[self.tree, :, self.head, self.columns(part)]
            plgpu.copy_gmem_to_smem(values, self.refs["v"].at[part, some], loaded)

    def read_state(self, part: int, lefts: list) -> list[jax.Array]:
        """left @ state for each of ``lefts`` in shared memory; a fresh sequence has a state of zeros."""
        slot, first, smem = self.refs["slot"], self.refs["first"], self.refs["state"]
        source = self.refs["pool"].at[slot[self.tree], self.head, :, self.columns(part)]
        state = plgpu.load(source, layout=_WGMMA, optimized=False)
        state = jnp.where(jax.lax.broadcast_in_dim(first[self.tree], state.shape, ()) > 0, state, 0.0)
        high, low = _put_halves(state, smem)
        plgpu.commit_smem()
        return [_products([(left, high), (left, low)], None) for left in lefts]

    def leave(self, x: jax.Array, ref, part: int) -> None:
        """Writes the rows of the nodes, zero for padding."""
        smem = self.refs["out"]
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        smem[...] = jnp.where(self.live, x, 0.0)
        plgpu.commit_smem()
        target = ref.at[self.tree, :, self.head, self.columns(part)]
        plgpu.copy_smem_to_gmem(smem.at[pl.ds(0, self.nodes)], target)

    def column_of(self, row: int, x: jax.Array) -> jax.Array:
        """A value per row as one per column, by way of shared memory."""
        self.refs["vectors"][row] = x
        plgpu.commit_smem()
        return by_column(self.refs["vectors"].at[row])


def _run(
    name: str,
    body: Callable[..., None],
    nodes_of: tuple[jax.Array, ...],
    operands: tuple[jax.Array, ...],
    pool: jax.Array,
    slot: jax.Array,
    positions: jax.Array,
    ancestors: jax.Array,
    *,
    outputs: int,
    solves: bool,
    interpret: Any,
) -> tuple[jax.Array, ...]:
    """Runs ``body(program, refs of nodes_of, of operands, of outputs)`` per tree, head and group of columns.

    Args:
      nodes_of: q, k, v [B, N, H, 128]; operands: further arrays; outputs: how many [B, N, Hv, 128] come out.
      solves: whether it solves a system, which takes more shared memory.
    """
    batch, nodes = positions.shape
    heads, dtype = pool.shape[1], nodes_of[0].dtype
    count = -(-nodes // 8) * 8  # the copy engine brings whole rows of 8
    if count > nodes:
        nodes_of = tuple(jnp.pad(x, [(0, 0), (0, count - nodes), (0, 0), (0, 0)]) for x in nodes_of)
    halves = SIZE // TILE
    parts = 1 if batch * heads <= multiprocessors() else halves

    names = (
        "q",
        "k",
        "v",
        "state",
        "out",
        "vectors",
        "loaded",
        "half",
        "inverse",
        "scores",
    )

    def kernel(slot_ref, first_ref, masks_ref, pool_ref, *refs):
        inputs, rest = refs[: len(nodes_of)], refs[len(nodes_of) :]
        others, rest = rest[: len(operands)], rest[len(operands) :]
        outs, scratch = rest[:outputs], rest[outputs:]
        known = dict(zip(names, scratch), slot=slot_ref, first=first_ref, masks=masks_ref, pool=pool_ref)
        known["staged"], known["staged_half"] = scratch[len(names) :] or (None, None)
        body(_Program(known, count, parts), inputs, others, outs)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    kernel.__name__ = name
    narrow = swizzled(128, 2)

    def smem(*shape, dtype=dtype):
        return plgpu.SMEM(shape, dtype, transforms=narrow)

    out = jax.ShapeDtypeStruct((batch, count, heads, SIZE), jnp.float32)
    found = plgpu.kernel(
        kernel,
        out_type=(out,) * outputs,
        grid=(batch, heads, halves // parts),
        grid_names=("tree", "head", "group"),
        scratch_types=[
            smem(TILE, SIZE),
            smem(TILE, SIZE),
            smem(parts, *_SQUARE),
            smem(2, SIZE, TILE),
            plgpu.SMEM(_SQUARE, jnp.float32, transforms=swizzled(128, 4)),
            plgpu.SMEM((2, TILE), jnp.float32),
            plgpu.Barrier(num_arrivals=2 + parts),
            *([smem(2, *_SQUARE, dtype=jnp.float16)] if solves or interpret else []),
            *([smem(2, *_SQUARE)] * 2 if solves or interpret else []),
            *([smem(*_SQUARE), smem(*_SQUARE, dtype=jnp.float16)] if interpret else []),
        ],
        interpret=interpret,
    )(slot, first_position(positions), node_masks(ancestors, positions), pool, *nodes_of, *operands)
    return tuple(x[:, :nodes] if count > nodes else x for x in found)


@functools.partial(jax.jit, static_argnames=("scale", "interpret"))
def simple_gla(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    slopes: jax.Array,
    pool: jax.Array,
    slot: jax.Array,
    positions: jax.Array,
    ancestors: jax.Array,
    *,
    scale: float,
    interpret: Any = None,
) -> jax.Array:
    """As ops.simple_gla_verify for 16-bit q, k, v [B, N, H, 128], N at most 64, and a float32 pool."""

    def body(program: _Program, inputs, others, outs):
        refs = program.refs
        program.fetch(inputs, program.head)
        slope = others[0][program.head]
        depth = jnp.sum(jnp.where(program.own, 1.0, 0.0), axis=1)
        distance = spread(depth, TILE) - program.column_of(0, depth)
        decay = jnp.exp(-slope * jnp.maximum(distance, 0.0))
        reach = spread(scale * jnp.exp(-slope * depth), TILE)
        plgpu.barrier_wait(refs["loaded"])
        scores = _products([(refs["q"], refs["k"].T)], None)
        halves = _halves(jnp.where(program.own, scale * scores * decay, 0.0), refs["v"].dtype)
        for part in range(program.parts):
            values = refs["v"].at[part]
            known = plgpu.load(values, layout=_WGMMA).astype(jnp.float32)
            values[...] = jnp.where(program.live, known, 0.0).astype(values.dtype)
            (past,) = program.read_state(part, [refs["q"]])
            near = _products([(x, values) for x in halves], refs["staged"])
            program.leave(reach * past + near, outs[0], part)

    (out,) = _run(
        "simple_gla_verify",
        body,
        (q, k, v),
        (slopes,),
        pool,
        slot,
        positions,
        ancestors,
        outputs=1,
        solves=False,
        interpret=interpret,
    )
    return out


@functools.partial(jax.jit, static_argnames=("interpret",))
def gated_delta(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    pool: jax.Array,
    slot: jax.Array,
    positions: jax.Array,
    ancestors: jax.Array,
    *,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """As ops.gated_delta_verify for 16-bit q, k, v of heads of 128, at most 64 nodes, and a float32 pool."""
    nodes = positions.shape[1]
    share = v.shape[2] // k.shape[2]
    gates = jnp.stack([jnp.maximum(g, _LEAST), beta], axis=1)  # [B, 2, N, Hv]
    gates = jnp.where((positions >= 0)[:, None, :, None], gates, 0.0)
    gates = jnp.pad(jnp.swapaxes(gates, 2, 3), [(0, 0), (0, 0), (0, 0), (0, TILE - nodes)])

    def body(program: _Program, inputs, others, outs):
        refs, tree, head = program.refs, program.tree, program.head
        program.fetch(inputs, jax.lax.div(head, jnp.int32(share)))
        diagonal = program.row == program.column
        g_ref, beta_ref = (others[0].at[tree, i, head] for i in range(2))
        sums = jnp.sum(jnp.where(program.own, by_column(g_ref), 0.0), axis=1)
        decay = jnp.exp(jnp.minimum(spread(sums, TILE) - program.column_of(0, sums), 0.0))
        fade, rate = jnp.exp(sums), by_row(beta_ref)
        plgpu.barrier_wait(refs["loaded"])
        alike = _products([(refs["k"], refs["k"].T)], None)
        squares = jnp.sum(jnp.where(diagonal & program.live, alike, 0.0), axis=1)
        key_scale = jax.lax.rsqrt(squares + _NORM_EPS)
        decay = decay * program.column_of(1, key_scale)
        wide = plgpu.load(refs["q"], layout=_WGMMA).astype(jnp.float32)
        query_scale = SIZE**-0.5 * jax.lax.rsqrt(jnp.sum(wide * wide, axis=1) + _NORM_EPS)
        scores = _products([(refs["q"], refs["k"].T)], None)
        scores = jnp.where(program.own, scores * decay * spread(query_scale, TILE), 0.0)
        scores = _put_halves(scores, refs["scores"])
        system = jnp.where(program.own, alike * decay * spread(key_scale * rate, TILE), 0.0)
        system = jnp.where(diagonal, 0.0, system)
        scratch = (refs["half"].at[0], refs["half"].at[1], refs["staged_half"])
        inverse = invert(system.astype(jnp.float16), program.row, program.column, *scratch, rows=nodes)
        inverse = _put_halves(inverse, refs["inverse"])
        for part in range(program.parts):
            known, past = program.read_state(part, [refs["k"], refs["q"]])
            values = plgpu.load(refs["v"].at[part], layout=_WGMMA).astype(jnp.float32)
            error = spread(rate, TILE) * (values - spread(fade * key_scale, TILE) * known)
            error = jnp.where(program.live, error, 0.0)
            smem = refs["state"].at[:, pl.ds(0, TILE)]  # the state has been read
            corrections = _exact_product(inverse, error, smem)
            near = _exact_product(scores, corrections, smem)
            program.leave(spread(fade * query_scale, TILE) * past + near, outs[0], part)
            program.leave(spread(key_scale, TILE) * corrections, outs[1], part)

    out, corrections = _run(
        "gated_delta_verify",
        body,
        (q, k, v),
        (gates,),
        pool,
        slot,
        positions,
        ancestors,
        outputs=2,
        solves=True,
        interpret=interpret,
    )
    return out, corrections
