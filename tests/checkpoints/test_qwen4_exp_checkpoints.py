"""Qwen4Exp checkpoints: every released layout, its round trip, and what damaged ones are told."""

import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from damage import QWEN_GOLDENS, edit_config, edit_stored, read_all, split_file
from flax import nnx

from hybridjax.checkpoints import load_config, load_model, save_pretrained
from hybridjax.checkpoints.parameters import layout_of
from hybridjax.configs.qwen4_exp_multimodal import Qwen4ExpMultimodalConfig
from hybridjax.errors import CheckpointError
from hybridjax.models.base import tiles
from hybridjax.models.qwen4_exp_entries import checkpoint_entries
from hybridjax.models.qwen4_exp_vision import vision_entries

TEXT = ["text_small", "text_mtp", "text_no_ple", "text_two_ple"]
HASHES = ("layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets")
PLE = "model.layers.1.ple.ple_embedding."


def shapes_of(tensors: dict[str, np.ndarray]) -> dict[str, tuple[int, ...]]:
    return {name: value.shape for name, value in tensors.items()}


def assert_same_parameters(left, right) -> None:
    pairs = zip(jax.tree.leaves(nnx.state(left)), jax.tree.leaves(nnx.state(right)), strict=True)
    for a, b in pairs:
        assert a.dtype == b.dtype and a.shape == b.shape
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    assert left.checkpoint_constants().keys() == right.checkpoint_constants().keys()
    for name, value in left.checkpoint_constants().items():
        assert np.array_equal(value, right.checkpoint_constants()[name])


def fuse_experts(tensors: dict[str, np.ndarray], prefix: str) -> None:
    """The experts of one layer as the BF16 release stores them."""
    parts: dict[str, list[np.ndarray]] = {"gate_proj": [], "up_proj": [], "down_proj": []}
    for part, held in parts.items():
        while (name := f"{prefix}experts.{len(held)}.{part}.weight") in tensors:
            held.append(tensors.pop(name))
    gate_up = [np.concatenate(pair) for pair in zip(parts["gate_proj"], parts["up_proj"], strict=True)]
    tensors[prefix + "experts.gate_up_proj"] = np.stack(gate_up)
    tensors[prefix + "experts.down_proj"] = np.stack(parts["down_proj"])


def reshard(tensors: dict[str, np.ndarray], sizes: list[int], prefix: str = PLE) -> None:
    """The n-gram table in shards of these sizes."""
    name = prefix + "ngram_embedding.shard_{}.weight"
    held = []
    while name.format(len(held)) in tensors:
        held.append(tensors.pop(name.format(len(held))))
    whole = np.concatenate(held)
    bounds = np.cumsum([0, *sizes])
    for i, size in enumerate(sizes):
        tensors[name.format(i)] = whole[bounds[i] : bounds[i] + size]


def table_of(tensors: dict[str, np.ndarray], prefix: str = PLE) -> np.ndarray:
    found = sorted(
        (int(match[1]), value)
        for name, value in tensors.items()
        if (match := re.fullmatch(re.escape(prefix) + r"ngram_embedding\.shard_(\d+)\.weight", name))
    )
    return np.concatenate([value for _, value in found])


@pytest.mark.parametrize("name", TEXT)
def test_every_tensor_of_a_golden_arrives(name: str):
    tensors = read_all(QWEN_GOLDENS / name / "model.safetensors")
    model = load_model(QWEN_GOLDENS / name)
    left = dict(tensors)
    for parameter in layout_of(model, shapes_of(tensors)).parameters:
        value = np.asarray(parameter.value)
        for entry in parameter.entries:
            assert np.array_equal(entry.part_of(value), left.pop(entry.name)), entry.name
    for constant, value in model.checkpoint_constants().items():
        assert value.dtype == np.int64 and np.array_equal(value, left.pop(constant))
    assert not left


