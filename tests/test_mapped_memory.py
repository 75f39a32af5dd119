"""Host memory read in place: on a CPU by the same DLPack structures, on a GPU by the driver's mapping."""

import gc
import types

import jax
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from hybridjax import mapped_memory
from hybridjax.host_table import HostTable, aligned_empty
from hybridjax.layers.ngram_embedding import MappedTable
from hybridjax.mapped_memory import MappedMemory, MappingError
from hybridjax.serving.mapped_tables import map_tables


def filled(shape, dtype):
    array = aligned_empty(shape, dtype)
    array[...] = np.random.default_rng(0).integers(0, np.iinfo(dtype).max, shape, dtype)
    return array


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32])
def test_a_view_is_the_memory_itself(dtype):
    array = filled((1000, 3), dtype)
    memory = MappedMemory(array)
    np.testing.assert_array_equal(np.asarray(memory.view), array)
    if jax.default_backend() == "cpu":
        assert memory.view.unsafe_buffer_pointer() == array.ctypes.data
        array[7] = 1
        assert np.asarray(memory.view)[7].tolist() == [1, 1, 1]
    memory.close()
    memory.close()
    assert memory.view.is_deleted()
    gc.collect()
    assert array[7, 0] == array[7, 0]  # still ours


def test_what_cannot_be_mapped_is_refused():
    whole = filled((64, 8), np.uint8)
    for bad in (whole[:, ::2], whole.reshape(-1)[1:65], whole.view(np.int8)):
        with pytest.raises(MappingError, match="not contiguous or not aligned"):
            MappedMemory(bad)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("stored", [np.float32, ml_dtypes.bfloat16, np.float16, ml_dtypes.float8_e4m3fn])
def test_a_mapped_table_gives_the_bits_that_the_host_gathers(stored, dtype):
    rng = np.random.default_rng(1)
    values = rng.normal(size=(500, 12)).astype(stored)
    scale = 0.0123 if stored == ml_dtypes.float8_e4m3fn else None
    table = HostTable(np.array_split(values, 3), scale, dtype).to_ram()
    memory = MappedMemory(table.codes)
    mapped = MappedTable(memory.view, table.stored_dtype, table.values, table.dtype)
    rows = rng.integers(0, 500, (7, 5)).astype(np.int32)
    got = nnx.jit(lambda m, r: m(r))(mapped, rows)
    assert got.dtype == dtype
    np.testing.assert_array_equal(np.asarray(got).view(np.uint8), table.gather(rows).view(np.uint8))
    memory.close()


def test_tables_on_disk_or_in_shards_are_not_mapped():
    shards = np.array_split(np.ones((10, 4), np.float32), 2)
    model = types.SimpleNamespace(host_tables=[HostTable(shards, None, np.float32)])
    assert map_tables(model) == []
    assert map_tables(types.SimpleNamespace(host_tables=None)) == []
    assert map_tables(types.SimpleNamespace()) == []


def test_a_driver_that_refuses_leaves_the_tables_to_the_host(monkeypatch, caplog):
    table = HostTable([np.ones((10, 4), np.float32)], None, np.float32).to_ram()
    model = types.SimpleNamespace(host_tables=[table, table])
    made = []

    class Refusing(MappedMemory):
        def __init__(self, array):
            if made:
                raise MappingError("the CUDA driver could not pin 160 bytes: error 2")
            super().__init__(array)
            made.append(self)

    monkeypatch.setattr("hybridjax.serving.mapped_tables.MappedMemory", Refusing)
    assert map_tables(model) == []
    assert model.host_tables == [table, table]
    assert made[0].view.is_deleted(), "what was mapped before is let go"
    assert "could not pin 160 bytes" in caplog.text


class Driver:
    """What the module calls of libcuda, with its errors."""

    def __init__(self, failing=""):
        self.failing, self.calls = failing, []

    def __getattr__(self, name):
        def call(*args):
            self.calls.append(name)
            if name == "cuMemHostGetDevicePointer_v2" and name != self.failing:
                args[0]._obj.value = args[1].value
            return 2 if name == self.failing else 0

        return call


def driver(monkeypatch, failing=""):
    cuda = Driver(failing)
    mapped_memory._driver.cache_clear()
    monkeypatch.setattr(mapped_memory.ctypes, "CDLL", lambda name: cuda)
    return cuda


def test_registering_pairs_every_push_of_the_context_with_a_pop(monkeypatch):
    cuda = driver(monkeypatch)
    array = filled((4, 4), np.uint8)
    assert mapped_memory._register(array) == array.ctypes.data
    assert cuda.calls[:3] == ["cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain"]
    assert cuda.calls[3] == "cuCtxPushCurrent_v2" and cuda.calls[-1] == "cuCtxPopCurrent_v2"
    mapped_memory._driver.cache_clear()


@pytest.mark.parametrize(
    ("failing", "message"),
    [
        ("cuInit", "could not start: error 2"),
        ("cuMemHostRegister_v2", "could not pin 16 bytes: error 2"),
        ("cuMemHostGetDevicePointer_v2", "could not map pinned memory"),
    ],
)
def test_a_driver_s_errors_say_what_failed(monkeypatch, failing, message):
    driver(monkeypatch, failing)
    with pytest.raises(MappingError, match=message):
        mapped_memory._register(filled((4, 4), np.uint8))
    mapped_memory._driver.cache_clear()


def test_without_a_driver(monkeypatch):
    def missing(name):
        raise OSError(f"{name}: not found")

    mapped_memory._driver.cache_clear()
    monkeypatch.setattr(mapped_memory.ctypes, "CDLL", missing)
    with pytest.raises(MappingError, match="no CUDA driver: libcuda"):
        mapped_memory._register(filled((4, 4), np.uint8))


def test_memory_stays_as_long_as_its_view_may_be_read():
    array = filled((1 << 16, 64), np.uint8)
    want = array[::4096].copy()
    view = MappedMemory(array).view
    del array
    gc.collect()
    _ = [np.ones(1 << 22, np.uint8) for _ in range(8)]
    np.testing.assert_array_equal(np.asarray(view)[::4096], want)
    for memory in list(mapped_memory._OPEN):
        if memory.view is view:
            memory.close()
    assert all(memory.view is not view for memory in mapped_memory._OPEN)


def test_what_was_pinned_is_unpinned_if_it_cannot_be_mapped(monkeypatch):
    cuda = driver(monkeypatch, "cuMemHostGetDevicePointer_v2")
    with pytest.raises(MappingError, match="could not map pinned memory: error 2"):
        mapped_memory._register(filled((4, 4), np.uint8))
    assert "cuMemHostUnregister" in cuda.calls
    mapped_memory._driver.cache_clear()
