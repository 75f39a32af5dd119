"""The vision tower of Qwen4Exp: patches of images in, rows for the language model out (qwen4_exp 11).

All that depends on the shapes of the images comes in as arrays (see hybridjax/images/grid.py), so that one
program serves every set of images with the same number of patches.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from hybridjax.configs.qwen4_exp_multimodal import Qwen4ExpVisionConfig
from hybridjax.layers.linear import DenseWeight, Embedding, Initializer
from hybridjax.ops import segment_attention
from hybridjax.ops.dispatch import einsum_f32

_EPS = 1e-6


class LayerNorm(nnx.Module):
    """(x - mean) / sqrt(var + 1e-6) * weight + bias over the last axis, in float32, rounded once."""

    def __init__(self, size: int, *, dtype: jnp.dtype):
        self.weight = nnx.Param(jnp.ones((size,), dtype))
        self.bias = nnx.Param(jnp.zeros((size,), dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., size] -> [..., size] in the dtype of x."""
        wide = x.astype(jnp.float32)
        wide -= jnp.mean(wide, axis=-1, keepdims=True)
        wide *= jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + _EPS)
        return (wide * _wide(self.weight) + _wide(self.bias)).astype(x.dtype)


class BiasedLinear(nnx.Module):
    """y = x W^T + b, the sum in float32."""

    def __init__(self, inputs: int, outputs: int, *, init: Initializer, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.weight = DenseWeight((outputs, inputs), init=init, dtype=dtype, rngs=rngs)
        self.bias = nnx.Param(jnp.zeros((outputs,), dtype))

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., inputs] -> [..., outputs] in the dtype of x."""
        return (self.weight.matmul(x, jnp.dtype(jnp.float32)) + _wide(self.bias)).astype(x.dtype)


class PatchEmbed(nnx.Module):
    """One linear map of a patch; the weight keeps its released shape [hidden, C, T, p, p]."""

    def __init__(self, config: Qwen4ExpVisionConfig, *, init: Initializer, dtype: jnp.dtype, rngs: nnx.Rngs):
        size = config.patch_size
        shape = (config.hidden_size, config.in_channels, config.temporal_patch_size, size, size)
        self.weight = nnx.Param(init(rngs.params(), shape, dtype))
        self.bias = nnx.Param(jnp.zeros((config.hidden_size,), dtype))

    def __call__(self, patches: jax.Array) -> jax.Array:
        """[P, C * T * p * p] -> [P, hidden] in the parameters' dtype."""
        weight = self.weight[...].reshape(self.weight.shape[0], -1)
        out = einsum_f32("pi,oi->po", patches.astype(weight.dtype), weight)
        return (out + _wide(self.bias)).astype(weight.dtype)