def test_the_order_of_fused_rows():
    tensors = read_all(QWEN_GOLDENS / "text_small" / "model.safetensors")
    model = load_model(QWEN_GOLDENS / "text_small")

    def rows(prefix: str, names: str) -> np.ndarray:
        return np.concatenate([tensors[f"{prefix}{name}.weight"] for name in names.split()])

    linear = rows("model.layers.0.linear_attn.", "in_proj_qkv in_proj_z in_proj_b in_proj_a")
    assert np.array_equal(model.layers[0].mixer.in_proj.weight.value[...], linear)
    indexed = rows("model.layers.3.self_attn.", "q_proj k_proj v_proj indexer.index_qk_proj")
    assert np.array_equal(model.layers[3].mixer.in_proj.weight.value[...], indexed)
    expert = rows("model.layers.2.mlp.experts.5.", "gate_proj up_proj")
    assert np.array_equal(model.layers[2].mlp.experts.gate_up[5], expert)
    shared = rows("model.layers.2.mlp.shared_expert.", "gate_proj up_proj")
    assert np.array_equal(model.layers[2].mlp.shared.gate_up.weight.value[...], shared)


def test_biases_are_fused_like_their_weights():
    tensors = read_all(QWEN_GOLDENS / "text_no_ple" / "model.safetensors")
    model = load_model(QWEN_GOLDENS / "text_no_ple")
    name = "model.layers.3.self_attn."
    biases = np.concatenate([tensors[f"{name}{part}_proj.bias"] for part in "qkv"])
    assert np.array_equal(model.layers[3].mixer.in_bias[...], biases)
    assert np.array_equal(model.layers[3].mixer.o_bias[...], tensors[name + "o_proj.bias"])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_dtype_is_converted_but_for_what_recurrences_need(dtype: str):
    model = load_model(QWEN_GOLDENS / "text_mtp", dtype)
    tensors = read_all(QWEN_GOLDENS / "text_mtp" / "model.safetensors")
    for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        kept = path[-1] in ("A_log", "dt_bias")
        assert variable.get_value().dtype == (jnp.float32 if kept else jnp.dtype(dtype)), path
    decay = tensors["model.layers.2.linear_attn.A_log"]
    assert np.array_equal(model.layers[2].mixer.A_log[...], decay)
    down = tensors["mtp.layers.0.mlp.experts.down_proj"].astype(jnp.dtype(dtype))
    assert np.array_equal(model.mtp.layer.mlp.experts.down[...], down)


@pytest.mark.parametrize("name", TEXT)
def test_saving_writes_the_released_layout_and_loads_again(tmp_path, name: str):
    model = load_model(QWEN_GOLDENS / name)
    save_pretrained(model, tmp_path / "out", max_shard_bytes=500_000)
    again = load_model(tmp_path / "out")
    assert again.config == model.config
    assert_same_parameters(model, again)
    expected = read_all(QWEN_GOLDENS / name / "model.safetensors")
    for i in range(model.config.num_hidden_layers):
        fuse_experts(expected, f"model.layers.{i}.mlp.")
    saved = {}
    for file in (tmp_path / "out").glob("*.safetensors"):
        saved |= read_all(file)
    assert saved.keys() == expected.keys()
    for tensor, value in expected.items():
        assert saved[tensor].dtype == value.dtype and np.array_equal(saved[tensor], value), tensor


def test_fused_and_single_experts_are_the_same_layer_by_layer(qwen):
    directory, whole = qwen("text_mtp"), load_model(QWEN_GOLDENS / "text_mtp")

    def mix(tensors):
        for i in (0, 3):
            fuse_experts(tensors, f"model.layers.{i}.mlp.")
        up = tensors.pop("mtp.layers.0.mlp.experts.gate_up_proj")
        down = tensors.pop("mtp.layers.0.mlp.experts.down_proj")
        for e in range(len(up)):
            name, half = f"mtp.layers.0.mlp.experts.{e}.", up.shape[1] // 2
            tensors[name + "gate_proj.weight"], tensors[name + "up_proj.weight"] = up[e, :half], up[e, half:]
            tensors[name + "down_proj.weight"] = down[e]

    edit_stored(directory, mix)
    assert_same_parameters(load_model(directory), whole)


def test_files_in_parts_load_like_one(qwen):
    directory = qwen("text_two_ple")
    split_file(directory, 5)
    assert_same_parameters(load_model(directory), load_model(QWEN_GOLDENS / "text_two_ple"))


