"""Gated delta rule: linear attention that corrects what the state already predicts (Gated DeltaNet).

    S <- exp(g_t) S,   d_t = beta_t (v_t - S^T k_t),   S <- S + k_t d_t^T,   o_t = S^T q_t

The state decays before it is read, and outputs read the updated state. q and k arrive raw and are
L2-normalised here; value head h uses key head h // (Hv / Hk). All arithmetic is float32. Source: qwen4_exp 4;
the chunked (WY) form follows Gated Delta Networks (arXiv 2412.06464).
"""

import jax
import jax.numpy as jnp

from hybridjax.batch import TILE
from hybridjax.ops.dispatch import Op, architecture, tiles_at_once
from hybridjax.ops.tree import first_position, live_states, path_decays, replay

_HIGHEST = jax.lax.Precision.HIGHEST
_NORM_EPS = 1e-6
_SOLVE_BLOCK = 16  # rows inverted one by one, the rest by products: measured faster than a triangular solve


def _unit(x: jax.Array) -> jax.Array:
    """x / |x| over the last axis in float32; the epsilon is added to the sum of squares."""
    wide = x.astype(jnp.float32)
    return wide * jax.lax.rsqrt(jnp.sum(wide * wide, axis=-1, keepdims=True) + _NORM_EPS)


