"""Compiled programs, some of them compiled at their first use."""

from collections.abc import Callable, Hashable
from typing import Any

import jax


class Programs(dict[Hashable, Any]):
    """Compiled programs by what they are for.

    Everything that may be compiled while requests run is compiled by ``late``, ahead of its call: a call of
    ``jax.jit`` may compile again for a reason that nobody sees, such as how an array came to its device.

    Attributes:
      is_compiling: whether ``late`` compiles now, which may take minutes and is no hang; read by any thread.
    """

    is_compiling = False

    def late(self, key: Hashable, compile: Callable[[], Any]) -> Any:
        """The program for ``key``, compiled now if need be. Used by one thread."""
        program = self.get(key)
        if program is None:
            self.is_compiling = True
            try:
                program = self[key] = compile()
            finally:
                self.is_compiling = False
        return program


def abstract(tree: Any) -> Any:
    """Shapes, dtypes and places of arrays, for ``lower``; those on the host as they are."""
    return jax.tree.map(
        lambda x: (
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) if isinstance(x, jax.Array) else x
        ),
        tree,
    )