@pytest.mark.parametrize(
    "sizes", [[2176], [1088, 1088], [1, 2174, 1], [311] * 6 + [310], [200] * 10 + [176], [17] * 128]
)
def test_any_number_of_shards_is_taken_in_the_order_of_their_numbers(qwen, sizes: list[int]):
    directory, whole = qwen(), load_model(QWEN_GOLDENS / "text_small")

    def shuffled(tensors):
        reshard(tensors, sizes)
        for name in sorted(tensors):
            tensors[name] = tensors.pop(name)

    edit_stored(directory, shuffled)
    assert_same_parameters(load_model(directory), whole)
    for offload in ("host", "mmap"):
        (table,) = load_model(directory, ple_offload=offload).host_tables
        assert np.array_equal(table.rows(0, 2176), whole.layers[1].ple.table.weight.value[...])


def test_a_table_in_one_tensor(qwen):
    def join(tensors):
        reshard(tensors, [2176])
        name = PLE + "ngram_embedding."
        tensors[name + "weight"] = tensors.pop(name + "shard_0.weight")

    directory = qwen()
    edit_stored(directory, join)
    assert_same_parameters(load_model(directory), load_model(QWEN_GOLDENS / "text_small"))


@pytest.mark.parametrize("parts", [1, 3, 11, 512])
def test_tables_are_saved_in_as_many_shards_as_the_config_says(qwen, tmp_path, parts: int):
    directory = qwen()
    edit_config(directory, split_ngram_parts=parts)
    model = load_model(directory)
    save_pretrained(model, tmp_path / "out")
    saved = read_all(tmp_path / "out" / "model.safetensors")
    shards = [value for name, value in saved.items() if ".shard_" in name]
    size = -(-2176 // parts)
    assert len(shards) == -(-2176 // size) <= parts and all(len(shard) == size for shard in shards[:-1])
    assert np.array_equal(table_of(saved), model.layers[1].ple.table.weight.value[...])
    assert_same_parameters(model, load_model(tmp_path / "out"))


@pytest.mark.parametrize("prefix", ["model.", "model.language_model."])
def test_the_table_has_every_name_and_shape_of_the_multimodal_golden(prefix: str):
    directory = QWEN_GOLDENS / "multimodal"
    shapes = shapes_of(read_all(directory / "model.safetensors"))
    config = Qwen4ExpMultimodalConfig.from_dict(json.loads((directory / "config.json").read_text()))
    shapes = {n.replace("model.language_model.", prefix): shape for n, shape in shapes.items()}
    entries = list(checkpoint_entries(config.text_config, prefix, shapes))
    entries += vision_entries(config.vision_config, "model.visual.", ("visual",))
    assert len({entry.name for entry in entries}) == len(entries)
    constants = {n: shape for n, shape in shapes.items() if n.endswith(HASHES)}
    assert {entry.name: entry.shape for entry in entries} | constants == shapes


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
@pytest.mark.parametrize("offload", ["device", "mmap"])
def test_multimodal_checkpoints_make_the_round_trip(tmp_path: Path, dtype, offload: str):
    model = load_model(QWEN_GOLDENS / "multimodal", dtype, ple_offload=offload)
    assert model.dtype == (dtype or "float32") and model.text_config.dtype == model.config.dtype
    save_pretrained(model, tmp_path / "out")
    again = load_model(tmp_path / "out", ple_offload=offload)
    assert again.config == model.config
    assert_same_parameters(model, again)
    expected = read_all(QWEN_GOLDENS / "multimodal" / "model.safetensors")
    for i in range(model.config.num_hidden_layers):
        fuse_experts(expected, f"model.language_model.layers.{i}.mlp.")
    saved = read_all(tmp_path / "out" / "model.safetensors")
    assert saved.keys() == expected.keys()
    for tensor, value in expected.items():
        assert np.array_equal(saved[tensor], value.astype(saved[tensor].dtype)), tensor


@pytest.mark.parametrize("fused", [True, False])
def test_the_released_model_has_the_tensors_that_it_should(fused: bool):
    config = load_config(QWEN_GOLDENS / "text_small")
    config = type(config)()
    prefix = "model.language_model."
    stored = None
    if not fused:
        layers = [f"{prefix}layers.{i}." for i in range(48)] + ["mtp.layers.0."]
        stored = {
            f"{layer}mlp.experts.{e}.up_proj.weight": (640, 2560) for layer in layers for e in range(512)
        }
        name = f"{prefix}layers.1.ple.ple_embedding.ngram_embedding.shard_"
        stored |= {f"{name}{i}.weight": (2500012, 160) for i in range(128)}
    entries = list(checkpoint_entries(config, prefix, stored))
    names = [entry.name for entry in entries]
    assert len(names) == len(set(names))
    trunk = [name for name in names if not name.startswith("mtp.")]
    experts = 49 * (512 * 3 - 2) if not fused else 0
    assert len(names) == 48 * 24 + 6 + 128 + 5 + 31 + experts
    assert len(trunk) == len(names) - 31 - (experts // 49)
    by_path: dict[tuple, list] = {}
    for entry in entries:
        by_path.setdefault(entry.path, []).append(entry)
    shapes = {
        ("layers", 1, "ple", "table", "weight", "value"): (320001536, 160),
        ("layers", 47, "mlp", "experts", "gate_up"): (512, 1280, 2560),
        ("mtp", "layer", "mlp", "experts", "down"): (512, 2560, 640),
        ("layers", 0, "mixer", "in_proj", "weight", "value"): (16480, 2560),
        ("layers", 3, "mixer", "in_proj", "weight", "value"): (13952, 2560),
        ("mtp", "norm_hidden", "weight"): (10240,),
    }
    for path, shape in shapes.items():
        assert tiles(sorted(by_path[path], key=lambda entry: entry.order), shape), path


def test_names_that_mean_nothing_are_dropped(qwen):
    directory = qwen()
    extra = {
        PLE + "hashstats_hits": np.zeros(3, np.int64),
        PLE + "token_lookup": np.zeros(4, np.int32),
        "model.layers.3.self_attn.rotary_emb.inv_freq": np.zeros(8, np.float32),
        "model.hyper_connection_mixer.block_inject_weight.weight": np.zeros((4, 256), np.float32),
    }
    edit_stored(directory, lambda tensors: tensors.update(extra))
    assert_same_parameters(load_model(directory), load_model(QWEN_GOLDENS / "text_small"))


@pytest.mark.parametrize(
    "name",
    [
        "model.norm.weight",
        "model.layers.0.input_layernorm.weight",
        "model.layers.0.mlp.experts.8.up_proj.weight",
        "model.layers.0.mlp.experts.0.up_proj.weight_scale",
        "model.layers.0.mlp.experts.gate_up_proj",
        "mtp.fc_hidden.weight",
        "model.language_model.embed_tokens.weight",
        "model.visual.pos_embed.weight",
    ],
)
def test_other_names_are_an_error(qwen, name: str):
    directory = qwen()
    edit_stored(directory, lambda tensors: tensors.update({name: np.zeros((2, 2), np.float32)}))
    with pytest.raises(CheckpointError, match=f"'{name}' in model.safetensors is no tensor of this arch"):
        load_model(directory)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.2.mlp.experts.0.gate_proj.weight",
        "model.layers.1.linear_attn.A_log",
        "model.layers.3.self_attn.indexer.k_layernorm.weight",
        "model.layers.1.ple.conv1d.weight",
        "mtp.pre_fc_norm_hidden.weight",
        "mtp.layers.0.mlp.experts.down_proj",
    ],
)
def test_missing_tensors_are_named(qwen, name: str):
    directory = qwen("text_mtp")
    edit_stored(directory, lambda tensors: tensors.pop(name))
    with pytest.raises(CheckpointError, match=re.escape(name) + r" \[.*\] is missing$"):
        load_model(directory)


@pytest.mark.parametrize("offload", ["device", "host", "mmap"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: reshard(t, [544, 544, 544, 543]), "have 2175 rows, the last one 543 from row 1632"),
        (lambda t: reshard(t, [544] * 4 + [0]), "shard_4.weight has no rows"),
        (lambda t: t.update({PLE + "ngram_embedding.shard_4.weight": np.zeros((1, 16), np.float32)}),
         "shard_0 to .*shard_4 have 2177 rows, .* the table has 2176"),
        (lambda t: t.pop(PLE + "ngram_embedding.shard_2.weight"),
         r"shard_2.weight is missing, though there is .*shard_3.weight"),
        (lambda t: [t.pop(f"{PLE}ngram_embedding.shard_{i}.weight") for i in range(4)],
         r"shard_0.weight \[rows, columns\] is missing"),
        (lambda t: t.update({PLE + "ngram_embedding.shard_1.weight": np.zeros((544, 15), np.float32)}),
         r"shard_1.weight in model.safetensors has shape \[544, 15\], expected \[544, 16\]"),
        (lambda t: t.update({PLE + "ngram_embedding.shard_1.weight": np.zeros((544, 16), np.float16)}),
         r"shard_1.weight is in float16, but .*shard_0.weight, a part of the same, in float32"),
        (lambda t: t.update({PLE + "ngram_embedding.shard_1.weight": np.zeros((544, 16), np.int8)}),
         r"shard_1.weight in model.safetensors has dtype int8"),
        (lambda t: t.update({PLE + "ngram_embedding.weight_scale": np.ones(1, np.float32)}),
         "weight_scale is there, but no tensor in float8_e4m3fn that it scales"),
        (lambda t: t.update({PLE + "ngram_embedding.weight": np.ones((2176, 16), np.float32)}),
         "shard_0.weight' in model.safetensors is no tensor of this architecture"),
    ],
)  # fmt: skip
def test_tables_that_do_not_fit_are_an_error(qwen, change, message, offload: str):
    directory = qwen()
    edit_stored(directory, change)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_model(directory, ple_offload=offload)
    assert str(directory) in str(caught.value)


