"""Loading checkpoint directories, and what every kind of wrong directory is told."""

import json
import os
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from damage import GOLDENS, edit_config, edit_tensors, split_file, write_index, write_raw
from flax import nnx
from safetensors.numpy import load_file, save_file

from hybridjax.checkpoints import bundled, bundled_models, load_config, load_model, loading, resolve
from hybridjax.checkpoints.loading import load_directory
from hybridjax.checkpoints.parameters import parameters_of
from hybridjax.errors import CheckpointError, ConfigError
from hybridjax.models import Architecture, TensorEntry
from hybridjax.models.minicpm_sala import MiniCPMSALA
from hybridjax.registry import Registry


def rows_of(model, name: str) -> np.ndarray:
    for parameter in parameters_of(model):
        for entry in parameter.entries:
            if entry.name == name:
                value = np.asarray(parameter.value)
                return value if value.shape == entry.shape else value[entry.start :][: entry.shape[0]]
    raise KeyError(name)


@pytest.mark.parametrize("name", ["dense", "sparse", "sparse_wide"])
def test_every_tensor_of_a_golden_arrives(name: str):
    tensors = load_file(GOLDENS / name / "model.safetensors")
    model = load_model(GOLDENS / name)
    assert isinstance(model, MiniCPMSALA)
    names = [entry.name for parameter in parameters_of(model) for entry in parameter.entries]
    assert sorted(names) == sorted(tensors)
    for tensor, value in tensors.items():
        read = rows_of(model, tensor)
        assert read.dtype == value.dtype and np.array_equal(read, value), tensor


