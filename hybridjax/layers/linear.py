"""Linear projections and embeddings. A weight is a small module that alone knows how it is stored."""

from collections.abc import Sequence
from typing import Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from hybridjax.ops.dispatch import einsum_f32, matmul_precision

Initializer = jax.nn.initializers.Initializer


class Weight(Protocol):
    """What a linear layer multiplies by, however it is stored."""

    axes: tuple[str, str]

    @property
    def shape(self) -> tuple[int, ...]: ...

    def matmul(self, x: jax.Array, out_dtype: jnp.dtype | None = None) -> jax.Array: ...


class DenseWeight(nnx.Module):
    """A plain [out, in] matrix, laid out as PyTorch stores it.

    Args:
      shape: (out, in).
      axes: logical names of the two axes; one table maps them to mesh axes.
    """

    def __init__(
        self,
        shape: tuple[int, int],
        *,
        init: Initializer,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
        axes: tuple[str, str] = ("output", "input"),
    ):
        self.value = nnx.Param(init(rngs.params(), shape, dtype))
        self.axes = axes

    def of_shape(self, shape: tuple[int, int]) -> "DenseWeight":
        """A weight of zeros like this one, but of another shape."""
        zeros = jax.nn.initializers.zeros
        return DenseWeight(shape, init=zeros, dtype=self.value[...].dtype, rngs=nnx.Rngs(0), axes=self.axes)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.value.get_value().shape

    def matmul(self, x: jax.Array, out_dtype: jnp.dtype | None = None) -> jax.Array:
        """x [..., in] -> [..., out] in ``out_dtype`` (by default that of x)."""
        weight = self.value[...]
        if out_dtype == jnp.float32:
            return einsum_f32("...i,oi->...o", x, weight)
        precision = matmul_precision(x.dtype, weight.dtype)
        return jnp.einsum("...i,oi->...o", x, weight, precision=precision).astype(out_dtype or x.dtype)


class Linear(nnx.Module):
    """y = x W^T without bias; several projections of one input may share the matrix.

    Args:
      in_features: size of the last axis of x.
      out_features: sizes of the projections, stacked along the rows in this order.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int | Sequence[int],
        *,
        init: Initializer,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
        axes: tuple[str, str] = ("output", "input"),
    ):
        sizes = (out_features,) if isinstance(out_features, int) else tuple(out_features)
        self.sizes = sizes
        shape = (sum(sizes), in_features)
        self.weight: Weight = DenseWeight(shape, init=init, dtype=dtype, rngs=rngs, axes=axes)

    def __call__(self, x: jax.Array, out_dtype: jnp.dtype | None = None) -> jax.Array:
        """x [..., in] -> [..., sum(out_features)]."""
        return self.weight.matmul(x, out_dtype)

    def split(self, x: jax.Array) -> list[jax.Array]:
        """The projections one by one: x [..., in] -> a list of [..., out_i]."""
        bounds = [sum(self.sizes[: i + 1]) for i in range(len(self.sizes) - 1)]
        return jnp.split(self(x), bounds, axis=-1)


class Embedding(nnx.Module):
    """A token table [vocab, hidden]."""

    def __init__(self, vocab: int, hidden: int, *, init: Initializer, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.weight = DenseWeight(
            (vocab, hidden), init=init, dtype=dtype, rngs=rngs, axes=("vocab", "hidden")
        )

    def __call__(self, ids: jax.Array) -> jax.Array:
        """int32[...] -> [..., hidden]."""
        return jnp.take(self.weight.value[...], ids, axis=0)