class VisionAttention(nnx.Module):
    """Full attention within a frame, with axial rotary embedding over the whole head."""

    def __init__(self, config: Qwen4ExpVisionConfig, *, init: Initializer, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.heads = config.num_heads
        self.scale = config.head_dim**-0.5
        hidden = config.hidden_size
        self.qkv = BiasedLinear(hidden, 3 * hidden, init=init, dtype=dtype, rngs=rngs)
        self.proj = BiasedLinear(hidden, hidden, init=init, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array, angle: jax.Array, frame: jax.Array) -> jax.Array:
        """x [P, hidden], angle float32[P, head_dim / 2], frame int32[P] -> [P, hidden]."""
        q, k, v = jnp.moveaxis(self.qkv(x).reshape(x.shape[0], 3, self.heads, -1), 1, 0)
        q, k = _rotate(q, angle), _rotate(k, angle)
        out = segment_attention(q, k, v, frame, scale=self.scale)
        return self.proj(out.reshape(x.shape))


class VisionMLP(nnx.Module):
    """fc2(gelu(fc1(x))) with the tanh form of GELU."""

    def __init__(self, config: Qwen4ExpVisionConfig, *, init: Initializer, dtype: jnp.dtype, rngs: nnx.Rngs):
        hidden, wide = config.hidden_size, config.intermediate_size
        self.linear_fc1 = BiasedLinear(hidden, wide, init=init, dtype=dtype, rngs=rngs)
        self.linear_fc2 = BiasedLinear(wide, hidden, init=init, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[P, hidden] -> [P, hidden]."""
        return self.linear_fc2(_gelu(self.linear_fc1(x), approximate=True))


class VisionBlock(nnx.Module):
    """x += attention(norm1(x)); x += mlp(norm2(x))."""

    def __init__(self, config: Qwen4ExpVisionConfig, *, init: Initializer, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.norm1 = LayerNorm(config.hidden_size, dtype=dtype)
        self.norm2 = LayerNorm(config.hidden_size, dtype=dtype)
        self.attn = VisionAttention(config, init=init, dtype=dtype, rngs=rngs)
        self.mlp = VisionMLP(config, init=init, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array, angle: jax.Array, frame: jax.Array) -> jax.Array:
        """x [P, hidden], angle float32[P, head_dim / 2], frame int32[P] -> [P, hidden]."""
        x = x + self.attn(self.norm1(x), angle, frame)
        return x + self.mlp(self.norm2(x))


class PatchMerger(nnx.Module):
    """Neighbouring patches become one row: fc2(gelu(fc1(concat(norm(x))))) with the exact GELU."""

    def __init__(self, config: Qwen4ExpVisionConfig, *, init: Initializer, dtype: jnp.dtype, rngs: nnx.Rngs):
        wide = config.hidden_size * config.merge_unit
        self.norm = LayerNorm(config.hidden_size, dtype=dtype)
        self.linear_fc1 = BiasedLinear(wide, wide, init=init, dtype=dtype, rngs=rngs)
        self.linear_fc2 = BiasedLinear(wide, config.out_hidden_size, init=init, dtype=dtype, rngs=rngs)
        self.unit = config.merge_unit

    def __call__(self, x: jax.Array) -> jax.Array:
        """[P, hidden] in merge-block order -> [P / merge_unit, out_hidden_size]."""
        merged = self.norm(x).reshape(x.shape[0] // self.unit, -1)
        return self.linear_fc2(_gelu(self.linear_fc1(merged), approximate=False))


class VisionTower(nnx.Module):
    """Patch embedding, learned positions, blocks and merger; parameters are named as released.

    Args:
      config: the tower's sizes.
      init: of matrices and of the position grid; biases start at 0.
      dtype: of parameters and activations; norms, rotation, softmax and GELU work in float32.
    """

    def __init__(self, config: Qwen4ExpVisionConfig, *, init: Initializer, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.config = config
        hidden = config.hidden_size
        self.patch_embed = PatchEmbed(config, init=init, dtype=dtype, rngs=rngs)
        self.pos_embed = Embedding(config.num_position_embeddings, hidden, init=init, dtype=dtype, rngs=rngs)
        self.blocks = nnx.List(
            [VisionBlock(config, init=init, dtype=dtype, rngs=rngs) for _ in range(config.depth)]
        )
        self.merger = PatchMerger(config, init=init, dtype=dtype, rngs=rngs)

    def __call__(
        self,
        patches: jax.Array,
        positions: jax.Array,
        position_taps: tuple[jax.Array, jax.Array],
        frame: jax.Array,
    ) -> jax.Array:
        """Rows for the language model from patches in merge-block order.

        Args:
          patches: [P, C * T * p * p], normalised pixels of each patch in the order (C, T, p, p).
          positions: int32[P, 2], row and column of the patch in its frame.
          position_taps: int32[P, 4] and float32[P, 4], the entries of the learned grid that make up the
            patch's position embedding, and their weights.
          frame: int32[P], a number of its own for each frame of each image; -1: padding, which may hold
            anything and comes in whole merge blocks.

        Returns:
          [P / merge_unit, out_hidden_size], 0 in rows made of padding.
        """
        x = self.patch_embed(patches)
        x = x + self._positions(*position_taps).astype(x.dtype)
        angle = axial_angles(positions, self.config.head_dim, self.config.rope_theta)
        for block in self.blocks:
            x = block(x, angle, frame)
        out = self.merger(x)
        live = frame[:: self.config.merge_unit, None] >= 0
        return jnp.where(live, out, jnp.zeros((), out.dtype))

    def _positions(self, taps: jax.Array, weights: jax.Array) -> jax.Array:
        """int32[P, 4], float32[P, 4] -> float32[P, hidden]; the four products summed in order."""
        total = jnp.zeros((), jnp.float32)
        for i in range(taps.shape[1]):
            total = total + self.pos_embed(taps[:, i]).astype(jnp.float32) * weights[:, i, None]
        return total


def axial_angles(positions: jax.Array, head_dim: int, theta: float) -> jax.Array:
    """int32[P, 2] -> float32[P, head_dim / 2]: the angles of the rows, then those of the columns.

    The frequencies of both are theta^(-2i / (head_dim / 2)), i < head_dim / 4 (qwen4_exp 11).
    """
    half = head_dim // 2
    frequency = theta ** (-jnp.arange(0, half, 2, dtype=jnp.float32) / half)
    angle = positions.astype(jnp.float32)[:, :, None] * frequency
    return angle.reshape(positions.shape[0], half)


def _rotate(x: jax.Array, angle: jax.Array) -> jax.Array:
    """Rotates the pairs (x[i], x[i + D/2]) of [P, H, D] in float32."""
    cos, sin = jnp.cos(angle)[:, None, :], jnp.sin(angle)[:, None, :]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)


def _gelu(x: jax.Array, *, approximate: bool) -> jax.Array:
    return jax.nn.gelu(x.astype(jnp.float32), approximate=approximate).astype(x.dtype)


def _wide(parameter: nnx.Param) -> jax.Array:
    return parameter[...].astype(jnp.float32)
