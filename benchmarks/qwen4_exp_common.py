"""What the Qwen4Exp benchmarks share: configurations, contents made on the device, batches."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from hybridjax.batch import TILE, Batch, Mode
from hybridjax.configs import Qwen4ExpConfig
from hybridjax.configs.qwen4_exp import RopeConfig


def small_config(**fields: Any) -> Qwen4ExpConfig:
    """Shapes for a machine without an accelerator; every part of the released model is there."""
    return Qwen4ExpConfig(
        **{
            "hidden_size": 64,
            "vocab_size": 512,
            "num_attention_heads": 4,
            "head_dim": 32,
            "rope_parameters": RopeConfig(mrope_section=(2, 1, 1)),
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "num_experts": 16,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 64,
            "hc_lowrank": 16,
            "ple_embed_dim": 64,
            "ngram_vocab_size_base": 1000,
            "indexer_head_dim": 32,
            "indexer_budget": 64,
            "bos_token_id": None,
            "eos_token_id": (3,),
            **fields,
        }
    )


def noise(shape: tuple[int, ...], dtype: Any, scale: float, seed: int) -> jax.Array:
    """Uniform numbers of standard deviation ``scale``, hashed from their indices.

    One fused kernel without scratch, for arrays that take most of the device.
    """
    mixed = jnp.full(shape, jnp.asarray(seed, jnp.uint32) * jnp.uint32(0x9E3779B1) + 1)
    for axis in range(len(shape)):
        index = jax.lax.broadcasted_iota(jnp.uint32, shape, axis)
        mixed = (mixed ^ index) * jnp.uint32(0x85EBCA6B)
        mixed = mixed ^ (mixed >> 15)
    mixed = mixed * jnp.uint32(0xC2B2AE35)
    mixed = mixed ^ (mixed >> 16)
    unit = (mixed >> 8).astype(jnp.float32) * 2.0**-24 - 0.5
    return (unit * (scale * math.sqrt(12.0))).astype(dtype)


_make_noise = jax.jit(noise, static_argnums=(0, 1, 2))


def plain(name: str) -> float:
    """Elements of a vector of Qwen4Exp: norms 1, decay rates e^0.5."""
    return 1.0 if "norm_weight" in name or "dt_bias" in name else 0.5 if "A_log" in name else 0.0


def filled(
    make: Callable[[], Any],
    seed: int,
    known: dict[Any, jax.Array] | None = None,
    vector: Callable[[str], float] = plain,
) -> Any:
    """The module with matrices of noise (deviation 0.02) and plain vectors; a program per shape.

    One program for all arrays would compile for minutes. Arrays in ``known``, by path and shape, are taken
    from there; new ones are added. ``vector`` gives the elements of a vector with a path.
    """
    known = {} if known is None else known
    graph, parameters = nnx.split(nnx.eval_shape(make))
    leaves, structure = jax.tree_util.tree_flatten_with_path(parameters)
    out = []
    for i, (path, leaf) in enumerate(leaves):
        name = jax.tree_util.keystr(path)
        if (name, leaf.shape) not in known:
            known[name, leaf.shape] = (
                jnp.full(leaf.shape, vector(name), leaf.dtype)
                if len(leaf.shape) < 2
                else _make_noise(leaf.shape, leaf.dtype, 0.02, seed * 1000 + i)
            )
        out.append(known[name, leaf.shape])
    return nnx.merge(graph, jax.tree.unflatten(structure, out))


def noise_like(tree: Any, scale: float, seed: int) -> Any:
    """A pytree of arrays in the shapes of another; integers become zeros."""
    leaves, structure = jax.tree.flatten(tree)
    made = [
        _make_noise(x.shape, x.dtype, scale, seed * 1000 + i)
        if jnp.issubdtype(x.dtype, jnp.floating)
        else jnp.zeros(x.shape, x.dtype)
        for i, x in enumerate(leaves)
    ]
    return jax.tree.unflatten(structure, made)


def nbytes(tree: Any) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(tree))


def _pages(first: int, each: int, rows: int, pool: int) -> jax.Array:
    """int32[rows, each]: consecutive pages from ``first`` on, around the pool but never page 0."""
    index = first + np.arange(rows * each)
    return jnp.asarray(1 + index.reshape(rows, each) % (pool - 1), jnp.int32)


def decode_batch(rows: int, context: int, pool: int, first_page: int = 0) -> Batch:
    """One row for each of ``rows`` sequences; each is the token that makes its context this long."""
    each = -(-context // TILE)
    return Batch(
        tokens=jnp.arange(rows, dtype=jnp.int32) % 500,
        positions=jnp.full((rows,), context - 1, jnp.int32),
        tile_sequence=jnp.zeros((0,), jnp.int32),
        context_length=jnp.full((rows,), context, jnp.int32),
        slot=jnp.arange(1, rows + 1, dtype=jnp.int32),
        page_table=_pages(first_page, each, rows, pool),
        logit_rows=jnp.arange(rows, dtype=jnp.int32),
        mode=Mode.DECODE,
    )


def prefill_batch(rows: int, start: int, pool: int, first_page: int = 0) -> Batch:
    """``rows`` tokens of one sequence after ``start`` others."""
    each = -(-(start + rows) // TILE)
    return Batch(
        tokens=jnp.arange(rows, dtype=jnp.int32) % 500,
        positions=jnp.arange(start, start + rows, dtype=jnp.int32),
        tile_sequence=jnp.zeros((rows // TILE,), jnp.int32),
        context_length=jnp.full((1,), start + rows, jnp.int32),
        slot=jnp.ones((1,), jnp.int32),
        page_table=_pages(first_page, each, 1, pool),
        logit_rows=jnp.zeros((1,), jnp.int32),
        initial_slot=jnp.ones((1,), jnp.int32),
        snapshot_slot=jnp.zeros((rows // TILE,), jnp.int32),
        mode=Mode.PREFILL,
    )
