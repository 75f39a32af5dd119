"""Host memory that the device reads in place, as a ``jax.Array``.

A GPU reaches pinned host memory through the bus: a program that reads a few rows of a large table needs
neither a copy of the table nor the host's help. JAX has no name for such arrays, so the memory is registered
with the CUDA driver and handed to JAX through DLPack, as if it were the device's own. On a CPU the view is
the array itself.
"""

import contextlib
import ctypes
import functools
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from hybridjax.host_table import ALIGNMENT

_CPU, _CUDA = 1, 2  # DLDeviceType
_UNSIGNED = 1  # DLDataTypeCode
_PORTABLE_AND_MAPPED = 3  # CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP


class MappingError(Exception):
    """The driver does not let the device read this memory."""


class MappedMemory:
    """A view of an array for the default device.

    Args:
      array: C-contiguous unsigned integers, aligned as by ``host_table.aligned_empty``; must not change
        before ``close``.

    Attributes:
      view: the same values as a jax.Array.

    Raises:
      MappingError: the driver refuses, or the platform is neither a CPU nor CUDA.
    """

    def __init__(self, array: np.ndarray):
        if array.dtype.kind != "u" or not array.flags.c_contiguous or array.ctypes.data % ALIGNMENT:
            raise MappingError(f"an array of {array.dtype} that is not contiguous or not aligned")
        self._array = array
        self._registered = False
        platform = jax.default_backend()
        if platform not in ("cpu", "gpu"):
            raise MappingError(f"platform {platform} has no mapped host memory")
        pointer, kind = array.ctypes.data, _CPU
        if platform == "gpu":
            pointer, kind = _register(array), _CUDA
            self._registered = True
        try:
            self.view: jax.Array = jax.dlpack.from_dlpack(_Tensor(pointer, kind, array), copy=False)
        except Exception as error:
            self._unregister()
            raise MappingError(f"JAX does not take the memory: {error}") from error
        # The view does not own its memory: it stays until ``close``, whoever forgets this object.
        _OPEN.add(self)

    def close(self) -> None:
        """Ends the mapping; nothing may use the view any more. Idempotent."""
        if not self.view.is_deleted():
            self.view.delete()
        self._unregister()
        _OPEN.discard(self)

    def _unregister(self) -> None:
        if self._registered:
            self._registered = False
            _unpin(self._array)


def _unpin(array: np.ndarray) -> None:
    with _context() as cuda:
        _check(cuda.cuMemHostUnregister(ctypes.c_void_p(array.ctypes.data)), "unpin memory")


def _register(array: np.ndarray) -> int:
    """Pins an array's memory; returns the address under which the device reads it."""
    start, address = ctypes.c_void_p(array.ctypes.data), ctypes.c_void_p()
    size = ctypes.c_size_t(array.nbytes)
    with _context() as cuda:
        _check(cuda.cuMemHostRegister_v2(start, size, _PORTABLE_AND_MAPPED), f"pin {array.nbytes} bytes")
        result = cuda.cuMemHostGetDevicePointer_v2(ctypes.byref(address), start, 0)
    if result or address.value is None:
        _unpin(array)
        raise MappingError(f"the CUDA driver could not map pinned memory: error {result}")
    return address.value


@contextlib.contextmanager
def _context() -> Iterator[Any]:
    """The CUDA driver, with the context that JAX uses current in this thread."""
    cuda, context = _driver()
    _check(cuda.cuCtxPushCurrent_v2(context), "use JAX's context")
    try:
        yield cuda
    finally:
        cuda.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))


@functools.cache
def _driver() -> tuple[Any, ctypes.c_void_p]:
    """The CUDA driver's library, and the context of the default device."""
    device = jax.local_devices()[0]  # JAX makes the context
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise MappingError(f"no CUDA driver: {error}") from error
    number, context = ctypes.c_int(), ctypes.c_void_p()
    _check(cuda.cuInit(0), "start")
    _check(cuda.cuDeviceGet(ctypes.byref(number), device.local_hardware_id or 0), "find the device")
    _check(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), number), "share JAX's context")
    return cuda, context


def _check(result: int, what: str) -> None:
    if result:
        raise MappingError(f"the CUDA driver could not {what}: error {result}")


class _DLDevice(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int32), ("id", ctypes.c_int32))


class _DLDataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _DLManagedTensor(ctypes.Structure):
    """DLTensor and, behind it, what manages it (dlpack.h, version 0)."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _DLDevice),
        ("ndim", ctypes.c_int32),
        ("dtype", _DLDataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


# JAX lets go of arrays also while the interpreter ends, when neither a Python function nor memory of Python's
# can be relied on: the deleter is a C function that does nothing to its argument, and structures stay.
_NOTHING = ctypes.cast(ctypes.CDLL(None).labs, ctypes.c_void_p)
_STRUCTURES: list[Any] = []
_OPEN: set[MappedMemory] = set()


class _Tensor:
    """What ``from_dlpack`` asks for."""

    def __init__(self, pointer: int, kind: int, array: np.ndarray):
        self._kind = kind
        shape = (ctypes.c_int64 * array.ndim)(*array.shape)
        strides = (ctypes.c_int64 * array.ndim)(*(s // array.itemsize for s in array.strides))
        dtype = _DLDataType(_UNSIGNED, 8 * array.itemsize, 1)
        device = _DLDevice(kind, 0)
        self._managed = _DLManagedTensor(
            pointer, device, array.ndim, dtype, shape, strides, 0, None, _NOTHING
        )
        _STRUCTURES.append((self._managed, shape, strides))

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._kind, 0

    def __dlpack__(self, **_: Any) -> Any:
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
        return new(ctypes.addressof(self._managed), b"dltensor", None)
