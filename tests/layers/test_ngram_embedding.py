"""The n-gram embedding against the reference's answers, and its agreement with itself in every mode."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from hybridjax.batch import TILE, Batch, Mode, NgramCache
from hybridjax.configs.qwen4_exp import Qwen4ExpConfig, RopeConfig
from hybridjax.errors import ConfigError
from hybridjax.layers.ngram_embedding import NgramEmbedding

GOLDEN = Path(__file__).parent.parent / "goldens" / "qwen4_exp" / "ngram_embedding.safetensors"
EOS, TILES, SLOTS = 5, 3, 6
CONFIG = Qwen4ExpConfig(
    vocab_size=97,
    hidden_size=12,
    hc_count=3,
    ple_layer_ids=(1, 2),
    ple_embed_dim=12,
    heads_per_ngram=2,
    ngram_vocab_size_base=50,
    make_ngram_vocab_size_divisible_by=8,
    eos_token_id=(EOS, 7),
    bos_token_id=None,
    rope_parameters=RopeConfig(),
)
WIDTH = 36


@functools.cache
def build(dtype=jnp.float32, with_table=True):
    """The golden's layer: the second of two, so that the hash depends on its index."""
    init = jax.nn.initializers.normal(0.02)
    rngs = nnx.Rngs(0)
    layer = NgramEmbedding(CONFIG, 1, init=init, dtype=jnp.dtype(dtype), rngs=rngs, with_table=with_table)
    assert not layer.conv_weight[...].any()
    tensors = {name.removeprefix("ple."): t for name, t in load_file(GOLDEN).items()}
    places = {
        "key_proj.weight": layer.key_proj.weight.value,
        "value_proj.weight": layer.value_proj.weight.value,
        "norm_key.weight": layer.norm_key.weight,
        "norm_query.weight": layer.norm_query.weight,
        "norm_conv.weight": layer.norm_conv.weight,
        "conv1d.weight": layer.conv_weight,
    }
    if layer.table is not None:
        places["ple_embedding.ngram_embedding.weight"] = layer.table.weight.value
    for name, place in places.items():
        assert place[...].shape == tensors[name].shape
        place[...] = jnp.asarray(tensors[name], dtype)
    return layer, tensors


@nnx.jit
def call(layer, streams, batch, cache, rows=None):
    return layer(streams, batch, cache, rows)


def whole_batch(ids, streams, padding=jnp.nan):
    """A WHOLE batch of ids [B, L] and its streams [B, L, W], padding rows filled with ``padding``."""
    batch = Batch.whole(jnp.asarray(ids, jnp.int32))
    pad = -ids.shape[1] % TILE
    wide = jnp.pad(jnp.asarray(streams), ((0, 0), (0, pad), (0, 0)), constant_values=padding)
    return batch, wide.reshape(-1, WIDTH)


def whole(layer, ids, streams):
    """Deltas [B, L, W] and what the padding rows got."""
    batch, rows = whole_batch(ids, streams)
    delta, cache = call(layer, rows, batch, None)
    assert cache is None
    delta = np.asarray(delta).reshape(len(ids), -1, WIDTH)
    return delta[:, : ids.shape[1]], delta[:, ids.shape[1] :]


def poisoned():
    return NgramCache(jnp.full((SLOTS, 9, WIDTH), jnp.nan), jnp.full((SLOTS, 2), -77, jnp.int32))