def test_the_loaded_model_runs():
    model = load_model(GOLDENS / "dense")
    golden = load_file(GOLDENS / "dense" / "golden.safetensors")
    ids = jnp.asarray(golden["input_ids"], jnp.int32)[None]
    logits = nnx.jit(lambda model, ids: model(ids))(model, ids)
    np.testing.assert_allclose(np.asarray(logits[0]), golden["logits"], atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("dtype", ["bfloat16", jnp.bfloat16, np.dtype(ml_dtypes.bfloat16)])
def test_dtype_is_converted_while_loading(dtype):
    model = load_model(GOLDENS / "dense", dtype)
    value = load_file(GOLDENS / "dense" / "model.safetensors")["lm_head.weight"]
    assert model.dtype == jnp.bfloat16 and model.config.dtype == "bfloat16"
    assert rows_of(model, "lm_head.weight").tobytes() == value.astype(ml_dtypes.bfloat16).tobytes()


@pytest.mark.parametrize("dtype", [None, "auto"])
def test_the_dtype_of_the_config_is_the_default(golden, dtype):
    edit_config(golden, torch_dtype="bfloat16")
    assert load_model(golden, dtype).dtype == jnp.bfloat16
    edit_config(golden, torch_dtype="float32")
    assert load_model(golden, dtype).dtype == jnp.float32


def test_half_precision_files_widen_exactly(golden):
    def halve(tensors):
        for name, value in tensors.items():
            tensors[name] = value.astype(np.float16 if "mlp" in name else ml_dtypes.bfloat16)

    edit_tensors(golden / "model.safetensors", halve)
    tensors = load_file(golden / "model.safetensors")
    model = load_model(golden, "float32")
    for name in ("model.layers.0.mlp.up_proj.weight", "model.layers.1.self_attn.z_proj.weight"):
        assert np.array_equal(rows_of(model, name), tensors[name].astype(np.float32))


def test_values_beyond_float16_are_an_error(golden):
    edit_tensors(golden / "model.safetensors", lambda t: t["model.norm.weight"].fill(1e6))
    with pytest.raises(CheckpointError, match="model.norm.weight has values beyond the range of float16"):
        load_model(golden, "float16")


@pytest.mark.parametrize("dtype", ["int8", "nonsense", "float64", 3])
def test_other_dtypes_are_refused(dtype):
    with pytest.raises(ConfigError, match="allowed: auto, float32, bfloat16, float16"):
        load_model(GOLDENS / "dense", dtype)


def test_shards_load_like_one_file(golden):
    split_file(golden, 3)
    model, whole = load_model(golden), load_model(GOLDENS / "dense")
    for left, right in zip(jax.tree.leaves(nnx.state(model)), jax.tree.leaves(nnx.state(whole)), strict=True):
        assert np.array_equal(left, right)


def test_one_file_goes_before_an_index(golden):
    write_index(golden, {"x": "absent.safetensors"})
    assert rows_of(load_model(golden), "model.norm.weight").shape == (64,)


def test_later_changes_to_the_file_do_not_reach_the_model(golden):
    model = load_model(golden)
    before = rows_of(model, "lm_head.weight").copy()
    file = golden / "model.safetensors"
    with file.open("r+b") as raw:
        raw.seek(8192)
        raw.write(b"\xff" * (os.path.getsize(file) - 8192))
    assert np.array_equal(rows_of(model, "lm_head.weight"), before)


def test_parameters_go_where_they_are_asked_to():
    device = jax.devices()[0]
    asked = []

    def place(path, shape):
        asked.append((path, shape))
        return jax.sharding.SingleDeviceSharding(device)

    for sharding in (device, jax.sharding.SingleDeviceSharding(device), place):
        model = load_model(GOLDENS / "dense", sharding=sharding)
        assert all(leaf.devices() == {device} for leaf in jax.tree.leaves(nnx.state(model)))
    assert (("embed_tokens", "weight", "value"), (97, 64)) in asked


@pytest.mark.parametrize(("progress", "shown"), [(None, False), (False, False), (True, True)])
def test_progress_goes_to_stderr_when_asked_for(capsys, progress, shown: bool):
    load_model(GOLDENS / "dense", progress=progress)
    captured = capsys.readouterr()
    assert captured.out == "" and ("loading: 100%" in captured.err) == shown


def test_mixer_aliases_and_short_lists(golden):
    edit_config(golden, mixer_types=["attn", "lightning", "lightning_attn", "standard"])
    assert load_config(golden).mixer_types == load_config(GOLDENS / "dense").mixer_types
    assert rows_of(load_model(golden), "model.layers.3.self_attn.o_gate.weight").shape == (64, 64)
    edit_config(golden, mixer_types=["minicpm4", "lightning"])
    with pytest.raises(CheckpointError, match="layers.2.self_attn.o_gate.weight .64, 64. is missing"):
        load_model(golden)


def test_tied_embeddings_ignore_a_stored_head(golden):
    edit_config(golden, tie_word_embeddings=True)
    model = load_model(golden)
    assert not any("lm_head" in entry.name for p in parameters_of(model) for entry in p.entries)
    edit_tensors(golden / "model.safetensors", lambda t: t.pop("lm_head.weight"))
    again = load_model(golden)
    assert jax.tree.all(jax.tree.map(np.array_equal, nnx.state(model), nnx.state(again)))


def test_rotary_tables_are_ignored(golden):
    name = "model.layers.1.self_attn.rotary_emb.inv_freq"
    edit_tensors(golden / "model.safetensors", lambda t: t.update({name: np.zeros(8, np.float64)}))
    assert rows_of(load_model(golden), "lm_head.weight").shape == (97, 64)


def test_remote_code_is_ignored(golden):
    (golden / "modeling.py").write_text("raise SystemExit('remote code ran')")
    edit_config(golden, auto_map={"AutoModelForCausalLM": "modeling.Model"})
    assert isinstance(load_model(golden), MiniCPMSALA)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["LlamaForCausalLM"]},
            "unknown architecture 'LlamaForCausalLM'; known: .*MiniCPMSALA",
        ),
        ({"architectures": None}, "architectures is None"),
        ({"architectures": []}, "must be a list with one name"),
        ({"architectures": [1]}, "must be a list with one name"),
        ({"hidden_size": -4}, "hidden_size is -4"),
        ({"mixer_types": ["mamba"] * 4}, "mixer_types.0. is 'mamba'; allowed"),
        ({"torch_dtype": "int4"}, "dtype is 'int4'"),
    ],
)
def test_wrong_configs(golden, changes, message: str):
    edit_config(golden, **changes)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_model(golden)
    assert str(golden / "config.json") in str(caught.value)


