"""One buffer for all small arrays of a step: a transfer costs more than the bytes it carries."""

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Field:
    """A named array of 32-bit elements (int32, uint32, float32) or of bools."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "int32"


class Layout:
    """Where each field lies in an int32 buffer; ``pack`` on the host, ``unpack`` under jit."""

    def __init__(self, fields: tuple[Field, ...]):
        self.fields = fields
        sizes = [int(np.prod(f.shape)) for f in fields]
        self._starts = np.concatenate([[0], np.cumsum(sizes)]).tolist()

    @property
    def size(self) -> int:
        """int32 elements of the buffer."""
        return self._starts[-1]

    def empty(self) -> dict[str, np.ndarray]:
        """Zeroed host arrays of every field, views of one new buffer under the key ''."""
        buffer = np.zeros(self.size, np.int32)
        views = {"": buffer}
        for field, start, end in zip(self.fields, self._starts, self._starts[1:]):
            part = buffer[start:end].reshape(field.shape)
            views[field.name] = part if field.dtype in ("int32", "bool") else part.view(field.dtype)
        return views

    def unpack(self, buffer: jax.Array) -> Mapping[str, jax.Array]:
        """The fields of an int32[size] buffer."""
        out = {}
        for field, start, end in zip(self.fields, self._starts, self._starts[1:]):
            part = buffer[start:end].reshape(field.shape)
            if field.dtype == "bool":
                part = part != 0
            elif field.dtype != "int32":
                part = jax.lax.bitcast_convert_type(part, jnp.dtype(field.dtype))
            out[field.name] = part
        return out