def prefill(layer, ids, streams, cache, slot, start, end, rows=None, **fields):
    """Tokens start..end-1 of one sequence, ids [L], through three tiles; deltas and the cache."""
    index = start % TILE + np.arange(end - start)
    tokens, positions = np.zeros(TILES * TILE, np.int32), np.full(TILES * TILE, -1, np.int32)
    tokens[index], positions[index] = ids[start:end], np.arange(start, end)
    x = jnp.full((TILES * TILE, WIDTH), jnp.nan, streams.dtype).at[index].set(streams[start:end])
    tiles = -(-end // TILE) - start // TILE
    batch = Batch(
        tokens=jnp.asarray(tokens),
        positions=jnp.asarray(positions),
        tile_sequence=jnp.asarray([0] * tiles + [1] * (TILES - tiles), jnp.int32),
        context_length=jnp.asarray([end, 0], jnp.int32),
        slot=jnp.asarray([slot, 0], jnp.int32),
        page_table=jnp.zeros((2, 0), jnp.int32),
        logit_rows=jnp.zeros((0,), jnp.int32),
        **{name: jnp.asarray(value, jnp.int32) for name, value in fields.items()},
    )
    if rows is not None:
        rows = jnp.full((TILES * TILE, rows.shape[1]), jnp.nan).at[index].set(rows[start:end])
    delta, cache = call(layer, x, batch, cache, rows)
    assert not np.asarray(delta)[positions < 0].any()
    return np.asarray(delta)[index], cache


def decode(layer, ids, streams, cache, slots, position):
    """One token of each of two sequences and a padding row."""
    batch = Batch(
        tokens=jnp.asarray([*ids[:, position], 0], jnp.int32),
        positions=jnp.asarray([position, position, -1], jnp.int32),
        tile_sequence=jnp.zeros((0,), jnp.int32),
        context_length=jnp.asarray([position + 1, position + 1, 0], jnp.int32),
        slot=jnp.asarray([*slots, 0], jnp.int32),
        page_table=jnp.zeros((3, 0), jnp.int32),
        logit_rows=jnp.zeros((0,), jnp.int32),
        mode=Mode.DECODE,
    )
    x = jnp.concatenate([jnp.asarray(streams[:, position]), jnp.full((1, WIDTH), jnp.nan)])
    delta, cache = call(layer, x, batch, cache)
    assert not np.asarray(delta)[2].any()
    return np.asarray(delta)[:2], cache


def long_sequence(seed=0, length=170):
    rng = np.random.default_rng(seed)
    ids = np.where(rng.random(length) < 0.1, EOS, rng.integers(0, 97, length))
    return ids, jnp.asarray(rng.standard_normal((length, WIDTH)), jnp.float32)


def test_whole_sequences_equal_the_reference():
    layer, golden = build()
    delta, padding = whole(layer, golden["ids"], golden["streams"])
    np.testing.assert_allclose(delta, golden["delta"], rtol=2e-5, atol=2e-6)
    assert padding.size and not padding.any()


def test_prefill_and_decode_equal_the_reference():
    """40 tokens in one step and 30 one by one, over a convolution that reaches nine tokens back."""
    layer, golden = build()
    ids, streams = golden["ids"], jnp.asarray(golden["streams"])
    cache = poisoned()
    got = [[], []]
    for s, slot in enumerate((4, 1)):
        delta, cache = prefill(layer, ids[s], streams[s], cache, slot, 0, 40)
        got[s] += list(delta)
    for t in range(40, 70):
        delta, cache = decode(layer, ids, streams, cache, (4, 1), t)
        for s in range(2):
            got[s].append(delta[s])
    np.testing.assert_allclose(np.array(got), golden["delta"], rtol=2e-5, atol=2e-6)
    np.testing.assert_array_equal(cache.context[jnp.array([4, 1])], ids[:, -2:])
    others = jnp.array([2, 3, 5])
    assert np.isnan(cache.conv[others]).all() and (cache.context[others] == -77).all()


def test_decoding_from_the_first_token_equals_the_reference():
    layer, golden = build()
    cache = poisoned()
    for t in range(16):
        delta, cache = decode(layer, golden["ids"], golden["streams"], cache, (2, 3), t)
        np.testing.assert_allclose(delta, golden["delta"][:, t], rtol=2e-5, atol=2e-6)


def test_cutting_on_the_grid_changes_no_bit():
    layer, _ = build()
    ids, streams = long_sequence()
    one_shot, after = prefill(layer, ids, streams, poisoned(), 2, 0, 170)
    for cuts in ([64], [128], [64, 128]):
        cache, got = poisoned(), []
        for start, end in zip([0, *cuts], [*cuts, 170]):
            delta, cache = prefill(layer, ids, streams, cache, 2, start, end)
            got.append(delta)
        np.testing.assert_array_equal(np.concatenate(got), one_shot)
        np.testing.assert_array_equal(cache.conv[2], after.conv[2])
        np.testing.assert_array_equal(cache.context[2], after.context[2])


def test_a_sequence_resumes_from_a_snapshot():
    layer, _ = build()
    ids, streams = long_sequence(1)
    want, _ = prefill(layer, ids, streams, poisoned(), 2, 0, 170)
    _, cache = prefill(layer, ids, streams, poisoned(), 2, 0, 170, snapshot_slot=[0, 5, 0])
    got, _ = prefill(layer, ids, streams, cache, 3, 128, 170, initial_slot=[5, 0])
    np.testing.assert_array_equal(got, want[128:])


def test_rows_from_elsewhere_replace_the_table():
    layer, _ = build()
    bare, golden = build(with_table=False)
    ids, streams = long_sequence(2)
    table = golden["ple_embedding.ngram_embedding.weight"]
    rows = jnp.asarray(table[layer.hash.rows_numpy(ids)].reshape(len(ids), -1))
    want, after = prefill(layer, ids, streams, poisoned(), 2, 0, 170)
    got, cache = prefill(bare, ids, streams, poisoned(), 2, 0, 170, rows=rows)
    np.testing.assert_array_equal(got, want)
    np.testing.assert_array_equal(cache.context[2], after.context[2])
    with pytest.raises(ConfigError, match="ngram_rows"):
        prefill(bare, ids, streams, poisoned(), 2, 0, 170)
    names = [".".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.state(bare, nnx.Param))]
    assert "conv_weight" in names and not any("table" in name for name in names)


def test_the_gradient_of_the_table_is_that_of_the_rows_it_gave():
    layer, golden = build()
    ids = golden["ids"]
    batch, streams = whole_batch(ids, golden["streams"], padding=0.0)
    graph, params = nnx.split(layer)

    def loss(params, rows=None):
        delta, _ = nnx.merge(graph, params)(streams, batch, None, rows)
        return jnp.sum(jnp.sin(delta))

    got = jax.jit(jax.grad(loss))(params).table.weight.value[...]
    used = np.concatenate([layer.hash.rows_numpy(sequence) for sequence in ids])
    table = np.asarray(golden["ple_embedding.ngram_embedding.weight"])
    live = np.asarray(batch.positions) >= 0
    rows = np.zeros((len(live), 12), np.float32)
    rows[live] = table[used].reshape(-1, 12)
    by_row = np.asarray(jax.jit(jax.grad(loss, argnums=1))(params, jnp.asarray(rows)))[live]
    want = np.zeros_like(table)
    np.add.at(want, used, by_row.reshape(*used.shape, 3))
    assert np.abs(want).max() > 0.1
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    untouched = np.setdiff1d(np.arange(len(table)), used)
    # Padding rows look something up, but nothing of it reaches the result.
    assert len(untouched) and not np.asarray(got)[untouched].any()


def test_bfloat16_rounds_what_is_materialised_only():
    layer, golden = build(jnp.bfloat16)
    delta, _ = whole(layer, golden["ids"], golden["streams"].astype(jnp.bfloat16))
    assert delta.dtype == jnp.bfloat16
    delta = delta.astype(np.float64)
    error = np.linalg.norm(delta - golden["delta"]) / np.linalg.norm(golden["delta"])
    assert error < 0.02
