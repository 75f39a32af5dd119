"""SimpleGLA: linear attention with a fixed scalar decay per head (Lightning attention).

    S_t = exp(-slope) S_{t-1} + k_t v_t^T        o_t = scale * q_t^T S_t

The token decays the state, adds itself, then reads. All arithmetic is float32. Source: minicpm_sala
2.2-2.3; the chunked form follows Lightning Attention-2 (arXiv 2401.04658).
"""

import jax
import jax.numpy as jnp
import numpy as np

from hybridjax.batch import TILE
from hybridjax.ops.dispatch import Op, architecture
from hybridjax.ops.tree import first_position, live_states, path_decays, replay

_HIGHEST = jax.lax.Precision.HIGHEST


def decay_slopes(heads: int) -> np.ndarray:
    """float32[heads]: the positive slopes s_h; the state decays by exp(-s_h) per token.

    A geometric series from 2^(-8/n) for a power of two n; other counts continue with every second
    slope of the series twice as long (the ALiBi rule).
    """

    def series(n: int) -> np.ndarray:
        return 2.0 ** (-8.0 / n * np.arange(1, n + 1))

    whole = 2 ** int(np.log2(heads))
    slopes = np.concatenate([series(whole), series(2 * whole)[::2]])[:heads]
    return slopes.astype(np.float32)


def _simple_gla_whole(
    q: jax.Array, k: jax.Array, v: jax.Array, slopes: jax.Array, *, scale: float
) -> tuple[jax.Array, jax.Array]:
    """The recurrence over whole sequences that start from zero state.

    Args:
      q, k: [B, L, H, Dk]; v: [B, L, H, Dv].
      slopes: float32[H].
      scale: factor on q.

    Returns:
      outputs float32[B, L, H, Dv] and final states float32[B, H, Dk, Dv].
    """
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    decay = jnp.exp(-slopes)[None, :, None, None]

    def step(state, token):
        q_t, k_t, v_t = token
        state = decay * state + k_t[..., :, None] * v_t[..., None, :]
        return state, scale * jnp.einsum("bhk,bhkv->bhv", q_t, state, precision=_HIGHEST)

    zero = jnp.zeros((q.shape[0], q.shape[2], q.shape[3], v.shape[3]), jnp.float32)
    final, out = jax.lax.scan(step, zero, tuple(jnp.moveaxis(x, 1, 0) for x in (q, k, v)))
    return jnp.moveaxis(out, 0, 1), final