def _per_value_head(x: jax.Array, heads: int, axis: int) -> jax.Array:
    """Key heads repeated so that there is one for each value head."""
    return jnp.repeat(x, heads // x.shape[axis], axis=axis)


def _operands(q, k, v, g, beta):
    """The float32 operands of the recurrence, q normalised and scaled, k normalised, Hv heads each."""
    heads = v.shape[-2]
    q, k = (_per_value_head(_unit(x), heads, -2) for x in (q, k))
    return q * q.shape[-1] ** -0.5, k, v.astype(jnp.float32), g.astype(jnp.float32), beta.astype(jnp.float32)


def _token(state, q, k, v, g, beta):
    """One token of every head: state [..., Dk, Dv], q and k [..., Dk], v [..., Dv], g and beta [...]."""
    state = jnp.exp(g)[..., None, None] * state
    # Sums instead of products of matrices: XLA's CPU backend is slow with two batch dimensions.
    known = jnp.sum(k[..., :, None] * state, axis=-2)
    delta = beta[..., None] * (v - known)
    state = state + k[..., :, None] * delta[..., None, :]
    return state, jnp.sum(q[..., :, None] * state, axis=-2)


def _gated_delta_whole(
    q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array, beta: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The recurrence over whole sequences that start from zero state.

    Args:
      q, k: [B, L, Hk, Dk] before L2 normalisation; q is also scaled by Dk^-0.5 here.
      v: [B, L, Hv, Dv], Hv a multiple of Hk.
      g: float32[B, L, Hv] logarithm of the decay, at most 0.
      beta: float32[B, L, Hv] share of the error that a token corrects.

    Returns:
      outputs float32[B, L, Hv, Dv] and final states float32[B, Hv, Dk, Dv].
    """
    tokens = _operands(q, k, v, g, beta)
    zero = jnp.zeros((v.shape[0], v.shape[2], k.shape[3], v.shape[3]), jnp.float32)
    final, out = jax.lax.scan(
        lambda state, token: _token(state, *token), zero, tuple(jnp.moveaxis(x, 1, 0) for x in tokens)
    )
    return jnp.moveaxis(out, 0, 1), final


def _gated_delta_prefill(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    pool: jax.Array,
    slot: jax.Array,
    tile_sequence: jax.Array,
    positions: jax.Array,
    *,
    initial_slot: jax.Array | None = None,
    snapshot_slot: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The recurrence over the tiles of a ragged batch, states read from and written to a pool.

    A sequence whose first row has position 0 starts from zero, whatever its slot holds. Rows with
    position -1 are skipped.

    Args:
      q, k: [N, Hk, Dk]; v: [N, Hv, Dv]; g, beta: float32[N, Hv]; rows in tiles of 64 (see batch.Batch).
      pool: float32[slots, Hv, Dk, Dv]; slots not named are returned unchanged, slot 0 is scratch.
      slot: int32[B]; tile_sequence: int32[N / 64]; positions: int32[N].
      initial_slot: int32[B] slot that a sequence's state is read from (default: ``slot``).
      snapshot_slot: int32[N / 64] slot that also receives the state after a tile that ends on the
        grid, 0 for none (default: none). Slots named here are named nowhere else.

    Returns:
      outputs float32[N, Hv, Dv] and the pool after the step.
    """
    tokens = _operands(q, k, v, g, beta)
    source, _, snapshot, _ = _tile_slots(slot, tile_sequence, positions, initial_slot, snapshot_slot)
    own = slot[tile_sequence][:, None]
    live = positions.reshape(-1, TILE) >= 0
    column = jnp.arange(TILE)[None, :]
    # The row that starts a sequence reads the initial slot, the row that ends a full tile also writes
    # the tile's snapshot.
    starts = (column == jnp.argmax(live, axis=1)[:, None]) & (source >= 0)[:, None]
    read = jnp.where(starts, source[:, None], own).reshape(-1)
    write = jnp.where(live, own, 0).reshape(-1)
    extra = jnp.where(column == TILE - 1, snapshot[:, None], 0).reshape(-1)

    def step(pool, row):
        token, read, write, extra, position = row
        state, out = _token(jnp.where(position == 0, 0.0, pool[read]), *token)
        return pool.at[jnp.stack([extra, write])].set(state), out

    pool, out = jax.lax.scan(step, pool, (tokens, read, write, extra, positions))
    return out, pool


def _tile_slots(slot, tile_sequence, positions, initial_slot, snapshot_slot):
    """What each tile reads and writes, int32[T] each.

    Returns:
      the slot that the tile's first state comes from (-1: the tile before), the slot of its sequence
      if it is the last of it (else 0), its snapshot slot if it is full (else 0), and, as bool[T],
      whether it holds position 0.
    """
    tiles = positions.reshape(-1, TILE)
    index = jnp.arange(tiles.shape[0], dtype=jnp.int32)
    live = jnp.any(tiles >= 0, axis=1)
    last = jnp.full(slot.shape, -1, jnp.int32).at[tile_sequence].max(jnp.where(live, index, -1))
    previous = jnp.concatenate([jnp.full((1,), -1, jnp.int32), tile_sequence[:-1]])
    source = (slot if initial_slot is None else initial_slot)[tile_sequence]
    source = jnp.where(live & (tile_sequence != previous), source, -1)
    final = jnp.where(last[tile_sequence] == index, slot[tile_sequence], 0)
    if snapshot_slot is None:
        snapshot = jnp.zeros_like(index)
    else:
        snapshot = jnp.where(tiles[:, -1] >= 0, snapshot_slot, 0)
    return source, final, snapshot, jnp.any(tiles == 0, axis=1)


def _gated_delta_decode(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    pool: jax.Array,
    slot: jax.Array,
    positions: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """One token of each of B sequences, states updated in place.

    Args:
      q, k: [B, Hk, Dk]; v: [B, Hv, Dv]; g, beta: float32[B, Hv].
      pool: float32[slots, Hv, Dk, Dv]; slot, positions: int32[B]; rows with position -1 use slot 0.

    Returns:
      outputs float32[B, Hv, Dv] and the pool after the step.
    """
    slot = jnp.where(positions < 0, 0, slot)
    state = jnp.where((positions == 0)[:, None, None, None], 0.0, pool[slot])
    state, out = _token(state, *_operands(q, k, v, g, beta))
    return out, pool.at[slot].set(state)


@jax.custom_jvp
def _unit_lower_inverse(a: jax.Array) -> jax.Array:
    """(I + a)^-1 of strictly lower triangular a [..., C, C], C = 16 * 2^n.

    Forward substitution in blocks of 16, then pairs of blocks are merged. A power series would need
    fewer steps, but its terms grow beyond float32 when the keys of a tile are alike.
    """
    size, count = _SOLVE_BLOCK, a.shape[-1] // _SOLVE_BLOCK

    def blocks(rows: int, columns: int, stride: int) -> jax.Array:
        """[..., n, size, size]: a's blocks from (rows, columns) on, stride apart along the diagonal."""
        starts = range(0, a.shape[-1], stride)
        cut = [a[..., i + rows : i + rows + size, i + columns : i + columns + size] for i in starts]
        return jnp.stack(cut, axis=-3)

    diagonal, row = blocks(0, 0, size), jnp.arange(size)

    def substitute(i, inverse):
        known = jax.lax.dynamic_index_in_dim(diagonal, i, axis=-2, keepdims=False)
        solved = (row == i).astype(a.dtype) - jnp.sum(known[..., :, None] * inverse, axis=-2)
        return jax.lax.dynamic_update_index_in_dim(inverse, solved, i, axis=inverse.ndim - 2)

    start = jnp.broadcast_to(jnp.eye(size, dtype=a.dtype), diagonal.shape)
    inverse = jax.lax.fori_loop(1, size, substitute, start)
    while count > 1:
        upper, lower = inverse[..., 0::2, :, :], inverse[..., 1::2, :, :]
        corner = -_matmul(_matmul(lower, blocks(size, 0, 2 * size)), upper)
        top = jnp.concatenate([upper, jnp.zeros_like(upper)], axis=-1)
        inverse = jnp.concatenate([top, jnp.concatenate([corner, lower], axis=-1)], axis=-2)
        size, count = 2 * size, count // 2
    return inverse[..., 0, :, :]


@_unit_lower_inverse.defjvp
def _unit_lower_inverse_jvp(primals, tangents):
    inverse = _unit_lower_inverse(*primals)
    return inverse, -_matmul(_matmul(inverse, tangents[0]), inverse)


def _matmul(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.matmul(x, y, precision=_HIGHEST)


def _prepare(tile):
    """What a tile needs beyond the state before it, with heads in front.

    Args:
      tile: q, k [C, Hk, Dk]; v [C, Hv, Dv]; g, beta [C, Hv]; bool[C] the rows that hold tokens.

    Returns:
      targets [Hv, C, Dv] and reads [Hv, C, Dk], with targets - reads @ state the corrections d;
      scores [Hv, C, C] of the corrections for each row; q and k [Hk, C, Dk]; and decays [Hv, C]: from
      the tile's start to each row, and from each row to the tile's end.
    """
    q, k, v, g, beta, valid = tile
    q, k, v = (jnp.where(valid[:, None, None], x, jnp.zeros((), x.dtype)) for x in (q, k, v))
    q, k, v = (jnp.swapaxes(x, 0, 1) for x in (_unit(q) * q.shape[-1] ** -0.5, _unit(k), v))
    g, beta = (jnp.where(valid[:, None], x.astype(jnp.float32), 0.0).T for x in (g, beta))
    heads = v.shape[0]
    column = jnp.arange(v.shape[1])
    past, before = column[:, None] >= column[None, :], column[:, None] > column[None, :]

    # Sums of g over j < s <= i, each added up by itself: differences of running sums would lose the
    # small decays that follow a large one.
    sums = jnp.einsum(
        "is,hsj->hij", past.astype(jnp.float32), jnp.where(before, g[:, :, None], 0.0), precision=_HIGHEST
    )
    decay = jnp.where(past, jnp.exp(sums), 0.0)
    from_start = jnp.exp(sums[:, :, 0] + g[:, :1])
    alike, scores = (_per_value_head(_matmul(x, jnp.swapaxes(k, 1, 2)), heads, 0) for x in (k, q))
    inverse = _unit_lower_inverse(jnp.where(before, beta[:, :, None] * alike * decay, 0.0))
    targets = _matmul(inverse, beta[:, :, None] * v.astype(jnp.float32))
    reads = _matmul(inverse, (beta * from_start)[:, :, None] * _per_value_head(k, heads, 0))
    return targets, reads, scores * decay, q, k, from_start, decay[:, -1]


def _advance(state, prepared):
    """One tile of the chunked form: the state [Hv, Dk, Dv] after it and outputs [Hv, C, Dv]."""
    targets, reads, scores, q, k, from_start, to_end = prepared
    heads = targets.shape[0]
    q, k = (_per_value_head(x, heads, 0) for x in (q, k))
    delta = targets - _matmul(reads, state)
    out = _matmul(from_start[:, :, None] * q, state) + _matmul(scores, delta)
    added = jnp.einsum("hck,hcv->hkv", to_end[:, :, None] * k, delta, precision=_HIGHEST)
    return from_start[:, -1, None, None] * state + added, out


def _prepare_all(tiles):
    """_prepare for [T, ...] operands; gradients recompute each tile."""
    q, _, v = tiles[:3]
    count, rows, heads, width = v.shape
    scratch = 4 * heads * rows * (6 * rows + 4 * (width + q.shape[-1]))
    together = tiles_at_once(count, scratch)
    return jax.lax.map(jax.checkpoint(_prepare), tiles, batch_size=together if together > 1 else None)


def _gated_delta_whole_chunked(q, k, v, g, beta):
    """The chunked form: tiles of 64 prepared in parallel, then a scan over tiles carries the state."""
    batch, length, heads, _ = v.shape
    count = -(-length // TILE)
    # Tiles in order of time first: [T * B, C, ...].
    tiles = []
    for x in (q, k, v, g, beta):
        x = jnp.pad(x, [(0, 0), (0, count * TILE - length)] + [(0, 0)] * (x.ndim - 2))
        x = jnp.swapaxes(x.reshape(batch, count, TILE, *x.shape[2:]), 0, 1)
        tiles.append(x.reshape(count * batch, *x.shape[2:]))
    valid = jnp.repeat((jnp.arange(count * TILE) < length).reshape(count, TILE), batch, axis=0)
    prepared = _prepare_all((*tiles, valid))
    # The heads of all sequences side by side.
    prepared = [x.reshape(count, batch * x.shape[1], *x.shape[2:]) for x in prepared]
    zero = jnp.zeros((batch * heads, k.shape[-1], v.shape[-1]), jnp.float32)
    final, out = jax.lax.scan(jax.checkpoint(_advance), zero, prepared)
    out = out.reshape(count, batch, heads, TILE, -1).transpose(1, 0, 3, 2, 4)
    out = out.reshape(batch, count * TILE, heads, -1)[:, :length]
    return out, final.reshape(batch, heads, *final.shape[1:])


def _gated_delta_prefill_chunked(
    q, k, v, g, beta, pool, slot, tile_sequence, positions, *, initial_slot=None, snapshot_slot=None
):
    """The chunked form on the 64-token grid anchored at absolute position 0."""
    source, final, snapshot, fresh = _tile_slots(slot, tile_sequence, positions, initial_slot, snapshot_slot)
    tiles = [x.reshape(-1, TILE, *x.shape[1:]) for x in (q, k, v, g, beta, positions >= 0)]
    prepared = _prepare_all(tuple(tiles))
    # Read before the loop, which then updates the pool in place.
    initial = pool[slot if initial_slot is None else initial_slot]

    def step(carry, tile):
        state, pool = carry
        prepared, source, sequence, final, snapshot, fresh = tile
        state = jnp.where(source >= 0, jnp.where(fresh, 0.0, initial[sequence]), state)
        # What later tiles and what later steps start from is this one value: computed twice, the two
        # could differ by a rounding, and the way a prompt is cut would show.
        state, out = _advance(state, prepared)
        return (state, pool.at[snapshot].set(state).at[final].set(state)), out

    zero = jnp.zeros_like(pool[0])
    (_, pool), out = jax.lax.scan(
        step, (zero, pool), (prepared, source, tile_sequence, final, snapshot, fresh)
    )
    return jnp.swapaxes(out, 1, 2).reshape(positions.shape[0], *v.shape[1:]), pool


def _gated_delta_verify(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    pool: jax.Array,
    slot: jax.Array,
    positions: jax.Array,
    ancestors: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Outputs of draft trees' nodes, each as if its ancestors had been decoded before it; writes nothing.

    Args:
      q, k: [B, N, Hk, Dk]; v: [B, N, Hv, Dv]; g, beta: float32[B, N, Hv].
      pool: float32[slots, Hv, Dk, Dv]; slot: int32[B].
      positions: int32[B, N], -1 for padding; a tree that starts at position 0 starts from a zero state.
      ancestors: bool[B, N, N] of tree.tree_ancestors; parents come before children.

    Returns:
      outputs and corrections, float32[B, N, Hv, Dv], zero for padding. The corrections, here divided by the
      norms of the keys, are the d of tree.recurrent_commit, beside the raw keys and g.
    """
    operands = _operands(q, k, v, g, beta)
    norms = _per_value_head(jax.lax.rsqrt(_square_sum(k) + _NORM_EPS), v.shape[-2], -1)

    def token(state, q, k, v, g, beta, norm):
        known = jnp.exp(g)[..., None] * jnp.sum(k[..., :, None] * state, axis=-2)
        after, out = _token(state, q, k, v, g, beta)
        return after, (out, (norm * beta)[..., None] * (v - known))

    state = live_states(pool, slot, first_position(positions))
    return replay(token, state, (*operands, norms), ancestors, positions >= 0)


def _square_sum(x: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    return jnp.sum(wide * wide, axis=-1)


def _gated_delta_verify_solved(q, k, v, g, beta, pool, slot, positions, ancestors):
    """Reads the state once: the corrections of all nodes solve a system over the matrix of ancestors."""
    live = positions >= 0
    nodes, heads = v.shape[1:3]
    size = _SOLVE_BLOCK
    while size < nodes:
        size *= 2
    rows = live[:, :, None, None]
    q, k, v = (jnp.where(rows, x, jnp.zeros((), x.dtype)) for x in (q, k, v))
    norms = _per_value_head(jax.lax.rsqrt(_square_sum(k) + _NORM_EPS), heads, -1)
    beta = jnp.where(live[:, :, None], beta, 0.0)
    q, k, v, g, beta = _operands(q, k, v, g, beta)
    q, k, v, beta, norms = (jnp.swapaxes(x, 1, 2) for x in (q, k, v, beta, norms))
    state = live_states(pool, slot, first_position(positions))
    reach, decay = path_decays(ancestors, live, g)
    strict = jnp.where(jnp.eye(nodes, dtype=bool), 0.0, decay)
    system = beta[..., None] * _matmul(k, jnp.swapaxes(k, 2, 3)) * strict
    pad = [(0, 0), (0, 0), (0, size - nodes), (0, size - nodes)]
    inverse = _unit_lower_inverse(jnp.pad(system, pad))[..., :nodes, :nodes]
    error = beta[..., None] * (v - reach[..., None] * _matmul(k, state))
    corrections = _matmul(inverse, error)
    scores = _matmul(q, jnp.swapaxes(k, 2, 3)) * decay
    out = reach[..., None] * _matmul(q, state) + _matmul(scores, corrections)
    out, corrections = (jnp.swapaxes(x, 1, 2) for x in (out, norms[..., None] * corrections))
    return jnp.where(rows, out, 0.0), jnp.where(rows, corrections, 0.0)


def _kernel_states(q, k, v, g, beta, pool) -> bool:
    """What the GPU kernels hold: heads of 128 in float32. They were verified on Hopper only."""
    heads = q.shape[-1] == v.shape[-1] == 128 and q.dtype == k.dtype == v.dtype
    gates = g.dtype == beta.dtype == jnp.float32
    return architecture() == "sm_90" and heads and gates and pool.dtype == jnp.float32


def _decode_kernel_fits(q, k, v, g, beta, pool, *rest) -> bool:
    return _kernel_states(q, k, v, g, beta, pool) and q.dtype in (jnp.bfloat16, jnp.float16, jnp.float32)


def _verify_kernel_fits(q, k, v, g, beta, pool, *rest, **options) -> bool:
    return _prefill_kernel_fits(q, k, v, g, beta, pool) and q.shape[1] <= 64


def _prefill_kernel_fits(q, k, v, g, beta, pool, *rest, **options) -> bool:
    return _kernel_states(q, k, v, g, beta, pool) and q.dtype in (jnp.bfloat16, jnp.float16)


def _whole_kernel_fits(q, k, v, g, beta) -> bool:
    heads = q.shape[-1] == v.shape[-1] == 128 and q.dtype == k.dtype == v.dtype
    gates = g.dtype == beta.dtype == jnp.float32
    return architecture() == "sm_90" and heads and q.dtype in (jnp.bfloat16, jnp.float16) and gates


gated_delta_whole = Op("gated_delta_whole", _gated_delta_whole)
gated_delta_whole.register("xla", _gated_delta_whole_chunked)
gated_delta_prefill = Op("gated_delta_prefill", _gated_delta_prefill)
gated_delta_prefill.register("xla", _gated_delta_prefill_chunked)
gated_delta_decode = Op("gated_delta_decode", _gated_delta_decode)
gated_delta_verify = Op("gated_delta_verify", _gated_delta_verify)
gated_delta_verify.register("xla", _gated_delta_verify_solved)

gated_delta_decode.register(
    "mosaic_gpu",
    "hybridjax.pallas_kernels.gated_delta.decode:decode",
    platforms=("gpu",),
    supports=_decode_kernel_fits,
)
gated_delta_prefill.register(
    "mosaic_gpu",
    "hybridjax.pallas_kernels.gated_delta.hopper:prefill",
    platforms=("gpu",),
    supports=_prefill_kernel_fits,
    first=True,
)
gated_delta_verify.register(
    "mosaic_gpu",
    "hybridjax.pallas_kernels.tree_verify:gated_delta",
    platforms=("gpu",),
    supports=_verify_kernel_fits,
    first=True,
)
# By name only: it was not timed in training.
gated_delta_whole.register(
    "mosaic_gpu",
    "hybridjax.pallas_kernels.whole:gated_delta",
    platforms=("gpu",),
    supports=_whole_kernel_fits,
)