def test_stored_hashes_go_before_computed_ones_with_a_warning_and_are_saved(qwen, tmp_path, caplog):
    directory = qwen()
    multipliers = np.array([3, 5, 7], np.int64)
    edit_stored(directory, lambda t: t.update({PLE + "layer_multipliers": multipliers}))
    for offload in ("device", "mmap"):
        model = load_model(directory, ple_offload=offload)
        assert model.layers[1].ple.hash.multipliers == (3, 5, 7)
        assert "layer_multipliers differs from what the configuration gives" in caplog.text
        caplog.clear()
        save_pretrained(model, tmp_path / offload)
        saved = read_all(tmp_path / offload / "model.safetensors")
        assert np.array_equal(saved[PLE + "layer_multipliers"], multipliers)
        assert load_model(tmp_path / offload).ngram_hashes == model.ngram_hashes


def test_hashes_need_not_be_stored(qwen):
    directory = qwen("text_two_ple")
    edit_stored(directory, lambda t: [t.pop(PLE + name) for name in HASHES])
    assert_same_parameters(load_model(directory), load_model(QWEN_GOLDENS / "text_two_ple"))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("layer_multipliers", None, r"layer_multipliers \[3\] is missing, though others of its layer"),
        ("ngram_heads_offsets", np.zeros(4, np.int32), r"offsets in .* is int32\[4\], expected int64\[4\]"),
        ("ngram_heads_offsets", np.zeros(5, np.int64), r"offsets in .* is int64\[5\], expected int64\[4\]"),
        (
            "layer_multipliers",
            np.array([3, 0, 5]),
            r"multipliers .* cannot be used: multipliers.1. is 0",
        ),
        ("layer_multipliers", np.array([3, 2**62, 5]), "below 2.63"),
        ("ngram_heads_vocab_sizes", np.array([503, 509, 521, -1]), r"head_sizes.3. is -1"),
        ("ngram_heads_offsets", np.array([0, 503, 1012, 2000]), r"offsets.3. is 2000; .* the table's 2176"),
    ],
)
def test_hashes_that_cannot_be_are_an_error(qwen, name: str, value, message: str):
    directory = qwen()
    edit_stored(directory, lambda t: t.pop(PLE + name) if value is None else t.update({PLE + name: value}))
    with pytest.raises(CheckpointError, match=message):
        load_model(directory)


def test_a_table_that_no_hash_can_address_is_an_error(qwen):
    directory = qwen()
    edit_config(directory, ngram_vocab_size_base=2**30)
    with pytest.raises(CheckpointError, match="ngram_vocab_size_base is 1073741824"):
        load_model(directory)


def test_quantisation_is_not_said_of_what_is_saved(qwen, tmp_path: Path):
    directory = qwen()
    edit_config(directory, quantization_config={"quant_method": "fp8"}, note="kept")
    model = load_model(directory)
    assert model.config.extra["quantization_config"] == {"quant_method": "fp8"}
    save_pretrained(model, tmp_path / "out")
    saved = json.loads((tmp_path / "out" / "config.json").read_text())
    assert saved["note"] == "kept" and "quantization_config" not in saved
