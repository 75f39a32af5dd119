"""N-gram tables on the host: what is copied, what is not, and how they are written back."""

import os

import jax
import numpy as np
import pytest
from damage import GOLDENS, QWEN_GOLDENS, edit_stored, read_all, split_file
from flax import nnx

from hybridjax.checkpoints import load_model, ngram_tables, save_pretrained
from hybridjax.checkpoints.safetensors_file import SafetensorsFile
from hybridjax.errors import CheckpointError, ConfigError
from hybridjax.models.qwen4_exp_entries import table_path

TABLE = (2176, 16)


@pytest.mark.parametrize("offload", ["host", "mmap"])
def test_tables_on_the_host_are_no_parameters(offload: str):
    device = load_model(QWEN_GOLDENS / "text_two_ple")
    asked = []

    def place(path, shape):
        asked.append(path)
        return jax.devices()[0]

    model = load_model(QWEN_GOLDENS / "text_two_ple", ple_offload=offload, sharding=place)
    paths = dict(nnx.to_flat_state(nnx.state(model, nnx.Param)))
    whole = dict(nnx.to_flat_state(nnx.state(device, nnx.Param)))
    assert whole.keys() - paths.keys() == {table_path(1), table_path(5)}
    assert sorted(map(str, asked)) == sorted(map(str, paths))
    assert [table.shape for table in model.host_tables] == [(6656, 8), (7552, 8)]
    for layer, table in zip((1, 5), model.host_tables):
        assert np.array_equal(
            table.rows(0, len(whole[table_path(layer)][...])), whole[table_path(layer)][...]
        )
    for path, variable in paths.items():
        assert np.array_equal(variable[...], whole[path][...])


def test_only_mapped_tables_follow_the_file(qwen):
    directory = qwen()
    mapped = load_model(directory, ple_offload="mmap").host_tables[0]
    copied = load_model(directory, ple_offload="host").host_tables[0]
    before = copied.gather(np.arange(2176))
    assert np.array_equal(mapped.gather(np.arange(2176)), before)
    file = SafetensorsFile(directory / "model.safetensors")
    info = file.tensors["model.layers.1.ple.ple_embedding.ngram_embedding.shard_2.weight"]
    with (directory / "model.safetensors").open("r+b") as raw:
        raw.seek(info.start)
        raw.write(np.full(16, 7, np.float32).tobytes())
    assert np.array_equal(copied.gather(np.arange(2176)), before)
    assert np.array_equal(mapped.gather([1087, 1088, 1089])[1], np.full(16, 7))
    assert np.array_equal(mapped.gather([1087, 1089]), before[[1087, 1089]])


def test_mapped_tables_outlive_their_files_names(qwen):
    directory = qwen()
    table = load_model(directory, ple_offload="mmap").host_tables[0]
    before = table.rows(0, 2176).copy()
    os.unlink(directory / "model.safetensors")
    assert np.array_equal(table.rows(0, 2176), before)


@pytest.mark.parametrize("offload", ["host", "mmap"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_saving_writes_what_is_on_the_host(qwen, tmp_path, monkeypatch, offload: str, dtype: str):
    monkeypatch.setattr(ngram_tables, "_ROWS_AT_ONCE", 100)
    directory = qwen("text_two_ple")
    split_file(directory, 3)
    model = load_model(directory, dtype, ple_offload=offload)
    save_pretrained(model, tmp_path / "host")
    save_pretrained(load_model(directory, dtype), tmp_path / "device")
    left, right = (read_all(tmp_path / name / "model.safetensors") for name in ("host", "device"))
    assert left.keys() == right.keys()
    for name, value in right.items():
        assert left[name].dtype == value.dtype and np.array_equal(left[name], value), name


def test_a_checkpoint_may_be_saved_where_its_table_is_mapped(qwen):
    directory = qwen()
    before = read_all(directory / "model.safetensors")
    model = load_model(directory, ple_offload="mmap")
    save_pretrained(model, directory)
    after = read_all(directory / "model.safetensors")
    name = "model.layers.1.ple.ple_embedding.ngram_embedding.shard_{}.weight"
    assert all(np.array_equal(before[name.format(i)], after[name.format(i)]) for i in range(4))
    table = model.host_tables[0]
    assert np.array_equal(table.rows(544, 1088), before[name.format(1)])


def test_a_model_without_its_tables_is_not_saved(tmp_path):
    model = load_model(QWEN_GOLDENS / "text_small", ple_offload="host")
    for wrong in (None, (), model.host_tables * 2):
        model.host_tables = wrong
        with pytest.raises(CheckpointError, match=r"but it needs \[\(2176, 16\)\]"):
            save_pretrained(model, tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("directory", [GOLDENS / "dense", QWEN_GOLDENS / "text_no_ple"])
def test_models_without_tables_do_not_heed_the_option(directory):
    left, right = load_model(directory), load_model(directory, ple_offload="mmap")
    assert jax.tree.all(jax.tree.map(np.array_equal, nnx.state(left), nnx.state(right)))


@pytest.mark.parametrize("directory", [GOLDENS / "dense", QWEN_GOLDENS / "text_small"])
@pytest.mark.parametrize("offload", ["disk", "", None])
def test_other_places_are_refused(directory, offload):
    with pytest.raises(ConfigError, match="ple_offload is .*; allowed: device, host, mmap"):
        load_model(directory, ple_offload=offload)


def test_too_little_memory_is_said(qwen, monkeypatch):
    def refuse(shape, dtype):
        assert shape == TABLE
        raise MemoryError

    monkeypatch.setattr("hybridjax.checkpoints.ngram_tables.aligned_empty", refuse)
    with pytest.raises(CheckpointError, match="GiB does not fit into host memory; ple_offload='mmap'"):
        load_model(qwen(), ple_offload="host")


def test_views_stay_valid_when_pages_are_released(qwen):
    directory = qwen()
    tensors = read_all(directory / "model.safetensors")
    file = SafetensorsFile(directory / "model.safetensors")
    views = {name: file.read(name) for name in tensors}
    for name in tensors:
        file.release(name)
    assert all(np.array_equal(views[name], value) for name, value in tensors.items())


def test_tensors_without_elements_can_be_released(qwen):
    directory = qwen()
    edit_stored(directory, lambda tensors: tensors.update({"empty": np.zeros((0, 4), np.float32)}))
    file = SafetensorsFile(directory / "model.safetensors")
    file.release("empty")
    assert file.read("empty").shape == (0, 4)
