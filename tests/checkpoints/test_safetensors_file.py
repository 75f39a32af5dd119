"""Headers are checked completely before a tensor is read; no damaged file raises anything else."""

import struct
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from damage import write_raw
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save, save_file

from hybridjax.checkpoints.safetensors_file import DTYPES, SafetensorsFile, write_safetensors
from hybridjax.errors import CheckpointError

F32 = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
BF16 = np.dtype(ml_dtypes.bfloat16)


def read_all(path: Path) -> dict[str, np.ndarray]:
    file = SafetensorsFile(path)
    return {name: file.read(name) for name in file.tensors}


def test_reads_what_the_reference_writes(tmp_path):
    tensors = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "b": np.array([1.5, -2.0, 3.0e38]).astype(BF16),
        "c": np.float16([[1], [2]]),
        "d": np.uint8([0, 255, 7]),
        "e": np.array(3, np.int64),
        "f": np.zeros((0, 4), np.float32),
        "g": np.array([True, False]),
    }
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt"})
    file = SafetensorsFile(tmp_path / "x.safetensors")
    assert file.metadata == {"format": "pt"}
    assert file.tensors.keys() == tensors.keys()
    for name, value in tensors.items():
        read = file.read(name)
        assert read.dtype == value.dtype and read.shape == value.shape
        assert read.tobytes() == value.tobytes()
        assert not read.flags.writeable


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_comes_back(tmp_path, name: str):
    value = np.arange(12, dtype=np.uint8).view(np.uint8)
    value = np.repeat(value, 8)[: 12 * DTYPES[name].itemsize] % 2
    value = value.view(DTYPES[name]).reshape(3, 4)
    path = tmp_path / "x.safetensors"
    write_safetensors(path, {"t": (value.dtype, value.shape)}, lambda _: value, {"k": "v"})
    read = read_all(path)["t"]
    assert read.dtype == DTYPES[name] and read.shape == (3, 4) and read.tobytes() == value.tobytes()


def test_the_reference_reads_what_we_write(tmp_path):
    tensors = {
        "x": np.arange(3, dtype=np.float32),
        "y": np.float32([[1, 2]]).astype(BF16),
        "z": np.float32(7),
    }
    path = tmp_path / "x.safetensors"
    write_safetensors(path, {n: (t.dtype, t.shape) for n, t in tensors.items()}, tensors.__getitem__)
    read = load_file(path)
    assert {n: (t.dtype, t.shape, t.tobytes()) for n, t in read.items()} == {
        n: (t.dtype, t.shape, t.tobytes()) for n, t in tensors.items()
    }
    (length,) = struct.unpack("<Q", path.read_bytes()[:8])
    assert length % 8 == 0


