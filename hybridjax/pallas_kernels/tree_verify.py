"""Verification of draft trees on Hopper GPUs: both recurrences, the live states read once and never written.

A program owns one tree and head, and all or half of the state's columns. What the nodes give each other
needs no state S, so it is worked out while the copy engine brings S. With A and P the products of keys with
keys and of queries with keys, decayed, scaled and masked to ancestors, corrections u and outputs o are

    u = start - A u,   o = late + P u,   start = rate V - gain K S,   late = reach Q S.

They are linear in S: u = X - Y S, o = W + Z S. X, W and Y, Z solve the same recurrence on the channels of the
values and of the keys, node after node in float32 with a thread per channel. One product with the transposed
state, a left operand from registers, ends the work. State, Y and Z enter the tensor cores as two 16-bit
halves each, so that verifying a token gives what decoding it gives to 1e-4, not to the rounding of bfloat16.
SimpleGLA has u = V, and Q as it is for Z.

Few trees leave multiprocessors idle, and the chain of steps is what takes time: the gated delta rule then has
two warpgroups a program, one for the keys' channels, one for the values' and the state. Of many trees, three
programs share a multiprocessor if each has one buffer for both halves of a state and takes them in pieces,
with fewer registers.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from hybridjax.batch import TILE
from hybridjax.ops.tree import first_position
from hybridjax.pallas_kernels.gated_delta.hopper import by_column, by_row, multiply, spread
from hybridjax.pallas_kernels.state_update import SIZE, multiprocessors, swizzled

_NORM_EPS = 1e-6
_LEAST = -100.0  # see gated_delta.hopper
_WORD = 32  # nodes whose bits are one word of a mask
_BLOCK = 16  # nodes whose steps are unrolled
_WGMMA, _TRANSPOSED = plgpu.Layout.WGMMA, plgpu.Layout.WGMMA_TRANSPOSED
# Of [128, nodes]: a channel per thread. Pallas finds layouts sooner if it knows no conversion of this one.
_CHANNELS = plgpu.Layout.TILED(plgpu.Tiling(((128, 1), (32, 1), (8, 1))), (-6,), (-4, -2), -1)
_CHANNEL = _CHANNELS.reduce(1)
# Of [nodes] that are not side by side in memory.
_APART = plgpu.Layout.TILED(plgpu.Tiling(((8,), (1,))), (plgpu.Replicated(4),), (-2, plgpu.Replicated(4)), -1)
_ACC = plgpu.ACC  # pyright: ignore[reportPrivateImportUsage]
# Rows of the vectors in shared memory; an element per node, in the last two per row of keys over queries.
_GATE, _RATE, _SUM, _READ, _VALUE, _VECTORS = range(6)


def node_masks(ancestors: jax.Array, positions: jax.Array, count: int, rows: int) -> jax.Array:
    """Bits of nodes, in words of 32: int32[B, count / 32 rounded up, rows + 1].

    Rows n and ``count`` + n hold the ancestors of node n and itself, the last row which nodes are live.
    """
    live = positions >= 0
    own = ancestors & live[:, :, None] & live[:, None, :]
    nodes, words = own.shape[1], -(-count // _WORD)
    sides = (0, 0), (0, words * _WORD - nodes)
    own = jnp.pad(own, [sides[0], (0, count - nodes), sides[1]])
    own = jnp.pad(jnp.concatenate([own, own], axis=1), [(0, 0), (0, rows - 2 * count), (0, 0)])
    every = jnp.concatenate([own, jnp.pad(live, sides)[:, None]], axis=1)
    every = every.reshape(*every.shape[:2], words, _WORD)
    bits = jnp.left_shift(jnp.uint32(1), jnp.arange(_WORD, dtype=jnp.uint32))
    found = jnp.where(every, bits, jnp.uint32(0)).sum(axis=-1, dtype=jnp.uint32)
    return jax.lax.bitcast_convert_type(jnp.swapaxes(found, 1, 2), jnp.int32)


def _halves(x: jax.Array, dtype) -> tuple[jax.Array, jax.Array]:
    """Two of ``dtype`` whose sum is x to 16 bits or more. Cutting off is cheaper than rounding."""
    if dtype == jnp.bfloat16:
        bits = jax.lax.bitcast_convert_type(x, jnp.int32) & -65536
        high = jax.lax.bitcast_convert_type(bits, jnp.float32)
    else:
        high = x.astype(dtype).astype(jnp.float32)
    return high.astype(dtype), (x - high).astype(dtype)


def _iota(shape: tuple[int, ...], axis: int, layout: Any = _WGMMA) -> jax.Array:
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=layout)


def _whole(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return jax.lax.broadcast_in_dim(x, shape, ())


def _bit(words: list[jax.Array], column: jax.Array) -> jax.Array:
    """Whether the bit with a column's number is set in words of the same shape."""
    word = words[0] if len(words) == 1 else jnp.where(column < _WORD, *words)
    return (jax.lax.shift_right_logical(word, column & (_WORD - 1)) & 1) == 1


