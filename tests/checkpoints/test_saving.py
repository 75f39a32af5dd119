"""Saved directories are complete, bit-equal after loading, and never half-written."""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from damage import GOLDENS, edit_config, edit_tensors
from flax import nnx
from safetensors import safe_open
from safetensors.numpy import load_file

from hybridjax.checkpoints import (
    check_target,
    load_config,
    load_model,
    save_pretrained,
    saving,
)
from hybridjax.configs import MiniCPMSALAConfig
from hybridjax.errors import CheckpointError
from hybridjax.models.minicpm_sala import MiniCPMSALA


def assert_equal_models(left, right) -> None:
    assert left.config == right.config and left.dtype == right.dtype
    pairs = zip(jax.tree.leaves(nnx.state(left)), jax.tree.leaves(nnx.state(right)), strict=True)
    for a, b in pairs:
        assert a.dtype == b.dtype and a.shape == b.shape
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def content(directory: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in directory.iterdir()}


@pytest.mark.parametrize("name", ["dense", "sparse", "sparse_wide"])
def test_a_saved_golden_has_the_original_tensors(tmp_path, name: str):
    model = load_model(GOLDENS / name)
    save_pretrained(model, tmp_path / "out")
    original = load_file(GOLDENS / name / "model.safetensors")
    saved = load_file(tmp_path / "out" / "model.safetensors")
    assert saved.keys() == original.keys()
    for tensor, value in original.items():
        assert saved[tensor].dtype == value.dtype and saved[tensor].shape == value.shape
        assert saved[tensor].tobytes() == value.tobytes()
    assert_equal_models(model, load_model(tmp_path / "out"))
    assert sorted(content(tmp_path / "out")) == ["config.json", "generation_config.json", "model.safetensors"]
    with safe_open(tmp_path / "out" / "model.safetensors", "numpy") as file:
        assert file.metadata() == {"format": "pt"}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_saved_dtype_is_in_the_config(tmp_path, dtype: str):
    model = load_model(GOLDENS / "dense", dtype)
    model.config = load_config(GOLDENS / "dense")  # says float32
    save_pretrained(model, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == dtype
    again = load_model(tmp_path / "out")
    assert again.dtype == jnp.dtype(dtype)
    for a, b in zip(jax.tree.leaves(nnx.state(model)), jax.tree.leaves(nnx.state(again)), strict=True):
        assert a.dtype == b.dtype and np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_a_new_model_comes_back(tmp_path):
    config = MiniCPMSALAConfig.from_dict(json.loads((GOLDENS / "dense" / "config.json").read_text()))
    model = MiniCPMSALA(config, dtype=jnp.float32, rngs=nnx.Rngs(7))
    save_pretrained(model, tmp_path / "deep" / "er")
    assert_equal_models(model, load_model(tmp_path / "deep" / "er"))


def test_tied_embeddings_are_saved_once(tmp_path, golden):
    edit_config(golden, tie_word_embeddings=True)
    model = load_model(golden)
    save_pretrained(model, tmp_path / "out")
    assert "lm_head.weight" not in load_file(tmp_path / "out" / "model.safetensors")
    assert_equal_models(model, load_model(tmp_path / "out"))


def test_special_values_survive(tmp_path, golden):
    odd = np.frombuffer(np.uint32([0x7FC00001, 0xFF800000, 0x80000000, 1]).tobytes(), np.float32)
    edit_tensors(golden / "model.safetensors", lambda t: t["model.norm.weight"].__setitem__(slice(4), odd))
    save_pretrained(load_model(golden), tmp_path / "out")
    saved = load_file(tmp_path / "out" / "model.safetensors")["model.norm.weight"]
    assert saved[:4].tobytes() == odd.tobytes()


@pytest.mark.parametrize("limit", [1, 24_832, 50_000, 200_000])
def test_shards_hold_at_most_the_limit(tmp_path, limit: int):
    model = load_model(GOLDENS / "dense")
    save_pretrained(model, tmp_path / "out", max_shard_bytes=limit)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    original = load_file(GOLDENS / "dense" / "model.safetensors")
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in original.values())
    files = sorted(set(index["weight_map"].values()))
    assert files == [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
    found = {}
    for file in files:
        shard = load_file(tmp_path / "out" / file)
        assert len(shard) == 1 or sum(value.nbytes for value in shard.values()) <= limit
        assert all(index["weight_map"][name] == file for name in shard)
        found |= shard
    assert {name: value.tobytes() for name, value in found.items()} == {
        name: value.tobytes() for name, value in original.items()
    }
    assert not (tmp_path / "out" / "model.safetensors").exists()
    assert_equal_models(model, load_model(tmp_path / "out"))


def test_saving_over_a_checkpoint_replaces_it(tmp_path):
    dense, wide = load_model(GOLDENS / "dense"), load_model(GOLDENS / "sparse_wide")
    save_pretrained(dense, tmp_path / "out", max_shard_bytes=50_000)
    (tmp_path / "out" / "tokenizer.json").write_text("{}")
    save_pretrained(wide, tmp_path / "out")
    names = ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json"]
    assert sorted(content(tmp_path / "out")) == names
    assert_equal_models(wide, load_model(tmp_path / "out"))
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_model_can_be_saved_where_it_came_from(golden):
    model = load_model(golden)
    save_pretrained(model, golden)
    assert_equal_models(model, load_model(golden))


def test_a_link_to_a_directory_is_followed(tmp_path, golden):
    (tmp_path / "link").symlink_to(golden)
    save_pretrained(load_model(golden), tmp_path / "link")
    assert (tmp_path / "link").is_symlink() and (golden / "generation_config.json").exists()


def test_other_files_are_never_lost(golden):
    (golden / "notes.txt").write_text("mine")
    before = content(golden)
    with pytest.raises(CheckpointError, match="holds notes.txt, which is no part of a checkpoint"):
        save_pretrained(load_model(golden), golden)
    assert content(golden) == before
    with pytest.raises(CheckpointError, match="notes.txt is a file"):
        save_pretrained(load_model(golden), golden / "notes.txt")


def test_extra_files_are_part_of_what_is_replaced(tmp_path):
    model, out = load_model(GOLDENS / "dense"), tmp_path / "out"
    save_pretrained(model, out, extra_files={"README.md": "first é", "figures.bin": b"\xff"})
    assert content(out)["README.md"] == "first é".encode() and content(out)["figures.bin"] == b"\xff"
    check_target(out, ("README.md", "figures.bin"))
    save_pretrained(model, out, extra_files={"README.md": "second", "figures.bin": b""})
    assert content(out)["README.md"] == b"second"
    with pytest.raises(CheckpointError, match="no part of a checkpoint"):
        save_pretrained(model, out)
    assert content(out)["README.md"] == b"second"


@pytest.mark.parametrize("others", [(), ("config.json",), ("figures.bin",), ("config.json", "notes.txt")])
def test_a_file_called_like_an_extra_file_may_be_the_users(tmp_path, others):
    for name in ("README.md", *others):
        (tmp_path / name).write_text("mine")
    extra = {"README.md": "new", "figures.bin": b""}
    with pytest.raises(CheckpointError, match="which is no part of a checkpoint and would be lost"):
        check_target(tmp_path, extra)
    with pytest.raises(CheckpointError, match="which is no part of a checkpoint and would be lost"):
        save_pretrained(load_model(GOLDENS / "dense"), tmp_path, extra_files=extra)
    assert content(tmp_path) == dict.fromkeys(("README.md", *others), b"mine")


def test_a_directory_called_like_a_file_is_not_replaced(golden):
    (golden / "vocab.json").mkdir()
    (golden / "vocab.json" / "mine").write_text("mine")
    with pytest.raises(CheckpointError, match="holds vocab.json"):
        save_pretrained(load_model(golden), golden)
    assert (golden / "vocab.json" / "mine").read_text() == "mine"


@pytest.mark.parametrize("name", ["config.json", "model-1.safetensors", "../out.txt", "a/b", "", ".."])
def test_extra_files_have_names_of_their_own(tmp_path, name):
    with pytest.raises(CheckpointError, match="cannot be the name of an extra file"):
        save_pretrained(load_model(GOLDENS / "dense"), tmp_path / "out", extra_files={name: b""})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("place", ["file/out", "file/deep/out", "/proc/hybridjax/out", "x" * 300])
def test_a_place_that_cannot_be_written_is_named(tmp_path, place):
    (tmp_path / "file").write_text("mine")
    for save in (lambda path: save_pretrained(load_model(GOLDENS / "dense"), path), check_target):
        with pytest.raises(CheckpointError, match="cannot write beside it|cannot be read"):
            save(tmp_path / place)
    assert content(tmp_path) == {"file": b"mine"}


def test_checking_a_target_leaves_nothing_behind(tmp_path, golden):
    before = content(golden)
    check_target(golden)
    check_target(tmp_path / "new" / "out")
    assert content(golden) == before and not list((tmp_path / "new").iterdir())


@pytest.mark.parametrize("step", ["write_safetensors", "write_object", "_swap"])
def test_a_failure_leaves_the_old_state(golden, monkeypatch, step: str):
    model = load_model(golden)
    before = content(golden)

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(saving, step, fail)
    for target in (golden, golden.parent / "new"):
        with pytest.raises(OSError, match="disk full"):
            save_pretrained(model, target)
    assert content(golden) == before
    assert [path.name for path in golden.parent.iterdir()] == [golden.name]


def test_a_failed_rename_puts_the_old_directory_back(golden, monkeypatch):
    model, before = load_model(golden), content(golden)
    rename = saving.os.rename

    def once(source, target):
        if str(source).endswith(".tmp"):
            raise OSError("no rename")
        rename(source, target)

    monkeypatch.setattr(saving.os, "rename", once)
    with pytest.raises(OSError, match="no rename"):
        save_pretrained(model, golden)
    assert content(golden) == before
    assert [path.name for path in golden.parent.iterdir()] == [golden.name]


def test_files_of_tokenizers_and_image_processors_are_copied(tmp_path):
    source = tmp_path / "tokenizer"
    source.mkdir()
    kept = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "preprocessor_config.json")
    for name in (*kept, "other.bin"):
        (source / name).write_text(name)
    model = load_model(GOLDENS / "dense")
    save_pretrained(model, tmp_path / "out", tokenizer_dir=source)
    saved = content(tmp_path / "out")
    assert all(saved[name] == name.encode() for name in kept)
    assert "other.bin" not in saved
    shutil.rmtree(source)
    with pytest.raises(CheckpointError, match="has no tokenizer.json to copy"):
        save_pretrained(model, tmp_path / "out", tokenizer_dir=source)


