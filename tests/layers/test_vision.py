"""The vision tower against the reference's answers, and what padding and packing must not change."""

import importlib
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from hybridjax.configs.qwen4_exp_multimodal import Qwen4ExpMultimodalConfig, Qwen4ExpVisionConfig
from hybridjax.images import patch_layout
from hybridjax.layers.vision import LayerNorm, VisionTower, axial_angles
from hybridjax.models.qwen4_exp_vision import vision_entries
from hybridjax.ops import segment_attention

GOLDEN = Path(__file__).parent.parent / "goldens" / "qwen4_exp" / "multimodal"
CONFIG = Qwen4ExpMultimodalConfig.from_dict(json.loads((GOLDEN / "config.json").read_text())).vision_config


def make(config, dtype=jnp.float32):
    return VisionTower(config, init=nnx.initializers.normal(0.3), dtype=jnp.dtype(dtype), rngs=nnx.Rngs(0))


def filled(dtype=jnp.float32):
    """The golden tower."""
    tensors = load_file(GOLDEN / "model.safetensors")
    tower = make(CONFIG, dtype)
    state = nnx.state(tower, nnx.Param)
    flat = dict(nnx.to_flat_state(state))
    for entry in vision_entries(CONFIG):
        flat[entry.path].set_value(jnp.asarray(tensors[entry.name], dtype))
    nnx.update(tower, state)
    return tower


@nnx.jit
def program(tower, patches, positions, taps, frame):
    return tower(patches, positions, taps, frame)


def run(tower, patches, grids, length=None, poison=np.nan):
    layout = patch_layout(grids, side=CONFIG.grid_side, merge_size=2, length=length)
    rows = np.full((len(layout.frame), patches.shape[1]), poison, np.float32)
    rows[: len(patches)] = patches
    taps = jnp.asarray(layout.taps), jnp.asarray(layout.weights)
    out = program(tower, jnp.asarray(rows), jnp.asarray(layout.positions), taps, jnp.asarray(layout.frame))
    return np.asarray(out, np.float32)


@pytest.fixture(scope="module")
def tower():
    return filled()


@pytest.fixture(scope="module")
def golden():
    tensors = load_file(GOLDEN / "golden.safetensors")
    return tensors["pixel_values"], [tuple(map(int, g)) for g in tensors["image_grid_thw"]], tensors


def peak_error(got, want):
    return np.abs(got - want).max() / np.abs(want).max()


def test_it_answers_as_the_reference(tower, golden):
    patches, grids, tensors = golden
    assert peak_error(run(tower, patches, grids), tensors["image_embeds"]) < 5e-6


def test_narrow_parameters_stay_close(golden):
    patches, grids, tensors = golden
    out = run(filled(jnp.bfloat16), patches, grids)
    assert 1e-5 < peak_error(out, tensors["image_embeds"]) < 0.05


def test_padding_changes_nothing_and_gives_zeros(tower, golden):
    patches, grids, tensors = golden
    out = run(tower, patches, grids, length=128)
    assert peak_error(out[:24], tensors["image_embeds"]) < 5e-6
    assert not out[24:].any()