def _columns(x: jax.Array, start: int, end: int) -> jax.Array:
    return jax.lax.slice(x, (0, start), (x.shape[0], end))


def _channels(ref) -> jax.Array:
    """Rows of nodes in shared memory, float32 and a node per column."""
    return plgpu.load(ref.T, layout=_CHANNELS, optimized=False).astype(jnp.float32)


def _given(u: jax.Array, links: jax.Array) -> jax.Array:
    return jax.lax.broadcast_in_dim(u, links.shape, (0,)) * links


class _Links:
    """What nodes give each other: float32[N, >= 2 N] in shared memory, -A^T beside P^T."""

    def __init__(self, ref, count: int, solves: bool):
        self.ref, self.count, self.solves = ref, count, solves

    def row(self, node, to, size: int) -> jax.Array:
        """What a node with corrections of one gives to columns from ``to`` on."""
        return by_column(self.ref.at[node, pl.ds(to, size)], SIZE, _CHANNELS)

    def walk(self, *pairs: tuple[jax.Array, jax.Array | None], at=0) -> list[jax.Array]:
        """u beside o, [128, 2 n], of n nodes from ``at`` on, for each start and late; late None: 0.

        Earlier nodes have given to them already.
        """
        nodes = pairs[0][0].shape[1]
        states, found, pair = [*pairs], [([], []) for _ in pairs], _iota((SIZE, 2), 1, _CHANNELS)
        for m in range(nodes):
            left = nodes - m
            to_late = self.row(at + m, self.count + at + m, left)
            to_start = self.row(at + m, at + m + 1, left - 1) if self.solves and left > 1 else None
            for i, (start, late) in enumerate(states):
                # The compiler sees which of two it is. A sum of one element Pallas would take for a reshape.
                two = _columns(start, 0, 2) if left > 1 else jnp.concatenate([start, start], axis=1)
                u = jnp.sum(jnp.where(pair == 0, two, -0.0), axis=1)
                more = _given(u, to_late)
                late = more if late is None else late + more
                found[i][0].append(_columns(start, 0, 1))
                found[i][1].append(_columns(late, 0, 1))
                if left > 1:
                    start, late = (_columns(x, 1, left) for x in (start, late))
                    if to_start is not None:
                        start = start + _given(u, to_start)
                states[i] = start, late
        return [jnp.concatenate([*known, *out], axis=1) for known, out in found]

    def walk_blocks(self, both) -> None:
        """The same in place, for ``both`` float32[2 N, 128] in shared memory: start over late."""

        def block(i, _):
            at = i * _BLOCK
            refs = [both.at[pl.ds(first + at, _BLOCK)] for first in (0, self.count)]

            def earlier(m, sums):
                u = plgpu.load(both.at[m], layout=_CHANNEL, optimized=False)
                start, late = sums
                if self.solves:
                    start = start + _given(u, self.row(m, at, _BLOCK))
                return start, late + _given(u, self.row(m, self.count + at, _BLOCK))

            start, late = jax.lax.fori_loop(0, at, earlier, tuple(_channels(ref) for ref in refs))
            (found,) = self.walk((start, late), at=at)
            for j, ref in enumerate(refs):
                ref.T[...] = _columns(found, j * _BLOCK, (j + 1) * _BLOCK)
            return ()

        jax.lax.fori_loop(0, self.count // _BLOCK, block, ())


@dataclasses.dataclass(frozen=True)
class _Division:
    """How the work is divided.

    Attributes:
      parts: halves of a state's columns per program.
      warpgroups: per program; two share the work if there are corrections and few nodes.
      packed: whether the halves share a buffer, so that more programs fit a multiprocessor.
    """

    parts: int
    warpgroups: int = 1
    packed: bool = False

    @property
    def buffers(self) -> int:
        return 1 if self.packed else self.parts

    @property
    def pieces(self) -> int:
        """In which a half of a state is taken to registers."""
        return 2 if self.packed else 1


def _divide(states: int, count: int, solves: bool, parts: int | None) -> _Division:
    """What was faster on an H200 for the states of trees of ``count`` nodes."""
    cores = multiprocessors()
    if parts is None:
        parts = 1 if states <= cores or count > _WORD else SIZE // TILE
    shared = solves and parts == 1 and states <= cores and count <= _BLOCK
    # Two programs fit a multiprocessor anyway.
    return _Division(parts, 2 if shared else 1, packed=parts > 1 and states > 2 * cores)


class _Program:
    """One tree, one head and some halves of the state's columns; ``refs``: by name, see ``_run``."""

    def __init__(self, refs: dict[str, Any], count: int, division: _Division, solves: bool, scale: float):
        self.refs, self.count, self.division, self.solves, self.scale = refs, count, division, solves, scale
        self.tree, self.head = jax.lax.axis_index("tree"), jax.lax.axis_index("head")
        rows = refs["both"]
        self.keys, self.queries = (rows.at[pl.ds(i * count, count)] for i in range(2))
        self.rows = refs["links"].shape[1]
        self.width = 2 * count if solves else count
        self.readers = (
            [rows.at[pl.ds(i * self.width, self.width)] for i in range(2)] if solves else [self.queries]
        )
        self.links = _Links(refs["links"], count, solves)

    def columns(self, part: int):
        return pl.ds((jax.lax.axis_index("group") * self.division.parts + part) * TILE, TILE)

    def ask(self) -> None:
        """Reads what tells of the tree, all at once: an answer takes as long as hundreds of instructions."""
        refs, tree = self.refs, self.tree
        self.slot, self.first = refs["slot"][tree], refs["first"][tree]
        self.words = [refs["masks"][tree, i, self.rows] for i in range(refs["masks"].shape[1])]

    def live_columns(self, shape: tuple[int, ...], layout) -> jax.Array:
        """Whether the node of a column is live."""
        return _bit([_whole(word, shape) for word in self.words], _iota(shape, 1, layout))

    def fetch_nodes(self) -> None:
        refs, tree = self.refs, self.tree
        key_head = jax.lax.div(self.head, jnp.int32(refs["v_in"].shape[2] // refs["k_in"].shape[2]))
        plgpu.copy_gmem_to_smem(refs["k_in"].at[tree, :, key_head], self.keys, refs["loaded"])
        plgpu.copy_gmem_to_smem(refs["q_in"].at[tree, :, key_head], self.queries, refs["loaded"])
        plgpu.copy_gmem_to_smem(refs["v_in"].at[tree, :, self.head], refs["values"], refs["loaded"])

    def fetch_state(self) -> None:
        for part in range(self.division.buffers):
            self.fetch_part(part)

    def fetch_part(self, part: int) -> None:
        source = self.refs["pool"].at[self.slot, self.head, :, self.columns(part)]
        buffer = part % self.division.buffers
        plgpu.copy_gmem_to_smem(source, self.refs["state"].at[buffer], self.refs["arrived"].at[buffer])

    def link_nodes(self, fetch: Callable[[], None] | None = None) -> None:
        """Fills ``links``, and ``vectors`` with the factors of rows; ``fetch``: called once it has asked."""
        refs, count, vectors = self.refs, self.count, self.refs["vectors"]
        some, shape = pl.ds(0, count), (TILE, count)
        tiles = [pl.ds(i * TILE, TILE) for i in range(self.rows // TILE)]
        # All reads of global memory are under way before the first is waited for, or anything is written.
        words = range(refs["masks"].shape[1])
        masks = [[by_row(refs["masks"].at[self.tree, i, tile]) for i in words] for tile in tiles]
        gates = refs["gates"]
        if self.solves:
            asked = [plgpu.load(x.at[self.tree, :, self.head], layout=_APART, optimized=False) for x in gates]
        else:
            asked, g = [], _whole(-gates[0][self.head], shape)
        if fetch is not None:
            fetch()
        for i, x in zip((_GATE, _RATE), asked):
            vectors[i, some] = x

        column = _iota(shape, 1)
        own = [_bit([spread(word, count) for word in mask], column) for mask in masks]
        if self.solves:
            plgpu.commit_smem()
            g = jnp.maximum(by_column(vectors.at[_GATE, some], TILE), _LEAST)
        # The compiler would put behind a later wait what could be done before it.
        plgpu.barrier_wait(refs["loaded"])

        def decay():
            """Sums of logarithms to each row, and decays from each column's node to it."""
            sums = [jnp.sum(jnp.where(x, g, 0.0), axis=1) for x in own]
            vectors[_SUM, tiles[0]] = sums[0]
            plgpu.commit_smem()
            before = by_column(vectors.at[_SUM, some], TILE)
            return sums, [jnp.exp(jnp.minimum(spread(x, count) - before, 0.0)) for x in sums]

        sums, decays = [], []
        for i, tile in enumerate(tiles):

            def multiply_rows(acc, tile=tile, first=i == 0):
                plgpu.wgmma(acc, refs["both"].at[tile], refs["both"].at[pl.ds(0, self.width)].T)
                decayed = decay() if first else ()  # while the product runs
                return acc[...], decayed

            products, decayed = pl.run_scoped(multiply_rows, _ACC((TILE, self.width)))
            sums, decays = decayed or (sums, decays)
            live = functools.reduce(jnp.bitwise_or, masks[i]) != 0
            factor, taken = self.scale, own[i]
            if self.solves:
                row = i * TILE + _iota(products.shape, 0)
                squares = jnp.where(row == _iota(products.shape, 1), products, 0.0)
                norm = jax.lax.rsqrt(jnp.sum(squares, axis=1) + _NORM_EPS)
                rate = by_row(vectors.at[_RATE, tile])
                index = i * TILE + _iota((TILE,), 0, _WGMMA.reduce(1))
                factor = jnp.where(index < count, -rate * norm * norm, SIZE**-0.5 * norm)
                vectors[_VALUE, tile] = jnp.where(live, rate * norm, 0.0)
                products = _columns(products, 0, count) * spread(factor, count)
                taken = taken & (i * TILE + _iota(shape, 0) != column)
            else:
                products = products * factor
            vectors[_READ, tile] = jnp.where(live, factor * jnp.exp(sums[i]), 0.0)
            products = jnp.where(taken, products * decays[i], 0.0)
            refs["links"].at[:, tile].T[...] = plgpu.layout_cast(products, _TRANSPOSED)
        plgpu.commit_smem()

    def scaled(self, ref, vector: int | None, first: int = 0) -> jax.Array:
        """Nodes, a column each, times elements of a vector from ``first`` on; padding may hold NaN."""
        x = _channels(ref)
        if vector is not None:
            x = x * by_column(self.refs["vectors"].at[vector, pl.ds(first, self.count)], SIZE, _CHANNELS)
        return jnp.where(self.live_columns(x.shape, _CHANNELS), x, 0.0)

    def walk(self, start: jax.Array, late: jax.Array | None) -> jax.Array | None:
        """u beside o on channels, [128, 2 N]; of many nodes None, it is then left in ``base``."""
        base, count = self.refs["base"], self.count
        if count <= _BLOCK:
            return self.links.walk((start, late))[0]
        if late is None:
            late = plgpu.layout_cast(jnp.zeros(start.shape, jnp.float32), _CHANNELS)
        for i, x in enumerate((start, late)):
            base.at[pl.ds(i * count, count)].T[...] = x
        self.links.walk_blocks(base)
        return None

    def reading(self) -> tuple[jax.Array, jax.Array]:
        return self.scaled(self.keys, _READ), self.scaled(self.queries, _READ, self.count)

    def writing(self) -> tuple[jax.Array, None]:
        return self.scaled(self.refs["values"], _VALUE if self.solves else None), None

    def make_readers(self, done: Callable[[int], None] | None = None, with_values: bool = False) -> None:
        """Leaves -Y over Z, and behind them their low halves, where keys and queries were.

        Args:
          done: called with 0 when the former can be read, and with 1 when the latter can.
          with_values: does what ``add_values`` does too, of at most ``_BLOCK`` nodes.
        """
        values = None
        if with_values:
            found, values = self.links.walk(self.reading(), self.writing())
        else:
            found = self.walk(*self.reading())
        size = self.count if found is None else self.width
        plgpu.commit_smem()
        for at in range(0, self.width, size):
            here = pl.ds(at, size)
            piece = _channels(self.refs["base"].at[here]) if found is None else found
            for i, (half, reader) in enumerate(zip(_halves(piece, self.readers[0].dtype), self.readers)):
                reader.at[here].T[...] = half
                if done is not None:
                    plgpu.commit_smem()
                    done(i)
        if values is not None:
            self.leave_values(values)
        elif done is None:
            plgpu.commit_smem()

    def leave_values(self, found: jax.Array) -> None:
        self.refs["base"].T[...] = _columns(found, 2 * self.count - self.width, 2 * self.count)
        plgpu.commit_smem()

    def add_values(self) -> None:
        """Leaves X over W, or the latter alone, in the last rows of ``base``."""
        found = self.walk(*self.writing())
        if found is not None:
            self.leave_values(found)
        else:
            plgpu.commit_smem()

    def read_state(
        self,
        staged,
        before: Callable[[], None] | None = None,
        ready: Callable[[int], None] | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        """Adds what the state gives and writes the outputs.

        Args:
          before: called when the state is in registers; ``ready``: before the readers' high (0) and low (1)
            halves are read; ``meanwhile``: while the products run.
        """
        refs, count, division = self.refs, self.count, self.division
        size = SIZE // division.pieces
        for part in range(division.parts):
            buffer, following = part % division.buffers, part + division.buffers
            plgpu.barrier_wait(refs["arrived"].at[buffer])

            def take(piece, buffer=buffer):
                rows = refs["state"].at[buffer, pl.ds(piece * size, size)]
                state = plgpu.load(rows.T, layout=_TRANSPOSED, optimized=False)
                # Of 16 bits each, what changes hands is less.
                return [plgpu.layout_cast(x, _WGMMA) for x in _halves(state, self.keys.dtype)]

            whole = None if division.packed else take(0)
            if part == 0 and before is not None:
                before()

            def read(acc, part=part, whole=whole, take=take, following=following):
                for piece in range(division.pieces):
                    halves = take(piece) if whole is None else whole
                    if piece == division.pieces - 1 and following < division.parts:
                        plgpu.commit_smem()  # all have taken what the next half overwrites
                        self.fetch_part(following)
                    for i, reader in enumerate(self.readers):
                        if part + piece == 0 and ready is not None:
                            ready(i)
                        for half in halves[: 2 - i]:
                            multiply(acc, half, reader.at[:, pl.ds(piece * size, size)].T, staged)
                if part == 0 and meanwhile is not None:
                    meanwhile()
                return acc[...]

            past = pl.run_scoped(read, _ACC((TILE, self.width)))
            # A select: whatever the slot of a fresh sequence holds, also NaN, must not show.
            past = jnp.where(_whole(self.first, past.shape) > 0, past, 0.0)
            if not self.solves:
                past = past * by_column(refs["vectors"].at[_READ, pl.ds(count, count)], TILE)
                past = jnp.where(self.live_columns(past.shape, _WGMMA), past, 0.0)
            last = pl.ds(refs["base"].shape[0] - self.width, self.width)
            base = refs["base"].at[last, self.columns(part)]
            found = plgpu.layout_cast(past, _TRANSPOSED)
            found = found + plgpu.load(base.T, layout=_TRANSPOSED, optimized=False)
            for i, ref in enumerate(refs["outs"][::-1]):
                target = ref.at[self.tree, :, self.head, self.columns(part)]
                target.T[...] = _columns(found, i * count, (i + 1) * count)


def _run(
    name: str,
    nodes_of: tuple[jax.Array, jax.Array, jax.Array],
    gates: tuple[jax.Array, ...],
    pool: jax.Array,
    slot: jax.Array,
    positions: jax.Array,
    ancestors: jax.Array,
    *,
    scale: float = 1.0,
    parts: int | None,
    interpret: Any,
) -> tuple[jax.Array, ...]:
    """Verifies trees by either recurrence; see the two functions below.

    Args:
      nodes_of: q, k, v; gates: slopes, or g and beta where corrections are solved for.
      scale: of the queries if they are not normalised.

    Returns:
      outputs, and with g and beta corrections.
    """
    solves = len(gates) == 2
    batch, nodes = positions.shape
    if nodes > TILE:
        raise ValueError(f"{name}: at most {TILE} nodes, not {nodes}")
    heads, dtype = pool.shape[1], nodes_of[0].dtype
    step = 8 if nodes <= _BLOCK else _BLOCK  # the copy engine brings whole rows of 8
    count = -(-nodes // step) * step
    if count > nodes:
        extra = [(0, 0), (0, count - nodes)]
        nodes_of = tuple(jnp.pad(x, [*extra, (0, 0), (0, 0)]) for x in nodes_of)  # pyright: ignore
        gates = tuple(jnp.pad(x, [*extra, (0, 0)]) for x in gates) if solves else gates
    rows = -(-2 * count // TILE) * TILE  # of keys over queries
    width = 2 * count if solves else count
    division = _divide(batch * heads, count, solves, parts)
    shared, packed = division.warpgroups > 1, division.packed

    names = ("both", "values", "state", "base", "links", "vectors", "loaded", "arrived", "linked", "readable")

    def kernel(*refs):
        inputs = dict(zip(("slot", "first", "masks", "pool", "q_in", "k_in", "v_in"), refs))
        given, outs = (refs[len(inputs) + i * len(gates) :][: len(gates)] for i in range(2))
        scratch = refs[len(inputs) + 2 * len(gates) :]
        known: dict[str, Any] = dict(zip(names, scratch), **inputs, gates=given, outs=outs)
        staged = scratch[len(names)] if interpret else None
        program = _Program(known, count, division, solves, scale)

        def alone():
            program.fetch_nodes()
            program.ask()
            program.link_nodes(program.fetch_state)
            together = packed and solves and count <= _BLOCK
            if solves:
                program.make_readers(with_values=together)
            if packed and not together:
                program.add_values()
            program.read_state(staged, meanwhile=None if packed else program.add_values)

        def keys_channels():
            program.ask()
            program.link_nodes()
            plgpu.barrier_arrive(known["linked"])
            program.make_readers(lambda half: plgpu.barrier_arrive(known["readable"].at[half]))

        def values_channels():
            program.fetch_nodes()
            program.ask()
            program.fetch_state()

            def values():
                plgpu.barrier_wait(known["loaded"])
                plgpu.barrier_wait(known["linked"])
                program.add_values()

            program.read_state(staged, values, lambda half: plgpu.barrier_wait(known["readable"].at[half]))

        if shared:
            warpgroup = jax.lax.axis_index("warpgroup")
            pl.when(warpgroup == 0)(keys_channels)
            pl.when(warpgroup == 1)(values_channels)
        else:
            alone()

    kernel.__name__ = name
    narrow, wide = swizzled(128, 2), swizzled(128, 4)
    base_rows = width if count <= _BLOCK else 2 * count
    out = jax.ShapeDtypeStruct((batch, count, heads, SIZE), jnp.float32)
    found = plgpu.kernel(
        kernel,
        out_type=(out,) * len(gates),
        grid=(batch, heads, SIZE // TILE // division.parts),
        grid_names=("tree", "head", "group"),
        **({"num_threads": 2, "thread_name": "warpgroup"} if shared else {}),
        scratch_types=[
            plgpu.SMEM((max(rows, 2 * width if solves else 0), SIZE), dtype, transforms=narrow),
            plgpu.SMEM((count, SIZE), dtype),
            plgpu.SMEM((division.buffers, SIZE, TILE), jnp.float32, transforms=wide),
            # A loop over nodes can index rows that are not swizzled.
            plgpu.SMEM((base_rows, SIZE), jnp.float32, transforms=wide if count <= _BLOCK else ()),
            plgpu.SMEM((count, rows), jnp.float32),
            plgpu.SMEM((_VECTORS, rows), jnp.float32),
            plgpu.Barrier(num_arrivals=3),
            plgpu.Barrier(num_barriers=division.buffers),
            plgpu.Barrier(),
            plgpu.Barrier(num_barriers=2),
            *([plgpu.SMEM((TILE, SIZE // division.pieces), dtype, transforms=narrow)] if interpret else []),
        ],
        # What one warp leaves to another lies before a commit_smem here, which is a barrier. Sums do not
        # leave a warp.
        compiler_params=plgpu.CompilerParams(
            unsafe_no_auto_barriers=True, reduction_scratch_bytes=0, approx_math=True
        ),
        interpret=interpret,
    )(slot, first_position(positions), node_masks(ancestors, positions, count, rows), pool, *nodes_of, *gates)
    return tuple(x[:, :nodes] if count > nodes else x for x in found)


@functools.partial(jax.jit, static_argnames=("scale", "parts", "interpret"))
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
    parts: int | None = None,
    interpret: Any = None,
) -> jax.Array:
    """As ops.simple_gla_verify for 16-bit q, k, v [B, N, H, 128], N at most 64, and a float32 pool.

    N is best a multiple of 8, and of 16 from 16 on: else the operands are copied into such arrays.

    Args:
      parts: halves of a state's columns per program, 1 or 2; None: what was faster on an H200.
      interpret: an InterpretGPUParams of Pallas to run on a CPU.
    """
    tree = (pool, slot, positions, ancestors)
    options = {"scale": scale, "parts": parts, "interpret": interpret}
    return _run("simple_gla_verify", (q, k, v), (slopes,), *tree, **options)[0]


@functools.partial(jax.jit, static_argnames=("parts", "interpret"))
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
    parts: int | None = None,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """As ops.gated_delta_verify for 16-bit q, k [B, N, Hk, 128], v [B, N, Hv, 128] and a float32 pool.

    N, ``parts`` and ``interpret`` as in ``simple_gla``.
    """
    tree = (pool, slot, positions, ancestors)
    out, corrections = _run(
        "gated_delta_verify", (q, k, v), (g, beta), *tree, parts=parts, interpret=interpret
    )
    return out, corrections