def test_a_loaded_model_keeps_what_its_files_say_beyond_what_is_read(tmp_path, golden):
    strange = {
        "mup_denominator": 16,
        "use_cache": False,
        "head_plan": [{"a": [1, 2.5, None]}, "é"],
        "extra": {"deep": {"er": [[]]}},
        "lightning_layerwise_decay": False,
    }
    sparse = {"use_nope": True, "plan": [1]}
    raw = json.loads((golden / "config.json").read_text())
    edit_config(
        golden, **strange, sparse_config=raw["sparse_config"] | sparse, auto_map={"AutoModel": "code.py"}
    )
    generation = {
        "temperature": 0.6,
        "top_p": 0.9,
        "do_sample": False,
        "eos_token_id": [96],
        "num_beams": 3,
        "suppress_tokens": [[4, 5]],
    }
    (golden / "generation_config.json").write_text(json.dumps(generation))
    model = load_model(golden)
    assert hash(model.config) == hash(load_config(golden)) and hash(model.generation)
    for target in (tmp_path / "first", tmp_path / "second"):
        save_pretrained(model, target)
        saved = json.loads((target / "config.json").read_text())
        assert saved.items() >= strange.items() and saved["sparse_config"].items() >= sparse.items()
        assert "auto_map" not in saved
        assert json.loads((target / "generation_config.json").read_text()) == generation
        again = load_model(target)
        assert_equal_models(model, again)
        assert model.generation == again.generation
        model = again
    assert content(tmp_path / "first") == content(tmp_path / "second")


def test_a_model_with_generation_defaults_computes_as_before(golden):
    ids = np.asarray([[1, 5, 9]], np.int32)
    expected = load_model(golden)(ids)
    (golden / "generation_config.json").write_text('{"temperature": 0.5, "other": [1]}')
    model = load_model(golden)
    assert np.array_equal(nnx.merge(*nnx.split(model))(ids), expected)
    assert nnx.jit(lambda m, ids: m(ids))(model, ids).shape == expected.shape
