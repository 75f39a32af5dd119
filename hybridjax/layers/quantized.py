"""Weights in NVFP4, and how they take the place of dense ones in a model."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from hybridjax.errors import ConfigError
from hybridjax.layers.linear import DenseWeight
from hybridjax.layers.sparse_moe import DenseExperts
from hybridjax.ops import nvfp4_w4a4, nvfp4_w4a16
from hybridjax.ops.dispatch import architecture
from hybridjax.ops.nvfp4 import kernel_fits
from hybridjax.ops.nvfp4_experts import nvfp4_experts
from hybridjax.ops.nvfp4_experts_w4a4 import nvfp4_experts_w4a4
from hybridjax.quantization import GROUP, NVFP4, to_words
from hybridjax.quantization.dispatch import activation_format

_FLOAT32 = jnp.dtype(jnp.float32)


def _codes(*shape: int) -> nnx.Param[jax.Array]:
    return nnx.Param(jnp.zeros((*shape[:-1], shape[-1] // 2), jnp.uint8))


def _scales(*shape: int) -> nnx.Param[jax.Array]:
    return nnx.Param(jnp.zeros((*shape[:-1], shape[-1] // GROUP), jnp.float8_e4m3fn))


class NVFP4Weight(nnx.Module):
    """An [out, in] matrix in NVFP4; filled by a loader.

    Args:
      shape: (out, in); in is a multiple of 16.
      shards: tensors of a checkpoint that fill the rows, each with an input scale of its own.
      calibrated: whether there are input scales, without which W4A4 is impossible.
      axes: logical names of the two axes.

    Attributes:
      codes: uint8[out, in / 2], or uint32[out, in / 8] once ``arrange`` has been called.
      scales: float8_e4m3fn[out, in / 16].
      global_scale: float32[out]: projections that share the matrix keep the scale they had apart.
      input_scale: float32[shards] or None; products use the largest, under which no shard's inputs clip.
      activations: "auto", "by_rows", "w4a16" or "w4a4": see ``quantization.dispatch``.
    """

    def __init__(
        self,
        shape: tuple[int, int],
        *,
        shards: int = 1,
        calibrated: bool = False,
        axes: tuple[str, str] = ("output", "input"),
    ):
        self.shape = shape
        self.axes = axes
        self.codes, self.scales = _codes(*shape), _scales(*shape)
        self.global_scale = nnx.Param(jnp.ones((shape[0],), _FLOAT32))
        self.input_scale = nnx.Param(jnp.ones((shards,), _FLOAT32)) if calibrated else None
        self.activations = "auto"

    def matmul(self, x: jax.Array, out_dtype: jnp.dtype | None = None) -> jax.Array:
        """x [..., in] -> [..., out] in ``out_dtype`` (by default that of x)."""
        rows = x.reshape(-1, x.shape[-1])
        calibrated = self.input_scale is not None
        weight = self.codes[...], self.scales[...], self.global_scale[...]
        how = activation_format(self.activations, len(rows), self.shape, calibrated, architecture())
        if how == "w4a4":
            assert self.input_scale is not None
            out = nvfp4_w4a4(rows, *weight, jnp.max(self.input_scale[...]), out_dtype)
        else:
            out = nvfp4_w4a16(rows, *weight, out_dtype)
        return out.reshape(*x.shape[:-1], self.shape[0])


class SplitWeight(nnx.Module):
    """An [out, in] matrix whose rows are stored in different ways.

    Args:
      parts: the weights, one below the other.
    """

    def __init__(self, parts: Sequence[DenseWeight | NVFP4Weight]):
        self.parts = nnx.List(parts)
        self.axes = parts[0].axes

    @property
    def shape(self) -> tuple[int, ...]:
        return (sum(part.shape[0] for part in self.parts), self.parts[0].shape[1])

    def matmul(self, x: jax.Array, out_dtype: jnp.dtype | None = None) -> jax.Array:
        """x [..., in] -> [..., out] in ``out_dtype`` (by default that of x)."""
        return jnp.concatenate([part.matmul(x, out_dtype) for part in self.parts], axis=-1)


class NVFP4Experts(nnx.Module):
    """Expert matrices in NVFP4, in place of ``DenseExperts``.

    Args:
      count: E; hidden: H; intermediate: I.
      calibrated: whether there are input scales: float32[E] for down, float32[2E] for gate and up. Products
        use the largest, under which no expert's inputs clip.
    """

    axes = DenseExperts.axes

    def __init__(self, count: int, hidden: int, intermediate: int, *, calibrated: bool = False):
        wide = (count, 2 * intermediate, hidden)
        narrow = (count, hidden, intermediate)
        self.gate_up_codes, self.gate_up_scales = _codes(*wide), _scales(*wide)
        self.gate_up_global = nnx.Param(jnp.ones(wide[:2], _FLOAT32))
        self.down_codes, self.down_scales = _codes(*narrow), _scales(*narrow)
        self.down_global = nnx.Param(jnp.ones(narrow[:2], _FLOAT32))
        self.gate_up_input = nnx.Param(jnp.ones((2 * count,), _FLOAT32)) if calibrated else None
        self.down_input = nnx.Param(jnp.ones((count,), _FLOAT32)) if calibrated else None
        self.activations = "auto"

    def apply(self, x: jax.Array, ids: jax.Array, weights: jax.Array) -> jax.Array:
        """x [N, H], ids int32[N, k] (-1: none), weights float32[N, k] -> the weighted sum [N, H]."""
        gate_up = NVFP4(self.gate_up_codes[...], self.gate_up_scales[...], self.gate_up_global[...])
        down = NVFP4(self.down_codes[...], self.down_scales[...], self.down_global[...])
        calibrated = self.gate_up_input is not None and self.down_input is not None
        # Each expert sees about this many rows.
        rows = -(-ids.size // gate_up.codes.shape[0])
        if activation_format(self.activations, rows, (0, 0), calibrated, architecture()) == "w4a16":
            return nvfp4_experts(x, ids, weights, gate_up, down)
        assert self.gate_up_input is not None and self.down_input is not None
        inputs = jnp.max(self.gate_up_input[...]), jnp.max(self.down_input[...])
        return nvfp4_experts_w4a4(x, ids, weights, gate_up, down, *inputs)


def set_activations(model: nnx.Module, activations: str) -> int:
    """Says how a model's NVFP4 weights treat activations, see ``quantization.dispatch``.

    Returns:
      How many of its weight modules are in NVFP4.

    Raises:
      ConfigError: "w4a4", and some of them have no input scale.
    """
    weights = [(path, node) for path, node in nnx.iter_graph(model) if _is_quantized(node)]
    for path, node in weights:
        calibrated = node.input_scale if isinstance(node, NVFP4Weight) else node.down_input
        if activations == "w4a4" and calibrated is None:
            raise ConfigError(
                f"nvfp4_activations is 'w4a4', but {'.'.join(map(str, path))} has no input scale; calibrate "
                "the checkpoint's activations, or use w4a16"
            )
        node.activations = activations
    return len(weights)


def arrange(model: nnx.Module) -> int:
    """Arranges the codes of all weights that a GPU kernel multiplies here as it wants them, in place.

    Values and results stay the same, and checkpoints that are saved, too; what reads codes by itself has to
    ask their dtype. One matrix at a time is held twice.

    Returns:
      How many matrices were arranged.
    """
    arranged = 0
    for _, node in nnx.iter_graph(model):
        if isinstance(node, NVFP4Weight):
            pairs = [(node.codes, node.scales)]
        elif isinstance(node, NVFP4Experts):
            pairs = [(node.gate_up_codes, node.gate_up_scales), (node.down_codes, node.down_scales)]
        else:
            continue
        for codes, scales in pairs:
            rows, columns = scales.shape[-2], GROUP * scales.shape[-1]
            if codes.dtype == jnp.uint8 and kernel_fits(jnp.dtype(jnp.bfloat16), rows, columns):
                codes.set_value(to_words(codes[...]))
                arranged += 1
    return arranged


def _is_quantized(node: object) -> bool:
    return isinstance(node, NVFP4Weight | NVFP4Experts)
