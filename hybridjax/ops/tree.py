"""Draft trees: what the ops that verify them share, and the commit of an accepted path.

A tree has N nodes in any order that puts parents before children; node n continues node ``parent[n]`` of its
tree, or with -1 the sequence itself. A node's position is that of its token, -1 for padding. Verification
leaves the caches alone; the commit then applies the accepted nodes, and nothing else, to the live state.
"""

import jax
import jax.numpy as jnp

from hybridjax.ops.dispatch import Op, architecture
from hybridjax.ops.scatter import write_rows

_HIGHEST = jax.lax.Precision.HIGHEST


def tree_ancestors(parent: jax.Array) -> jax.Array:
    """The ancestors of each node and the node itself.

    Args:
      parent: int32[B, N], each smaller than its node's number; -1 for the first nodes of a path.

    Returns:
      bool[B, N, N]: [b, n, j] whether j is n or an ancestor of n.
    """
    nodes = parent.shape[1]
    reach = parent[:, :, None] == jnp.arange(nodes)[None, None, :]
    reach = (reach | jnp.eye(nodes, dtype=bool)).astype(jnp.float32)
    span = 1
    while span < nodes:  # paths of twice the length
        reach = jnp.minimum(jnp.matmul(reach, reach, precision=_HIGHEST), 1.0)
        span *= 2
    return reach > 0


def live_states(pool: jax.Array, slot: jax.Array, first: jax.Array) -> jax.Array:
    """The states before the trees, [B, H, Dk, Dv], whose first nodes have positions int32[B] (-1: none)."""
    return jnp.where((first <= 0)[:, None, None, None], 0.0, pool[slot])


def first_position(positions: jax.Array) -> jax.Array:
    """int32[B]: the smallest position of each tree, -1 without nodes."""
    top = jnp.iinfo(jnp.int32).max
    first = jnp.min(jnp.where(positions >= 0, positions, top), axis=1)
    return jnp.where(first == top, -1, first)


def replay(token, state: jax.Array, nodes: tuple[jax.Array, ...], ancestors: jax.Array, live: jax.Array):
    """Every node's own walk from the live state through its ancestors: the definition of verification.

    Args:
      token: called as ``token(states [B, N, ...], *node)`` with a node's rows [B, 1, ...]: the states after
        it and what the node gives.
      state: [B, ...] live states; nodes: arrays [B, N, ...]; ancestors: bool[B, N, N]; live: bool[B, N].

    Returns:
      what each node gives at the end of its own walk, [B, N, ...], zero for padding.
    """
    count = live.shape[1]
    states = jnp.repeat(state[:, None], count, axis=1)

    def step(states, number):
        after, given = token(states, *(jax.lax.dynamic_slice_in_dim(x, number, 1, axis=1) for x in nodes))
        mine = jax.lax.dynamic_index_in_dim(ancestors & live[:, None, :], number, axis=2, keepdims=False)
        chosen = jnp.where(mine.reshape(*mine.shape, *[1] * (states.ndim - 2)), after, states)
        pick = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, number, axis=1, keepdims=False), given)
        return chosen, pick

    _, given = jax.lax.scan(step, states, jnp.arange(count))
    given = jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), given)
    return jax.tree.map(lambda x: jnp.where(live.reshape(*live.shape, *[1] * (x.ndim - 2)), x, 0.0), given)