def test_images_and_frames_do_not_see_each_other(tower):
    rng = np.random.default_rng(3)
    grids = [(1, 4, 6), (2, 2, 4), (1, 2, 2)]
    parts = [rng.normal(size=(t * h * w, CONFIG.patch_values)).astype(np.float32) for t, h, w in grids]
    together = run(tower, np.concatenate(parts), grids, length=128)
    frames = [
        ((1, 4, 6), parts[0]),
        ((1, 2, 4), parts[1][:8]),
        ((1, 2, 4), parts[1][8:]),
        (grids[2], parts[2]),
    ]
    apart = np.concatenate([run(tower, part, [grid], length=128)[: len(part) // 4] for grid, part in frames])
    np.testing.assert_allclose(together[: len(apart)], apart, atol=2e-6)
    # The same patches as one frame are another picture.
    merged = run(tower, parts[1], [(1, 4, 4)], length=128)[:4]
    assert np.abs(merged - apart[6:10]).max() > 1e-2


def test_the_entries_are_the_tower_and_the_checkpoint():
    tensors = load_file(GOLDEN / "model.safetensors")
    entries = {entry.name: entry for entry in vision_entries(CONFIG)}
    assert set(entries) == {name for name in tensors if name.startswith("model.visual.")}
    flat = dict(nnx.to_flat_state(nnx.state(make(CONFIG), nnx.Param)))
    assert {entry.path for entry in entries.values()} == set(flat)
    for name, entry in entries.items():
        assert entry.shape == tensors[name].shape == flat[entry.path].get_value().shape
    moved = next(vision_entries(CONFIG, "v.", ("visual",)))
    assert (moved.name, moved.path) == ("v.patch_embed.proj.weight", ("visual", "patch_embed", "weight"))


def test_the_released_tower_has_333_tensors():
    shapes = {entry.name.removeprefix("model.visual."): entry.shape
              for entry in vision_entries(Qwen4ExpVisionConfig())}  # fmt: skip
    assert len(shapes) == 333
    assert shapes["patch_embed.proj.weight"] == (1152, 3, 2, 16, 16)
    assert shapes["pos_embed.weight"] == (2304, 1152)
    assert shapes["blocks.26.attn.qkv.weight"] == (3456, 1152)
    assert shapes["blocks.0.mlp.linear_fc1.weight"] == (4304, 1152)
    assert shapes["merger.linear_fc2.weight"] == (2560, 4608)


def test_angles_of_rows_come_before_those_of_columns():
    angles = np.asarray(axial_angles(jnp.asarray([[3, 5]], jnp.int32), 72, 10000.0))
    frequencies = 10000.0 ** (-2 * np.arange(18) / 36)
    np.testing.assert_allclose(angles[0], np.concatenate([3 * frequencies, 5 * frequencies]), rtol=1e-6)


def test_layer_norm_is_that_of_float64():
    rng = np.random.default_rng(1)
    x, weight, bias = rng.normal(2, 3, (5, 24)), rng.normal(size=24), rng.normal(size=24)
    norm = LayerNorm(24, dtype=jnp.dtype(jnp.float32))
    norm.weight.set_value(jnp.asarray(weight, jnp.float32))
    norm.bias.set_value(jnp.asarray(bias, jnp.float32))
    centred = x - x.mean(-1, keepdims=True)
    want = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-6) * weight + bias
    np.testing.assert_allclose(np.asarray(norm(jnp.asarray(x, jnp.float32))), want, atol=5e-6)


def attention_by_rows(q, k, v, segment, scale):
    out = np.zeros(v.shape)
    for i, own in enumerate(segment):
        seen = np.flatnonzero(segment == own) if own >= 0 else []
        for head in range(q.shape[1]) if len(seen) else ():
            scores = k[seen, head] @ q[i, head] * scale
            weights = np.exp(scores - scores.max())
            out[i, head] = weights / weights.sum() @ v[seen, head]
    return out


@pytest.mark.parametrize("implementation", ["reference", "tiled"])
def test_attention_is_that_of_float64(implementation, monkeypatch):
    # 16 queries at a time: 37 rows are three tiles, the last one padded.
    module = importlib.import_module("hybridjax.ops.segment_attention")  # the package exports its op
    monkeypatch.setattr(module, "_SCORE_BYTES", 1)
    rng = np.random.default_rng(2)
    segment = rng.integers(-1, 4, 37).astype(np.int32)
    q, k, v = rng.normal(size=(3, 37, 2, 8))
    want = attention_by_rows(q, k, v, segment, 0.7)
    q[segment < 0] = k[segment < 0] = v[segment < 0] = np.nan
    got = segment_attention(*(jnp.asarray(x, jnp.float32) for x in (q, k, v)), jnp.asarray(segment),
                            scale=0.7, implementation=implementation)  # fmt: skip
    np.testing.assert_allclose(np.asarray(got), want, atol=2e-6)


def test_scratch_of_attention_does_not_grow_with_the_square_of_the_patches():
    def temporary(rows):
        item = jax.ShapeDtypeStruct((rows, 2, 8), jnp.float32)
        segment = jax.ShapeDtypeStruct((rows,), jnp.int32)
        call = jax.jit(lambda q, k, v, s: segment_attention(q, k, v, s, scale=1.0, implementation="tiled"))
        return call.lower(item, item, item, segment).compile().memory_analysis().temp_size_in_bytes

    assert temporary(65536) < 2**30  # all scores at once would take 32 GiB