def test_an_existing_file_is_not_overwritten(tmp_path):
    (tmp_path / "x").write_text("mine")
    with pytest.raises(FileExistsError):
        write_safetensors(tmp_path / "x", {}, dict.__getitem__)
    assert (tmp_path / "x").read_text() == "mine"


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        (b"", b"", "does not start with"),
        (b"[]", b"", "does not start with"),
        (b" {}", b"", "does not start with"),
        (b"{", b"", "not JSON"),
        (b'{"a": \xff}', b"", "not JSON"),
        (b'{"a":' * 100_000, b"", "not JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", b"", "not JSON"),
        (b'{"a": {"dtype": "F32", "dtype": "F32"}}', b"", "appears twice"),
        ({"__metadata__": [1]}, b"", "__metadata__ must map"),
        ({"__metadata__": {"a": 1}}, b"", "__metadata__ must map"),
        ({"a": 1}, b"", "'a' must have dtype, shape and data_offsets"),
        ({"a": {"dtype": "F32", "shape": [2]}}, b"", "must have dtype"),
        ({"a": F32 | {"more": 1}}, bytes(8), "must have dtype"),
        ({"a": F32 | {"dtype": "F31"}}, bytes(8), "dtype 'F31'; known: BOOL, U8"),
        ({"a": F32 | {"dtype": ["F32"]}}, bytes(8), "dtype"),
        ({"a": F32 | {"shape": 2}}, bytes(8), "has shape 2"),
        ({"a": F32 | {"shape": [2.0]}}, bytes(8), r"has shape \[2.0\]"),
        ({"a": F32 | {"shape": [True, 2]}}, bytes(8), "has shape"),
        ({"a": F32 | {"shape": [-1, -2]}}, bytes(8), "has shape"),
        ({"a": F32 | {"shape": [1] * 40 + [2]}}, bytes(8), "at most 8 sizes"),
        ({"a": F32 | {"shape": [2**62, 2**62, 4]}}, bytes(8), "impossibly large"),
        ({"a": F32 | {"shape": [0, 2**62], "data_offsets": [0, 0]}}, b"", "impossibly large"),
        ({"a": F32 | {"shape": [3]}}, bytes(8), r"F32\[3\] needs 12 bytes"),
        ({"a": F32 | {"data_offsets": [8, 0]}}, bytes(8), "needs 8 bytes"),
        ({"a": F32 | {"data_offsets": [0, 8, 16]}}, bytes(8), "must be .begin, end."),
        ({"a": F32 | {"data_offsets": [-8, 0]}}, bytes(8), "must be .begin, end."),
        ({"a": F32}, bytes(7), "truncated: the tensors end at byte"),
        ({"a": F32}, bytes(9), "data after the last tensor"),
        ({"a": F32 | {"data_offsets": [4, 12]}}, bytes(12), "'a' leaves a gap"),
        ({"a": F32, "b": F32}, bytes(8), "'b' overlaps another tensor"),
        ({"a": F32, "b": F32 | {"data_offsets": [4, 12]}}, bytes(12), "'b' overlaps"),
        ({"a": F32, "b": F32 | {"data_offsets": [16, 24]}}, bytes(24), "'b' leaves a gap"),
    ],
)
def test_malformed_headers(tmp_path, header, data: bytes, message: str):
    path = write_raw(tmp_path / "bad.safetensors", header, data)
    with pytest.raises(CheckpointError, match=message) as caught:
        SafetensorsFile(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "0 bytes"),
        (b"1234567", "7 bytes"),
        (struct.pack("<Q", 2**63) + b"{}", "at most 100000000"),
        (struct.pack("<Q", 100_000_001) + b"{}", "at most 100000000"),
        (struct.pack("<Q", 100_000_000) + b"{}", "truncated"),
        (struct.pack("<Q", 3) + b"{}", "truncated"),
    ],
)
def test_header_lengths_are_bounded(tmp_path, content: bytes, message: str):
    path = tmp_path / "bad.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        SafetensorsFile(path)


def test_no_file_and_no_regular_file(tmp_path):
    for path in (tmp_path / "absent.safetensors", tmp_path):
        with pytest.raises(CheckpointError, match="no such file"):
            SafetensorsFile(path)


SMALL = save(
    {
        "model.w": np.arange(6, dtype=np.float32).reshape(2, 3),
        "model.b": np.zeros(3, BF16),
        "model.s": np.array(1, np.uint8),
    },
    metadata={"format": "pt"},
)


@settings(max_examples=600, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    flips=st.lists(st.tuples(st.integers(0, len(SMALL) - 1), st.integers(0, 255)), max_size=4),
    end=st.one_of(st.just(len(SMALL)), st.integers(0, len(SMALL) + 4)),
)
def test_damaged_files_load_or_raise_checkpoint_error(tmp_path, flips, end: int):
    content = bytearray(SMALL)
    for position, value in flips:
        content[position] = value
    path = tmp_path / "fuzz.safetensors"
    path.write_bytes(bytes(content[:end]).ljust(end, b"\0"))
    try:
        read = read_all(path)
    except CheckpointError as error:
        assert str(path) in str(error)
    else:
        assert sum(value.nbytes for value in read.values()) <= end


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(list(DTYPES)),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
ITEM = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(list(DTYPES)) | JSON,
        "shape": st.lists(st.integers(-2, 2**70), max_size=4)
        | st.lists(st.integers(0, 4), max_size=10)
        | JSON,
        "data_offsets": st.lists(st.integers(0, 32), min_size=2, max_size=2) | JSON,
    },
)


@settings(max_examples=600, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(header=st.dictionaries(st.text(max_size=4) | st.just("__metadata__"), ITEM | JSON, max_size=4))
def test_arbitrary_headers_load_or_raise_checkpoint_error(tmp_path, header):
    path = write_raw(tmp_path / "fuzz.safetensors", header, bytes(32))
    try:
        read_all(path)
    except CheckpointError as error:
        assert str(path) in str(error)
