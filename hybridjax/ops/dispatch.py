"""Choosing the implementation of an op.

Every op has one readable reference, its definition. Faster implementations are registered beside it,
with the platforms and arguments they support; ``implementation=None`` takes the first in order of
registration that fits, a name takes exactly that one or raises. Implementations given as
``"module:function"`` are imported only when chosen, so GPU kernels cost nothing elsewhere.
"""

import contextlib
import contextvars
import dataclasses
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import jax

from hybridjax.errors import ConfigError

_SCRATCH_BYTES = 2**27

OPS: dict[str, "Op"] = {}

# op name -> implementation name, set for a whole engine by override().
_forced: contextvars.ContextVar[dict[str, str]] = contextvars.ContextVar("forced", default={})  # noqa: B039


# An architecture to choose for in place of the machine's own, set by assume().
_assumed: contextvars.ContextVar[str | None] = contextvars.ContextVar("assumed", default=None)


def architecture() -> str:
    """What a program traced now will run on: 'sm_90' and the like for NVIDIA GPUs, else the platform."""
    if (assumed := _assumed.get()) is not None:
        return assumed
    device = jax.config.jax_default_device or jax.devices()[0]  # pyright: ignore[reportAttributeAccessIssue]
    capability = getattr(device, "compute_capability", None)
    return "sm_" + str(capability).replace(".", "") if capability and platform() == "gpu" else platform()


@contextlib.contextmanager
def assume(architecture: str) -> Iterator[None]:
    """Choices as on another machine: 'cpu', 'tpu', 'sm_90', ...; nothing that is computed changes."""
    token = _assumed.set(architecture)
    try:
        yield
    finally:
        _assumed.reset(token)


def platform() -> str:
    """The platform that a program traced now will run on: 'cpu', 'gpu' or 'tpu'."""
    if (assumed := _assumed.get()) is not None:
        return "gpu" if assumed.startswith("sm_") else assumed
    device = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    name = getattr(device, "platform", device) or jax.default_backend()
    return "gpu" if name in ("cuda", "rocm") else name


def _described(args: tuple, kwargs: dict[str, Any]) -> str:
    """Dtypes and shapes of the arrays among an op's arguments."""
    arrays = (x for x in (*args, *kwargs.values()) if hasattr(x, "shape") and hasattr(x, "dtype"))
    return ", ".join(f"{x.dtype}{list(x.shape)}" for x in arrays)


@dataclasses.dataclass(frozen=True)
class _Implementation:
    target: Callable[..., Any] | str
    platforms: tuple[str, ...] | None
    supports: Callable[..., bool] | None

    def load(self) -> Callable[..., Any]:
        if callable(self.target):
            return self.target
        module, _, name = self.target.partition(":")
        return getattr(importlib.import_module(module), name)


class Op:
    """A named op with its reference and its implementations."""

    def __init__(self, name: str, reference: Callable[..., Any]):
        self.name = name
        self.reference = reference
        self.__doc__ = reference.__doc__
        self._implementations: dict[str, _Implementation] = {}
        OPS[name] = self

    def register(
        self,
        name: str,
        target: Callable[..., Any] | str,
        *,
        platforms: tuple[str, ...] | None = None,
        supports: Callable[..., bool] | None = None,
        first: bool = False,
    ) -> None:
        """Adds an implementation.

        Args:
          name: what users pass as ``implementation``.
          target: a function with the reference's signature, or ``"module:function"``.
          platforms: 'cpu', 'gpu', 'tpu'; None: all.
          supports: called with the op's arguments; False makes the automatic choice pass on.
          first: put it before those already registered.
        """
        if name == "reference" or name in self._implementations:
            raise ConfigError(f"implementation {name!r} of op {self.name!r} is registered twice")
        item = _Implementation(target, platforms, supports)
        rest = self._implementations
        self._implementations = {name: item, **rest} if first else {**rest, name: item}

    @property
    def names(self) -> tuple[str, ...]:
        """Implementation names in order of preference, the reference last."""
        return (*self._implementations, "reference")

    def select(self, *args: Any, implementation: str | None = None, **kwargs: Any) -> str:
        """The name of the implementation that a call with these arguments would use."""
        name = implementation or _forced.get().get(self.name)
        if name is None:
            for candidate, item in self._implementations.items():
                fits = item.platforms is None or platform() in item.platforms
                if fits and (item.supports is None or item.supports(*args, **kwargs)):
                    return candidate
            return "reference"
        if name not in self.names:
            raise ConfigError(f"op {self.name!r} has no implementation {name!r}; it has {self.names}")
        if name != "reference":
            item = self._implementations[name]
            if item.platforms is not None and platform() not in item.platforms:
                raise NotImplementedError(
                    f"{self.name}: implementation {name!r} runs on {item.platforms}, not on {platform()!r}"
                )
            if item.supports is not None and not item.supports(*args, **kwargs):
                raise NotImplementedError(
                    f"{self.name}: implementation {name!r} does not support these arguments on "
                    f"{architecture()}: {_described(args, kwargs)}"
                )
        return name

    def __call__(self, *args: Any, implementation: str | None = None, **kwargs: Any) -> Any:
        name = self.select(*args, implementation=implementation, **kwargs)
        function = self.reference if name == "reference" else self._implementations[name].load()
        with jax.named_scope(f"{self.name}[{name}]"):
            return function(*args, **kwargs)


def parse_override(spec: str | None) -> dict[str, str]:
    """Op names to implementation names from 'op=name[,op=name]' or None.

    Raises:
      ConfigError: an unknown op or implementation.
    """
    forced = {}
    for item in filter(None, (spec or "").split(",")):
        op, _, name = (part.strip() for part in item.partition("="))
        if op not in OPS:
            raise ConfigError(f"implementation names op {op!r}; known ops: {', '.join(sorted(OPS))}")
        if name not in OPS[op].names:
            raise ConfigError(f"op {op!r} has no implementation {name!r}; it has {OPS[op].names}")
        forced[op] = name
    return forced


@contextlib.contextmanager
def override(spec: str | None) -> Iterator[None]:
    """Forces implementations while programs are traced; see parse_override."""
    token = _forced.set(parse_override(spec))
    try:
        yield
    finally:
        _forced.reset(token)


def matmul_precision(*dtypes: Any) -> jax.lax.Precision:
    """Full float32 products for float32 operands (no TF32), the default for narrower ones."""
    wide = any(jax.numpy.dtype(d) == jax.numpy.float32 for d in dtypes)
    return jax.lax.Precision.HIGHEST if wide else jax.lax.Precision.DEFAULT


def einsum_f32(spec: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """einsum with float32 products and sums of float32, bfloat16 or float16 operands."""
    if platform() == "cpu":
        # XLA's CPU backend has no mixed-precision matmul for every shape.
        x, y = x.astype(jax.numpy.float32), y.astype(jax.numpy.float32)
    precision = matmul_precision(x.dtype, y.dtype)
    return jax.numpy.einsum(spec, x, y, precision=precision, preferred_element_type=jax.numpy.float32)


def tiles_at_once(tiles: int, bytes_per_tile: int) -> int:
    """How many tiles a mapped op works on together, given the float32 scratch of each."""
    if platform() == "cpu":
        return 1  # one tile fits the cache, several do not: measured 4 x slower
    return max(1, min(tiles, _SCRATCH_BYTES // bytes_per_tile))
