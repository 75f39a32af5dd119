"""The host table against plain indexing of the concatenated shards."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from hybridjax.checkpoints.safetensors_file import SafetensorsFile
from hybridjax.errors import CheckpointError
from hybridjax.host_table import HostTable

BF16, F8 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn


def draw_shards(lengths, dim=5, dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((n, dim)).astype(np.float32).astype(dtype) for n in lengths]


@given(
    lengths=st.one_of(
        st.lists(st.integers(1, 9), min_size=1, max_size=6),
        st.tuples(st.integers(1, 9), st.integers(1, 6)).map(lambda x: [x[0]] * x[1]),
        st.tuples(st.integers(2, 9), st.integers(1, 6)).map(lambda x: [*[x[0]] * x[1], x[0] - 1]),
    ),
    data=st.data(),
)
def test_gather_equals_indexing(lengths, data):
    shards = draw_shards(lengths)
    plain = np.concatenate(shards)
    table = HostTable(shards, None, np.float32)
    assert table.shape == plain.shape
    rows = np.array(data.draw(st.lists(st.integers(0, len(plain) - 1), max_size=40)), np.int64)
    for shape in [(-1,), (-1, 1), (1, -1, 1)]:
        got = table.gather(rows.reshape(shape))
        np.testing.assert_array_equal(got, plain[rows.reshape(shape)])
    np.testing.assert_array_equal(table.to_ram().gather(rows), plain[rows])
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, len(plain))] * 2)))
    np.testing.assert_array_equal(table.rows(start, stop), plain[start:stop])


@pytest.mark.parametrize(("stored", "dtype"), [(BF16, BF16), (BF16, np.float32), (np.float32, BF16)])
def test_rows_come_in_the_dtype_asked_for(stored, dtype):
    shards = draw_shards([4, 4, 3], dtype=stored)
    want = np.concatenate(shards).astype(dtype)
    table = HostTable(shards, None, dtype)
    for got in (table.gather(np.arange(11)), table.to_ram().gather(np.arange(11)), table.rows(0, 11)):
        assert got.dtype == dtype
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("dtype", [BF16, np.float32])
def test_every_float8_code_is_scaled_in_bfloat16(dtype):
    """The released scale is no power of two, so the product's rounding shows."""
    codes = np.arange(256, dtype=np.uint8).reshape(16, 16).view(F8)
    scale = float(np.array(0x3951, np.uint16).view(BF16))
    assert scale == pytest.approx(1.99317932e-4, rel=1e-7)
    table = HostTable([codes[:7], codes[7:]], scale, dtype)
    exact = codes.astype(np.float64) * scale
    want = exact.astype(np.float32).astype(BF16).astype(dtype)
    for got in (table.gather(np.arange(16)), table.rows(0, 16), table.to_ram().gather(np.arange(16))):
        assert got.dtype == dtype
        # NumPy's comparison knows the NaN of its own types only.
        np.testing.assert_array_equal(got.astype(np.float32), want.astype(np.float32))
    # A scale between two bfloat16 numbers counts as the nearer one.
    near = HostTable([codes], scale * 1.0001, dtype).rows(0, 16)
    np.testing.assert_array_equal(near.astype(np.float32), want.astype(np.float32))


def test_shards_mapped_from_a_file_are_read_in_place(tmp_path):
    shards = draw_shards([6, 6, 6], dtype=BF16)
    save_file({f"shard_{i}": s for i, s in enumerate(shards)}, tmp_path / "x.safetensors")
    file = SafetensorsFile(tmp_path / "x.safetensors")
    mapped = []
    for i in range(3):
        info = file.tensors[f"shard_{i}"]
        flat = np.memmap(tmp_path / "x.safetensors", np.uint8, "r")[info.start : info.end]
        mapped.append(flat.view(BF16).reshape(info.shape))
    table = HostTable(mapped, None, BF16)
    rows = np.array([[17, 0], [5, 6]])
    np.testing.assert_array_equal(table.gather(rows), np.concatenate(shards)[rows])
    assert np.shares_memory(table.rows(6, 12), mapped[1])
    assert not np.shares_memory(table.to_ram().rows(6, 12), mapped[1])


def test_threads_may_read_together():
    shards = draw_shards([500] * 8, dim=16, dtype=BF16)
    plain = np.concatenate(shards)
    table = HostTable(shards, None, BF16)
    rows = [np.random.default_rng(i).integers(0, 4000, 300) for i in range(40)]
    with ThreadPoolExecutor(8) as threads:
        for got, r in zip(threads.map(table.gather, rows), rows):
            np.testing.assert_array_equal(got, plain[r])


@pytest.mark.parametrize("rows", [[-1], [11], [0, 3, 2**40]])
def test_rows_outside_the_table_are_refused(rows):
    table = HostTable(draw_shards([4, 4, 3]), None, np.float32)
    with pytest.raises(IndexError, match=rf"row {rows[-1]} of a table of 11 rows"):
        table.gather(np.array(rows))
    with pytest.raises(IndexError, match="rows 3..12 of a table of 11 rows"):
        table.rows(3, 12)


@pytest.mark.parametrize(
    ("shards", "scale", "message"),
    [
        ([], None, "no shards"),
        ([np.zeros((3, 4)), np.zeros((3, 5))], None, "shard 1 has 5 columns, shard 0 has 4"),
        ([np.zeros((3, 4)), np.zeros((3, 4), np.float32)], None, "shard 1 is float32, shard 0 is float64"),
        ([np.zeros((3, 4)), np.zeros(4)], None, r"shard 1 has shape \(4,\)"),
        ([np.zeros((3, 4)), np.zeros((0, 4))], None, r"shard 1 has shape \(0, 4\)"),
        ([np.zeros((3, 4)), np.zeros((2, 4))], None, "shards 0..1 have 5 rows, the last 2; the table has 6"),
        ([np.zeros((3, 4), F8)] * 2, None, "scale is None for shards of float8_e4m3fn"),
        ([np.zeros((3, 4), BF16)] * 2, 0.5, "scale is 0.5 for shards of bfloat16"),
    ],
)
def test_shards_that_do_not_fit_together_are_named(shards, scale, message):
    with pytest.raises(CheckpointError, match=message):
        HostTable(shards, scale, np.float32, total=6)


def test_the_module_needs_no_jax():
    code = "import sys, hybridjax.host_table; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
