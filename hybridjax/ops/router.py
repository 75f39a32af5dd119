"""Which experts a token goes to, and how evenly tokens are spread. Source: qwen4_exp 9."""

import jax
import jax.numpy as jnp


def route(logits: jax.Array, k: int, normalise: bool) -> tuple[jax.Array, jax.Array]:
    """The k most probable experts of each row.

    Args:
      logits: [N, E], any float dtype; the softmax over all E is float32.
      k: experts per row, at most E.
      normalise: divide the k probabilities by their sum.

    Returns:
      ids int32[N, k], most probable first, ties to the lower id, and weights float32[N, k].
    """
    weights, ids = jax.lax.top_k(jax.nn.softmax(logits.astype(jnp.float32), axis=-1), k)
    if normalise:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    return ids.astype(jnp.int32), weights


def load_balancing_loss(probs: jax.Array, ids: jax.Array, valid: jax.Array) -> jax.Array:
    """E * sum over experts of (share of tokens that chose it) * (its mean probability).

    k when tokens are spread evenly over the experts, larger otherwise (arXiv 2101.03961, equations 4-6).
    For several layers concatenate their rows: the shares are taken over all of them.

    Args:
      probs: float32[N, E] router probabilities; ids: int32[N, k] the experts chosen.
      valid: bool[N]; other rows, whatever they hold, count for nothing.

    Returns:
      float32 scalar; 0 without valid rows.
    """
    experts = probs.shape[1]
    chosen = jnp.where(valid[:, None], ids, experts).reshape(-1)
    counts = jnp.zeros((experts + 1,), jnp.float32).at[chosen].add(1.0)[:experts]
    mass = jnp.sum(jnp.where(valid[:, None], probs, 0.0), axis=0)
    rows = jnp.maximum(jnp.sum(valid.astype(jnp.float32)), 1.0)
    return experts * jnp.sum(counts / rows * mass / rows)
