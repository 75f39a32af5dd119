"""Full attention within segments: every row sees the rows that carry its own segment id, in any order."""

import jax
import jax.numpy as jnp

from hybridjax.ops.dispatch import Op, einsum_f32

# Float32 scores that one query tile may hold over all heads.
_SCORE_BYTES = 2**27


def _segment_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, segment: jax.Array, *, scale: float
) -> jax.Array:
    """softmax(q k^T * scale) v over the rows of the same segment; softmax in float32 (qwen4_exp 11).

    Args:
      q, k, v: [N, H, D].
      segment: int32[N]; rows with -1 are padding, may hold anything, see nothing and are seen by nobody.
      scale: of the scores.

    Returns:
      [N, H, D] in the dtype of v; 0 in padding rows.
    """
    seen = (segment[:, None] == segment[None, :]) & (segment >= 0)[:, None]
    return _attend(q, k, _without_padding(v, segment), seen, scale)


def _tiled(q: jax.Array, k: jax.Array, v: jax.Array, segment: jax.Array, *, scale: float) -> jax.Array:
    """The same for a few query rows at a time, so that scratch grows with N and not with its square."""
    rows, heads = q.shape[:2]
    tile = min(rows, max(16, _SCORE_BYTES // (4 * heads * rows)))
    tiles = -(-rows // tile)
    padding = tiles * tile - rows
    queries = jnp.pad(q, ((0, padding), (0, 0), (0, 0))).reshape(tiles, tile, *q.shape[1:])
    asked = jnp.pad(segment, (0, padding), constant_values=-1).reshape(tiles, tile)
    values = _without_padding(v, segment)

    def attend(item):
        q, asked = item
        seen = (asked[:, None] == segment[None, :]) & (asked >= 0)[:, None]
        return _attend(q, k, values, seen, scale)

    return jax.lax.map(attend, (queries, asked)).reshape(-1, *v.shape[1:])[:rows]


def _without_padding(v: jax.Array, segment: jax.Array) -> jax.Array:
    """Zeros where nobody looks: a weight of 0 does not silence a NaN."""
    return jnp.where((segment >= 0)[:, None, None], v, jnp.zeros((), v.dtype))


def _attend(q, k, v, seen, scale):
    scores = einsum_f32("qhd,khd->hqk", q, k) * jnp.float32(scale)
    scores = jnp.where(seen[None], scores, -jnp.inf)
    largest = scores.max(axis=-1, keepdims=True)
    weights = jnp.exp(scores - jnp.where(jnp.isfinite(largest), largest, jnp.float32(0)))
    total = jnp.maximum(weights.sum(axis=-1), jnp.finfo(jnp.float32).tiny)
    out = einsum_f32("hqk,khd->qhd", weights.astype(v.dtype), v)
    return (out / total.T[..., None]).astype(v.dtype)


segment_attention = Op("segment_attention", _segment_attention)
segment_attention.register("tiled", _tiled)