def _simple_gla_prefill(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    slopes: jax.Array,
    pool: jax.Array,
    slot: jax.Array,
    tile_sequence: jax.Array,
    positions: jax.Array,
    *,
    scale: float,
    initial_slot: jax.Array | None = None,
    snapshot_slot: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The recurrence over the tiles of a ragged batch, states read from and written to a pool.

    A sequence whose first row has position 0 starts from zero, whatever its slot holds. Rows with
    position -1 are skipped.

    Args:
      q, k: [N, H, Dk]; v: [N, H, Dv]; rows in tiles of 64 (see batch.Batch).
      slopes: float32[H].
      pool: float32[slots, H, Dk, Dv]; slots not named are returned unchanged, slot 0 is scratch.
      slot: int32[B]; tile_sequence: int32[N / 64]; positions: int32[N].
      scale: factor on q.
      initial_slot: int32[B] slot that a sequence's state is read from (default: ``slot``).
      snapshot_slot: int32[N / 64] slot that also receives the state after a tile that ends on the
        grid, 0 for none (default: none). Slots named here are named nowhere else.

    Returns:
      outputs float32[N, H, Dv] and the pool after the step.
    """
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    decay = jnp.exp(-slopes)[:, None, None]
    first, snapshot = _tile_borders(slot, tile_sequence, positions, initial_slot, snapshot_slot)
    # The row that starts a sequence reads the initial slot, the row that ends a full tile also writes
    # the tile's snapshot.
    source = jnp.where(
        first, (slot if initial_slot is None else initial_slot)[tile_sequence], slot[tile_sequence]
    )
    lowest = jnp.argmax(positions.reshape(-1, TILE) >= 0, axis=1)[:, None]
    column = jnp.arange(TILE)[None, :]
    read = jnp.where(column == lowest, source[:, None], slot[tile_sequence][:, None]).reshape(-1)
    extra = jnp.where(column == TILE - 1, snapshot[:, None], 0).reshape(-1)
    write = jnp.where(positions < 0, 0, jnp.repeat(slot[tile_sequence], TILE))

    def step(pool, row):
        q_t, k_t, v_t, read, write, extra, position = row
        state = jnp.where(position == 0, 0.0, pool[read])
        state = decay * state + k_t[:, :, None] * v_t[:, None, :]
        pool = pool.at[jnp.stack([extra, write])].set(state)
        return pool, scale * jnp.einsum("hk,hkv->hv", q_t, state, precision=_HIGHEST)

    pool, out = jax.lax.scan(step, pool, (q, k, v, read, write, extra, positions))
    return out, pool


def _tile_borders(slot, tile_sequence, positions, initial_slot, snapshot_slot):
    """bool[T]: tiles that start a sequence's run; int32[T]: the snapshot slot of each full tile, else 0."""
    tiles = positions.reshape(-1, TILE)
    live = jnp.any(tiles >= 0, axis=1)
    previous = jnp.concatenate([jnp.full((1,), -1, jnp.int32), tile_sequence[:-1]])
    first = live & (tile_sequence != previous)
    if snapshot_slot is None:
        return first, jnp.zeros_like(tile_sequence)
    return first, jnp.where(tiles[:, -1] >= 0, snapshot_slot, 0)


def _simple_gla_decode(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    slopes: jax.Array,
    pool: jax.Array,
    slot: jax.Array,
    positions: jax.Array,
    *,
    scale: float,
) -> tuple[jax.Array, jax.Array]:
    """One token of each of B sequences, states updated in place.

    Args:
      q, k: [B, H, Dk]; v: [B, H, Dv]; slopes: float32[H].
      pool: float32[slots, H, Dk, Dv]; slot, positions: int32[B]; rows with position -1 use slot 0.
      scale: factor on q.

    Returns:
      outputs float32[B, H, Dv] and the pool after the step.
    """
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    slot = jnp.where(positions < 0, 0, slot)
    state = jnp.where((positions <= 0)[:, None, None, None], 0.0, pool[slot])
    state = jnp.exp(-slopes)[None, :, None, None] * state + k[..., :, None] * v[..., None, :]
    # A sum instead of a matmul: each state element is used once, and XLA fuses it with the update.
    out = scale * jnp.sum(q[..., :, None] * state, axis=-2)
    return out, pool.at[slot].set(state)


def _intra_tile(q, k, v, slopes, valid, scale):
    """Attention inside each tile: [..., C, H, D] -> float32[..., C, H, Dv]."""
    column = jnp.arange(q.shape[-3])
    distance = (column[:, None] - column[None, :]).astype(jnp.float32)
    # Exponents of the future are cut before exp: they would overflow for fast heads.
    decay = jnp.exp(-slopes[:, None, None] * jnp.maximum(distance, 0.0)[None])
    causal = (distance >= 0)[None] & valid[..., None, None, :]
    scores = jnp.einsum("...ihd,...jhd->...hij", q, k, precision=_HIGHEST)
    scores = jnp.where(causal, scale * scores * decay, 0.0)
    return jnp.einsum("...hij,...jhd->...ihd", scores, v, precision=_HIGHEST)


def _tile_sums(k, v, slopes, valid):
    """What each tile adds to the state: sum_j exp(-s (last - j)) k_j v_j^T, float32[..., H, Dk, Dv]."""
    column = jnp.arange(k.shape[-3])
    last = jnp.max(jnp.where(valid, column, -1), axis=-1)
    age = jnp.where(valid, last[..., None] - column, 0).astype(jnp.float32)
    weight = jnp.exp(-slopes * age[..., None]) * valid[..., None].astype(jnp.float32)
    return jnp.einsum("...chk,...chv->...hkv", k * weight[..., None], v, precision=_HIGHEST)


def _tiles(x: jax.Array, valid: jax.Array) -> jax.Array:
    """[..., C, H, D] in float32, zero where not valid."""
    return jnp.where(valid[..., None, None], x.astype(jnp.float32), 0.0)


def _simple_gla_whole_chunked(q, k, v, slopes, *, scale):
    """The chunked form: tiles of 64 in parallel, a scan over tiles only carries the state."""
    batch, length, heads, _ = q.shape
    padded = -(-length // TILE) * TILE
    pad = [(0, 0), (0, padded - length), (0, 0), (0, 0)]
    q, k, v = (jnp.pad(x, pad).reshape(batch, -1, TILE, heads, x.shape[-1]) for x in (q, k, v))
    valid = jnp.broadcast_to((jnp.arange(padded) < length).reshape(-1, TILE), q.shape[:3])
    q, k, v = (_tiles(x, valid) for x in (q, k, v))
    sums = _tile_sums(k, v, slopes, valid)
    count = jnp.sum(valid, axis=-1).astype(jnp.float32)
    carry = jnp.exp(-slopes * count[..., None])[..., None, None]

    def step(state, tile):
        add, decay = tile
        return decay * state + add, state

    zero = jnp.zeros_like(sums[:, 0])
    final, before = jax.lax.scan(step, zero, (jnp.moveaxis(sums, 1, 0), jnp.moveaxis(carry, 1, 0)))
    before = jnp.moveaxis(before, 0, 1)
    reach = jnp.exp(-slopes[None, :] * jnp.arange(1.0, TILE + 1.0)[:, None])[..., None]
    inter = scale * reach * jnp.einsum("btchk,bthkv->btchv", q, before, precision=_HIGHEST)
    out = inter + _intra_tile(q, k, v, slopes, valid, scale)
    return out.reshape(batch, padded, heads, -1)[:, :length], final


def _simple_gla_prefill_chunked(
    q,
    k,
    v,
    slopes,
    pool,
    slot,
    tile_sequence,
    positions,
    *,
    scale,
    initial_slot=None,
    snapshot_slot=None,
):
    """The chunked form on the 64-token grid anchored at absolute position 0."""
    first, snapshot = _tile_borders(slot, tile_sequence, positions, initial_slot, snapshot_slot)
    source = slot if initial_slot is None else initial_slot
    tiles = tile_sequence.shape[0]
    positions = positions.reshape(tiles, TILE)
    valid = positions >= 0
    q, k, v = (_tiles(x.reshape(tiles, TILE, *x.shape[1:]), valid) for x in (q, k, v))
    live = jnp.any(valid, axis=-1)
    sums = _tile_sums(k, v, slopes, valid)
    count = jnp.sum(valid, axis=-1).astype(jnp.float32)
    carry = jnp.exp(-slopes[None, :] * count[:, None])[..., None, None]

    start = jnp.min(jnp.where(valid, positions, jnp.iinfo(jnp.int32).max), axis=-1)
    initial = jnp.where((start == 0)[:, None, None, None], 0.0, pool[source[tile_sequence]])

    def step(state, tile):
        add, decay, first, initial = tile
        state = decay * jnp.where(first, initial, state) + add
        return state, state

    # Both what later tiles and what later steps start from comes out of this one loop: computed twice,
    # the two could differ by a rounding, and the way a prompt is cut would show.
    _, after = jax.lax.scan(step, jnp.zeros_like(pool[0]), (sums, carry, first, initial))
    shifted = jnp.concatenate([jnp.zeros_like(after[:1]), after[:-1]])
    before = jnp.where(first[:, None, None, None], initial, shifted)
    # Tokens decay the incoming state by their rank among the tile's own tokens.
    rank = jnp.cumsum(valid, axis=-1).astype(jnp.float32)
    reach = jnp.exp(-slopes * rank[..., None])[..., None]
    inter = scale * reach * jnp.einsum("tchk,thkv->tchv", q, before, precision=_HIGHEST)
    out = inter + _intra_tile(q, k, v, slopes, valid, scale)

    # The last live tile of each sequence holds its final state; sequences without one go to slot 0.
    order = jnp.where(live, jnp.arange(tiles, dtype=jnp.int32), -1)
    last = jnp.full(slot.shape, -1, jnp.int32).at[tile_sequence].max(order)
    pool = pool.at[jnp.where(last >= 0, slot, 0)].set(after[last])
    if snapshot_slot is not None:
        pool = pool.at[snapshot].set(after)
    return out.reshape(tiles * TILE, *out.shape[2:]), pool


def _simple_gla_verify(
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
) -> jax.Array:
    """Outputs of draft trees' nodes, each as if its ancestors had been decoded before it; writes nothing.

    tree.recurrent_commit applies accepted nodes, with d = v and g = -slopes.

    Args:
      q, k: [B, N, H, Dk]; v: [B, N, H, Dv]; slopes: float32[H].
      pool: float32[slots, H, Dk, Dv]; slot: int32[B].
      positions: int32[B, N], -1 for padding; a tree that starts at position 0 starts from a zero state.
      ancestors: bool[B, N, N] of tree.tree_ancestors; parents come before children.
      scale: factor on q.

    Returns:
      outputs float32[B, N, H, Dv], zero for padding.
    """
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    decay = jnp.exp(-slopes)[:, None, None]

    def token(state, q, k, v):
        state = decay * state + k[..., :, None] * v[..., None, :]
        return state, scale * jnp.sum(q[..., :, None] * state, axis=-2)

    state = live_states(pool, slot, first_position(positions))
    return replay(token, state, (q, k, v), ancestors, positions >= 0)


def _simple_gla_verify_scores(q, k, v, slopes, pool, slot, positions, ancestors, *, scale):
    """Reads the state once: attention among the nodes, masked to ancestors, beside the decayed state."""
    live = positions >= 0
    q, k, v = (jnp.where(live[:, :, None, None], x.astype(jnp.float32), 0.0) for x in (q, k, v))
    state = live_states(pool, slot, first_position(positions))
    reach, decay = path_decays(ancestors, live, jnp.broadcast_to(-slopes, (*live.shape, slopes.shape[0])))
    scores = jnp.einsum("bnhd,bjhd->bhnj", q, k, precision=_HIGHEST) * decay
    near = jnp.einsum("bhnj,bjhv->bnhv", scores, v, precision=_HIGHEST)
    past = jnp.einsum("bnhd,bhdv->bnhv", q, state, precision=_HIGHEST)
    out = scale * (jnp.swapaxes(reach, 1, 2)[..., None] * past + near)
    return jnp.where(live[:, :, None, None], out, 0.0)


def _kernel_states(q, k, v, slopes, pool) -> bool:
    """What the GPU kernels hold: heads of 128 in float32. They were verified on Hopper only."""
    heads = q.shape[-1] == v.shape[-1] == 128 and q.dtype == k.dtype == v.dtype
    return architecture() == "sm_90" and heads and pool.dtype == jnp.float32


def _decode_kernel_fits(q, k, v, slopes, pool, *rest, **options) -> bool:
    return _kernel_states(q, k, v, slopes, pool) and q.dtype in (jnp.bfloat16, jnp.float16, jnp.float32)


def _verify_kernel_fits(q, k, v, slopes, pool, *rest, **options) -> bool:
    return _prefill_kernel_fits(q, k, v, slopes, pool) and q.shape[1] <= 64


def _prefill_kernel_fits(q, k, v, slopes, pool, *rest, **options) -> bool:
    return _kernel_states(q, k, v, slopes, pool) and q.dtype in (jnp.bfloat16, jnp.float16)


def _whole_kernel_fits(q, k, v, slopes, *, scale) -> bool:
    heads = q.shape[-1] == v.shape[-1] == 128 and q.dtype == k.dtype == v.dtype
    return architecture() == "sm_90" and heads and q.dtype in (jnp.bfloat16, jnp.float16)


simple_gla_whole = Op("simple_gla_whole", _simple_gla_whole)
simple_gla_whole.register("xla", _simple_gla_whole_chunked)
simple_gla_prefill = Op("simple_gla_prefill", _simple_gla_prefill)
simple_gla_prefill.register("xla", _simple_gla_prefill_chunked)
simple_gla_decode = Op("simple_gla_decode", _simple_gla_decode)
simple_gla_verify = Op("simple_gla_verify", _simple_gla_verify)
simple_gla_verify.register("xla", _simple_gla_verify_scores)

simple_gla_decode.register(
    "mosaic_gpu",
    "hybridjax.pallas_kernels.simple_gla.decode:decode",
    platforms=("gpu",),
    supports=_decode_kernel_fits,
)
simple_gla_prefill.register(
    "mosaic_gpu",
    "hybridjax.pallas_kernels.simple_gla.hopper:prefill",
    platforms=("gpu",),
    supports=_prefill_kernel_fits,
    first=True,
)
simple_gla_verify.register(
    "mosaic_gpu",
    "hybridjax.pallas_kernels.tree_verify:simple_gla",
    platforms=("gpu",),
    supports=_verify_kernel_fits,
    first=True,
)
# By name only: it was not timed in training.
simple_gla_whole.register(
    "mosaic_gpu",
    "hybridjax.pallas_kernels.whole:simple_gla",
    platforms=("gpu",),
    supports=_whole_kernel_fits,
)