def path_decays(ancestors: jax.Array, live: jax.Array, g: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Decays along the paths of a tree.

    Args:
      ancestors: bool[B, N, N]; live: bool[B, N]; g: float32[B, N, H] logarithms of the nodes' decays.

    Returns:
      float32[B, H, N]: from the live state to each node; float32[B, H, N, N]: [.., n, j] from ancestor j to
      node n, 1 for n itself, 0 elsewhere and where either is padding.
    """
    own = ancestors & live[:, :, None] & live[:, None, :]
    g = jnp.swapaxes(jnp.where(live[:, :, None], g, 0.0), 1, 2)
    # On the way from j to n lie the ancestors of n of which j is a strict ancestor; each way is added up by
    # itself, since differences of sums would lose the small decays that follow a large one.
    strict = jnp.swapaxes(own, 1, 2) & ~jnp.eye(own.shape[1], dtype=bool)
    ways = jnp.where(strict[:, None], g[:, :, None, :], 0.0)  # [.., j, m]: g of m where j is above m
    sums = jnp.einsum("bnm,bhjm->bhnj", own.astype(jnp.float32), ways, precision=_HIGHEST)
    whole = jnp.einsum("bnm,bhm->bhn", own.astype(jnp.float32), g, precision=_HIGHEST)
    return jnp.exp(whole), jnp.where(own[:, None], jnp.exp(sums), 0.0)


def _recurrent_commit(
    k: jax.Array,
    d: jax.Array,
    g: jax.Array,
    pool: jax.Array,
    slot: jax.Array,
    positions: jax.Array,
    path: jax.Array,
) -> jax.Array:
    """Applies accepted nodes to the live states, in place: S <- exp(g_n) S + k_n d_n^T along each path.

    Serves both recurrences: d are the values of SimpleGLA (g then minus its slopes), or the corrections that
    gated_delta_verify returns.

    Args:
      k: [B, N, Hk, Dk]; d: [B, N, Hv, Dv], value head h uses key head h // (Hv / Hk).
      g: float32[B, N, Hv], or [Hv] if it is the same for all nodes.
      pool: float32[slots, Hv, Dk, Dv]; slots not named are returned unchanged, slot 0 is scratch.
      slot: int32[B]; positions: int32[B, N]; a path that starts at position 0 starts from a zero state.
      path: int32[B, P] numbers of the accepted nodes from the first on, -1 behind the last; a tree without
        any leaves its slot as it is.

    Returns:
      the pool after the commit.
    """
    taken = path >= 0
    heads = d.shape[2]
    index = jnp.maximum(path, 0)[:, :, None]
    k, d = (jnp.take_along_axis(x.astype(jnp.float32), index[..., None], axis=1) for x in (k, d))
    k, d = (jnp.where(taken[:, :, None, None], x, 0.0) for x in (k, d))
    k = jnp.repeat(k, heads // k.shape[2], axis=2)
    g = jnp.broadcast_to(g, (*path.shape, heads)) if g.ndim == 1 else jnp.take_along_axis(g, index, axis=1)
    g = jnp.where(taken[:, :, None], g, 0.0)
    first = jnp.take_along_axis(positions, index[:, :1, 0], axis=1)[:, 0]
    own = jnp.where(taken[:, 0], slot, 0)

    def step(state, node):
        k, d, g = node
        return jnp.exp(g)[..., None, None] * state + k[..., :, None] * d[..., None, :], None

    nodes = tuple(jnp.swapaxes(x, 0, 1) for x in (k, d, g))
    state, _ = jax.lax.scan(step, live_states(pool, own, first), nodes)
    return pool.at[own].set(state)


def _commit_kernel_fits(k, d, g, pool, *rest) -> bool:
    """What the GPU kernel holds: states of 128 x 128 in float32. It was verified on Hopper only."""
    floats = all(x.dtype in (jnp.bfloat16, jnp.float16, jnp.float32) for x in (k, d))
    square = k.shape[-1] == d.shape[-1] == 128
    return architecture() == "sm_90" and floats and square and g.dtype == pool.dtype == jnp.float32


recurrent_commit = Op("recurrent_commit", _recurrent_commit)
recurrent_commit.register(
    "mosaic_gpu",
    "hybridjax.pallas_kernels.tree_commit:commit",
    platforms=("gpu",),
    supports=_commit_kernel_fits,
)


def tree_history(
    x: jax.Array,
    pool: jax.Array,
    slot: jax.Array,
    positions: jax.Array,
    parent: jax.Array,
    offsets: tuple[int, ...],
    *,
    fill: float = 0,
) -> list[jax.Array]:
    """For each offset o, what lies o tokens before each node: an ancestor, or a row of the sequence's past.

    Args:
      x: [B, N, ...] one value per node.
      pool: [slots, S, ...] the last S rows of every sequence by slot, oldest first, S >= max(offsets).
      slot: int32[B]; positions, parent: int32[B, N].
      offsets: how far to look back, each at least 1.
      fill: what there is before the first token.

    Returns:
      one [B, N, ...] per offset, in the dtype of x (padding: meaningless).
    """
    size, nodes = pool.shape[1], parent.shape[1]
    # Index 0 .. S - 1: the past; S + n: node n.
    both = jnp.concatenate([pool[slot].astype(x.dtype), x], axis=1)
    past = jnp.broadcast_to(jnp.maximum(jnp.arange(size) - 1, 0), (parent.shape[0], size))
    before = jnp.concatenate([past, jnp.where(parent < 0, size - 1, parent + size)], axis=1)
    found, index = [], jnp.broadcast_to(size + jnp.arange(nodes), parent.shape)
    for _ in range(max(offsets)):
        index = jnp.take_along_axis(before, index, axis=1)
        found.append(index)
    out = []
    for offset in offsets:
        index = found[offset - 1].reshape(*parent.shape, *[1] * (x.ndim - 2))
        known = (positions >= offset).reshape(index.shape)
        out.append(jnp.where(known, jnp.take_along_axis(both, index, axis=1), jnp.asarray(fill, x.dtype)))
    return out


def tree_history_commit(
    x: jax.Array, pool: jax.Array, slot: jax.Array, positions: jax.Array, path: jax.Array, *, fill: float = 0
) -> jax.Array:
    """The pool of last rows after the accepted nodes.

    Arguments are those of tree_history and recurrent_commit.

    Slots of trees without accepted nodes are returned unchanged, slot 0 is scratch.
    """
    size = pool.shape[1]
    count = jnp.sum(path >= 0, axis=1)
    start = jnp.take_along_axis(positions, jnp.maximum(path[:, :1], 0), axis=1)
    both = jnp.concatenate([pool[slot], x.astype(pool.dtype)], axis=1)
    # Where the last S rows lie, counted from the oldest row of the past.
    place = count[:, None] + jnp.arange(size)[None, :]
    node = jnp.take_along_axis(path, jnp.clip(place - size, 0, path.shape[1] - 1), axis=1)
    index = jnp.maximum(jnp.where(place < size, place, size + node), 0)
    known = place - size + start >= 0
    index, known = (a.reshape(*place.shape, *[1] * (x.ndim - 2)) for a in (index, known))
    rows = jnp.where(known, jnp.take_along_axis(both, index, axis=1), jnp.asarray(fill, pool.dtype))
    return write_rows(pool, (count > 0) & (slot > 0), rows, slot)