@pytest.mark.parametrize("content", [None, "", "{", "[]", "[" * 100_000])
def test_broken_config_files(golden, content):
    (golden / "config.json").unlink()
    if content is not None:
        (golden / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match="config.json: (no such file|not JSON|holds a list)"):
        load_model(golden)


def test_missing_tensors_are_listed(golden):
    edit_tensors(golden / "model.safetensors", lambda t: t.pop("model.norm.weight"))
    with pytest.raises(CheckpointError, match=r"MiniCPMSALA: model.norm.weight \[64\] is missing$"):
        load_model(golden)

    def drop_layer(tensors):
        for name in [n for n in tensors if n.startswith("model.layers.2.")]:
            del tensors[name]

    edit_tensors(golden / "model.safetensors", drop_layer)
    with pytest.raises(CheckpointError, match="; and 9 more$") as caught:
        load_model(golden)
    assert str(caught.value).count("is missing") == 5


def test_extra_tensors_are_an_error(golden):
    edit_tensors(golden / "model.safetensors", lambda t: t.update({"model.bias": np.zeros(3, np.float32)}))
    with pytest.raises(CheckpointError, match="'model.bias' in model.safetensors is no tensor of this arch"):
        load_model(golden)


def test_wrong_shapes_are_an_error(golden):
    edit_tensors(
        golden / "model.safetensors", lambda t: t.update({"lm_head.weight": np.zeros((96, 64), np.float32)})
    )
    message = r"lm_head.weight in model.safetensors has shape \[96, 64\], expected \[97, 64\]"
    with pytest.raises(CheckpointError, match=message):
        load_model(golden)


@pytest.mark.parametrize("dtype", [np.int32, np.uint8, np.float64])
def test_wrong_dtypes_are_an_error(golden, dtype):
    edit_tensors(golden / "model.safetensors", lambda t: t.update({"model.norm.weight": np.ones(64, dtype)}))
    message = f"model.norm.weight in model.safetensors has dtype {np.dtype(dtype)}, expected float32"
    with pytest.raises(CheckpointError, match=message):
        load_model(golden)


def test_truncated_files_are_an_error(golden):
    file = golden / "model.safetensors"
    content = file.read_bytes()
    for length in (0, 7, 8, 100, 5000, len(content) // 2, len(content) - 1):
        file.write_bytes(content[:length])
        with pytest.raises(CheckpointError, match="model.safetensors: "):
            load_model(golden)


def test_nothing_is_allocated_for_a_lying_header(golden, monkeypatch):
    claims = {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}
    write_raw(golden / "model.safetensors", {"model.norm.weight": claims})
    monkeypatch.setattr(np, "empty", None)
    with pytest.raises(CheckpointError, match="truncated: the tensors end at byte"):
        load_model(golden)


@pytest.mark.parametrize(
    "file",
    [
        "../golden/model-00001-of-00002.safetensors",
        "/etc/model.safetensors",
        "sub/model.safetensors",
        "..\\model.safetensors",
        "c:model.safetensors",
        "..safetensors",
        "model\0.safetensors",
        "model.bin",
        "",
        3,
        None,
    ],
)
def test_shards_must_lie_in_the_directory(golden, file):
    weight_map = split_file(golden)
    write_index(golden, weight_map | {"model.norm.weight": file})
    with pytest.raises(CheckpointError, match="'model.norm.weight' is in .* in the same directory"):
        load_model(golden)


def test_missing_shards_are_an_error(golden):
    split_file(golden)
    (golden / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match="model-00002-of-00002.safetensors: cannot open: no such file"):
        load_model(golden)


def test_index_and_files_must_agree(golden):
    weight_map = split_file(golden)
    name = next(iter(weight_map))
    write_index(golden, {k: v for k, v in weight_map.items() if k != name})
    with pytest.raises(CheckpointError, match=f"'{name}' is in model-00001-of-00002.safetensors but not in"):
        load_model(golden)
    write_index(golden, weight_map | {"phantom": "model-00001-of-00002.safetensors"})
    with pytest.raises(CheckpointError, match="'phantom' is not in model-00001-of-00002.safetensors"):
        load_model(golden)
    write_index(golden, weight_map | {name: "model-00002-of-00002.safetensors"})
    with pytest.raises(CheckpointError, match=f"'{name}' is not in model-00002-of-00002.safetensors"):
        load_model(golden)


def test_a_tensor_in_two_shards_is_an_error(golden):
    weight_map = split_file(golden)
    name = next(iter(weight_map))
    first, second = (golden / f"model-0000{i}-of-00002.safetensors" for i in (1, 2))
    save_file(load_file(second) | {name: load_file(first)[name]}, second)
    with pytest.raises(CheckpointError, match=f"'{name}' is in both {first.name} and {second.name}"):
        load_model(golden)


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}'])
def test_broken_indexes(golden, content: str):
    split_file(golden)
    (golden / "model.safetensors.index.json").write_text(content)
    with pytest.raises(CheckpointError, match="model.safetensors.index.json: "):
        load_model(golden)


