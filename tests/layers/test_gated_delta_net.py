"""Gated DeltaNet against transformers' module (goldens/qwen4_exp/gated_delta_net), whole and in steps."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from hybridjax.batch import TILE, Batch, GatedDeltaCache, Mode
from hybridjax.configs.qwen4_exp import Qwen4ExpConfig, RopeConfig
from hybridjax.layers.gated_delta_net import GatedDeltaNet

GOLDEN = load_file(Path(__file__).parent.parent / "goldens" / "qwen4_exp" / "gated_delta_net.safetensors")
HIDDEN, KEY_HEADS, HEADS, KEY, VALUE, TAPS, SLOTS = 24, 2, 6, 8, 12, 4, 5
CHANNELS = 2 * KEY_HEADS * KEY + HEADS * VALUE


def config(gate="sigmoid"):
    return Qwen4ExpConfig(
        hidden_size=HIDDEN,
        num_hidden_layers=1,
        layer_types=("linear_attention",),
        rope_parameters=RopeConfig(mrope_section=(11, 11, 10)),
        ple_layer_ids=(),
        linear_num_key_heads=KEY_HEADS,
        linear_num_value_heads=HEADS,
        linear_key_head_dim=KEY,
        linear_value_head_dim=VALUE,
        linear_conv_kernel_dim=TAPS,
        output_gate_type=gate,
    )


def build(dtype=jnp.float32, gate="sigmoid"):
    init = nnx.initializers.normal(0.02)
    return GatedDeltaNet(config(gate), init=init, dtype=dtype, rngs=nnx.Rngs(0))


def golden_layer(gate="sigmoid"):
    layer = build(gate=gate)
    rows = [GOLDEN[f"weights.in_proj_{part}.weight"] for part in ("qkv", "z", "b", "a")]
    layer.in_proj.weight.value[...] = jnp.asarray(np.concatenate(rows))
    layer.conv_weight[...] = jnp.asarray(GOLDEN["weights.conv1d.weight"])
    layer.A_log[...] = jnp.asarray(GOLDEN["weights.A_log"])
    layer.dt_bias[...] = jnp.asarray(GOLDEN["weights.dt_bias"])
    layer.norm_weight[...] = jnp.asarray(GOLDEN["weights.norm.weight"])
    layer.out_proj.weight.value[...] = jnp.asarray(GOLDEN["weights.out_proj.weight"])
    return layer


@nnx.jit
def run(layer, x, batch, cache):
    return layer(x, batch, cache)


def step_batch(mode, positions, slot, snapshot=None):
    tiles = len(positions) // TILE if mode is Mode.PREFILL else 0
    return Batch(
        tokens=jnp.zeros(len(positions), jnp.int32),
        positions=jnp.asarray(positions, jnp.int32),
        tile_sequence=jnp.zeros(tiles, jnp.int32),
        context_length=jnp.zeros(len(slot), jnp.int32),
        slot=jnp.asarray(slot, jnp.int32),
        page_table=jnp.zeros((len(slot), 0), jnp.int32),
        logit_rows=jnp.zeros(0, jnp.int32),
        initial_slot=jnp.asarray(slot, jnp.int32) if mode is Mode.PREFILL else None,
        snapshot_slot=snapshot,
        mode=mode,
    )


def poisoned_cache(dtype=jnp.float32):
    return GatedDeltaCache(
        jnp.full((SLOTS, HEADS, KEY, VALUE), jnp.nan), jnp.full((SLOTS, TAPS - 1, CHANNELS), jnp.nan, dtype)
    )


def close(got, want, peak_error=1e-5):
    want = np.asarray(want, np.float64)
    assert np.max(np.abs(np.asarray(got, np.float64) - want)) <= peak_error * np.max(np.abs(want))


def serve(layer, x, prompt, slot, *, cut=None, dtype=jnp.float32):
    """Outputs of every token: a prompt prefilled in one or two parts, the rest decoded."""
    cache, outs = poisoned_cache(dtype), []
    for start, end in [(0, prompt)] if cut is None else [(0, cut), (cut, prompt)]:
        positions = np.full(3 * TILE, -1)
        positions[: end - start] = np.arange(start, end)
        rows = np.full((3 * TILE, HIDDEN), np.nan, x.dtype)
        rows[: end - start] = x[start:end]
        snapshot = jnp.asarray([3 if start == 0 and end >= TILE else 0, 0, 0], jnp.int32)
        batch = step_batch(Mode.PREFILL, positions, [slot], snapshot)
        y, cache = run(layer, jnp.asarray(rows), batch, cache)
        outs.append(np.asarray(y)[: end - start])
    for t in range(prompt, len(x)):
        rows = np.stack([np.full(HIDDEN, np.nan, x.dtype), x[t]])
        y, cache = run(layer, jnp.asarray(rows), step_batch(Mode.DECODE, [-1, t], [0, slot]), cache)
        outs.append(np.asarray(y)[1:])
    return np.concatenate(outs), cache


@pytest.mark.parametrize("gate", ["sigmoid", None])
def test_a_whole_sequence_equals_the_original_module(gate):
    x = GOLDEN["x"]
    batch = Batch.whole(jnp.zeros((2, len(x)), jnp.int32))
    rows = jnp.zeros((2, batch.tokens.shape[0] // 2, HIDDEN)).at[:, : len(x)].set(x)
    seen = {}
    y, cache = golden_layer(gate)(rows.reshape(-1, HIDDEN), batch, None, seen.__setitem__)
    assert cache is None
    for got in y.reshape(2, -1, HIDDEN)[:, : len(x)]:
        close(got, GOLDEN["sigmoid.y" if gate else "silu.y"])
    for state in seen["state"]:
        close(state, GOLDEN["state"][0])


def test_prefill_and_decoding_equal_the_original_module_and_spare_other_slots():
    x = GOLDEN["x"]
    y, cache = serve(golden_layer(), x, 130, 2)
    close(y, GOLDEN["sigmoid.y"])
    close(cache.state[2], GOLDEN["state"][0])
    qkv = x[-3:].astype(np.float64) @ GOLDEN["weights.in_proj_qkv.weight"].T
    close(cache.conv[2], qkv)
    others = np.array([1, 4])
    assert np.isnan(cache.state[others]).all() and np.isnan(cache.conv[others]).all()


def test_cutting_a_prompt_on_the_grid_changes_no_bit():
    layer, x = golden_layer(), GOLDEN["x"][:134]
    whole, after = serve(layer, x, 130, 1)
    for cut in (64, 128):
        parts, cache = serve(layer, x, 130, 1, cut=cut)
        np.testing.assert_array_equal(parts, whole)
        np.testing.assert_array_equal(cache.state[1], after.state[1])
        np.testing.assert_array_equal(cache.conv[1], after.conv[1])


def test_a_snapshot_resumes_where_it_was_taken():
    layer, x = golden_layer(), GOLDEN["x"][:130]
    whole, cache = serve(layer, x, 130, 1)  # leaves the state after 64 tokens in slot 3
    positions = np.full(3 * TILE, -1)
    positions[:66] = np.arange(64, 130)
    rows = np.full((3 * TILE, HIDDEN), np.nan, np.float32)
    rows[:66] = x[64:]
    batch = step_batch(Mode.PREFILL, positions, [4], jnp.zeros(3, jnp.int32))
    batch = dataclasses.replace(batch, initial_slot=jnp.array([3], jnp.int32))
    y, after = run(layer, jnp.asarray(rows), batch, cache)
    np.testing.assert_array_equal(y[:66], whole[64:])
    np.testing.assert_array_equal(after.state[4], cache.state[1])
    np.testing.assert_array_equal(after.conv[4], cache.conv[1])
    np.testing.assert_array_equal(after.state[3], cache.state[3])


def test_a_bfloat16_layer_keeps_decays_and_state_in_float32():
    layer = build(jnp.bfloat16)
    assert layer.A_log[...].dtype == layer.dt_bias[...].dtype == jnp.float32
    assert layer.in_proj.weight.value[...].dtype == layer.norm_weight[...].dtype == jnp.bfloat16
    assert layer.conv_weight[...].shape == (CHANNELS, 1, TAPS)
    assert np.all(np.exp(layer.A_log[...]) < 16) and np.all(layer.dt_bias[...] == 1)
    wide = golden_layer()
    narrow = nnx.clone(wide)
    for param in (
        narrow.in_proj.weight.value,
        narrow.conv_weight,
        narrow.norm_weight,
        narrow.out_proj.weight.value,
    ):
        param.set_value(param[...].astype(jnp.bfloat16))
    y, cache = serve(narrow, GOLDEN["x"].astype(jnp.bfloat16), 130, 2, dtype=jnp.bfloat16)
    assert y.dtype == jnp.bfloat16
    assert cache.state.dtype == jnp.float32 and cache.conv.dtype == jnp.bfloat16
    close(y, GOLDEN["sigmoid.y"], 0.05)


def test_every_parameter_has_a_finite_gradient():
    layer, x = golden_layer(), GOLDEN["x"][:70]
    batch = Batch.whole(jnp.zeros((1, 70), jnp.int32))
    rows = jnp.zeros((2 * TILE, HIDDEN)).at[:70].set(x)
    valid = (batch.positions >= 0)[:, None]

    @nnx.jit
    def gradient(layer):
        return nnx.grad(lambda m: jnp.sum(jnp.where(valid, m(rows, batch, None)[0], 0.0) ** 2))(layer)

    for path, leaf in jax.tree_util.tree_leaves_with_path(nnx.state(gradient(layer))):
        assert np.isfinite(leaf).all() and np.any(leaf != 0), path


def test_verification_is_refused():
    layer = build()
    batch = step_batch(Mode.VERIFY, [0], [1])
    with pytest.raises(NotImplementedError, match="VERIFY"):
        layer(jnp.zeros((1, HIDDEN)), batch, poisoned_cache())