def test_pickles_are_pointed_at_but_never_read(golden):
    (golden / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="neither model.safetensors nor model.safetensors.index.json$"):
        load_model(golden)
    (golden / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
    with pytest.raises(CheckpointError, match="pytorch_model.bin is a pickle file, which is never read"):
        load_model(golden)


def test_names_that_are_neither_path_nor_bundled(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(CheckpointError, match="is a file; give the directory"):
        load_model(tmp_path / "file")
    with pytest.raises(CheckpointError, match="'openbmb/MiniCPM-SALA' is neither .* makes no downloads"):
        load_model("openbmb/MiniCPM-SALA")


def test_bundled_models_are_found_by_name(golden, monkeypatch):
    monkeypatch.setattr(bundled, "_HOME", golden.parent)
    assert bundled_models() == ["golden"]
    assert resolve("golden") == golden and resolve(str(golden)) == golden
    assert load_config("golden").vocab_size == 97
    with pytest.raises(CheckpointError, match=r"bundled: golden\)"):
        resolve("../golden/config")


class Bent(MiniCPMSALA):
    """A model class whose table of tensors is wrong."""

    table: tuple[TensorEntry, ...] = ()

    @classmethod
    def checkpoint_entries(cls, config, names=None):
        return cls.table


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda entries: entries[1:], "parameter embed_tokens.weight.value has no tensor"),
        (
            lambda entries: (*entries, TensorEntry("x", (1,), ("norm", "scale"))),
            "x names norm.scale, which does not exist",
        ),
        (
            lambda entries: tuple(e for e in entries if not e.name.endswith("0.self_attn.k_proj.weight")),
            r"layers.0.mixer.in_proj.weight.value \[192, 64\] is not filled by",
        ),
        (
            lambda entries: (*entries, TensorEntry("x", (64,), ("norm", "weight"))),
            r"norm.weight \[64\] is not filled by",
        ),
    ],
)
def test_a_wrong_tensor_table_is_called_a_bug(monkeypatch, change, message: str):
    architecture = loading.ARCHITECTURES["MiniCPMSALAForCausalLM"]
    config = load_config(GOLDENS / "dense")
    monkeypatch.setattr(Bent, "table", change(MiniCPMSALA.checkpoint_entries(config)))
    registry: Registry[Architecture] = Registry("architecture")
    registry.register("MiniCPMSALAForCausalLM")(Architecture(architecture.config, Bent))
    with pytest.raises(CheckpointError, match="bug in Bent.checkpoint_entries: " + message):
        load_directory(Path(GOLDENS / "dense"), registry)


def test_a_config_written_by_hand_and_one_by_the_model_agree(golden):
    config = load_config(golden)
    (golden / "config.json").write_text(json.dumps(config.to_dict()))
    assert load_config(golden) == config
