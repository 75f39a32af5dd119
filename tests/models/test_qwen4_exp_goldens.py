"""Qwen4Exp against the golden checkpoints: teacher-forced, cached, its MTP head and its images."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from model_batches import decode_batch, poisoned_state, prefill_batch, relative_errors
from safetensors.numpy import load_file

import hybridjax
from hybridjax.batch import TILE, Batch
from hybridjax.images import rope_positions
from hybridjax.images.grid import patch_layout
from hybridjax.layers import indexed_attention
from hybridjax.ops.index_selection import SharedBlocks

GOLDENS = Path(__file__).parent.parent / "goldens" / "qwen4_exp"
NAMES = ("text_small", "text_no_ple", "text_two_ple")

# The rows at which two blocks with a score of exactly zero compete for the last place of a selection. The
# reference keeps the later block there, which nothing specifies; the smaller id wins here.
TIED = {"text_small": [], "text_no_ple": [36], "text_two_ple": [31]}


@pytest.fixture(scope="module", params=NAMES)
def golden(request):
    directory = GOLDENS / request.param
    model = hybridjax.load_model(directory, dtype="float32")
    want = {name: value[0] for name, value in load_file(directory / "golden.safetensors").items()}
    return request.param, model, want


@nnx.jit
def forced(model, ids):
    """Teacher-forced logits and everything that the model shows a probe."""
    seen = {}
    return model(ids, probe=seen.__setitem__), seen


def test_teacher_forced_call(golden):
    name, model, want = golden
    ids = jnp.asarray(want["input_ids"], jnp.int32)[None]
    logits, seen = forced(model, ids)
    assert logits.dtype == jnp.float32
    errors = relative_errors(logits[0], want["logits"])
    assert np.flatnonzero(errors > 2e-5).tolist() == TIED[name]
    layers = model.config.num_hidden_layers
    hidden = {key: value for key, value in want.items() if key.startswith("hidden")}
    assert bool(hidden) == (name == "text_small")
    for key, value in hidden.items():
        index = int(key.split(".")[1])
        if index == layers:
            got, _ = model.final_mix.mix(seen["hidden"])
        else:
            got = seen[f"layers.{index}.hidden"]
        assert relative_errors(got[: len(value)], value).max() < 2e-5, key


@pytest.mark.parametrize("name", [name for name in NAMES if TIED[name]])
def test_tied_rows_equal_the_reference_when_the_tie_goes_the_other_way(name, monkeypatch):
    model = hybridjax.load_model(GOLDENS / name, dtype="float32")
    want = load_file(GOLDENS / name / "golden.safetensors")
    select = indexed_attention.select_index_blocks

    def later_first(q, index_keys, page_table, rows, positions, *, block_size, top_k, tiled):
        chosen = select(
            q, index_keys, page_table, rows, positions, block_size=block_size, top_k=top_k, tiled=tiled
        )
        keys = np.asarray(index_keys[page_table[0]]).reshape(-1, index_keys.shape[-1])
        for row in TIED[name]:
            scores = np.maximum(np.asarray(q[row]) @ keys.T, 0).sum(0)
            visible = (row + 1) // block_size
            best = sorted(range(visible), key=lambda b: (-scores[b], -b))[:top_k]
            tail = [visible] if (row + 1) % block_size else []
            ids = sorted(best) + tail
            ids += [-1] * (chosen.shape[-1] - len(ids))
            chosen = chosen.at[row, 0].set(jnp.asarray(ids, jnp.int32))
        return chosen

    monkeypatch.setattr(indexed_attention, "select_index_blocks", later_first)
    logits = model(jnp.asarray(want["input_ids"], jnp.int32))
    assert relative_errors(logits[0], want["logits"][0]).max() < 2e-5


@pytest.mark.parametrize("chunk", [64, None])
def test_prefill_in_chunks_then_decode_one_by_one(golden, chunk):
    name, model, want = golden
    ids = np.asarray(want["input_ids"], np.int32)
    length = len(ids)
    pages = -(-length // TILE)
    order = np.random.default_rng(0).permutation(np.arange(1, pages + 4))[:pages]
    table = jnp.asarray(order, jnp.int32)[None]
    state = poisoned_state(model, pages + 4, 4)

    @jax.jit
    def step(batch, state):
        hidden, state = model.forward(batch, state)
        return model.logits(hidden), state

    logits = []
    cut = length - 9 if chunk is None else chunk
    out, state = step(prefill_batch(ids, 0, cut, table, 2), state)
    logits.append(out[:cut])
    for position in range(cut, length):
        out, state = step(decode_batch(ids[position], position, table, 2), state)
        logits.append(out)
    errors = relative_errors(jnp.concatenate(logits), want["logits"])
    assert np.flatnonzero(errors > 2e-5).tolist() == TIED[name]
    # What the batches did not name is still poison.
    spare = np.array(sorted(set(range(1, pages + 4)) - set(order.tolist())))
    for cache in state:
        for field in dataclasses.fields(cache):
            value = getattr(cache, field.name)
            if jnp.issubdtype(value.dtype, jnp.floating):
                paged = field.name in ("keys", "values", "index_keys")
                assert np.isnan(value[spare if paged else np.array([1, 3])]).all(), field.name


@pytest.mark.parametrize("name", NAMES)
def test_greedy_continuation_through_the_teacher_forced_call(name):
    model = hybridjax.load_model(GOLDENS / name, dtype="float32")
    facts = json.loads((GOLDENS / name / "golden.json").read_text())
    prompt = load_file(GOLDENS / name / "golden.safetensors")["input_ids"][0, : facts["greedy_prompt_len"]]
    ids, total = prompt.astype(np.int32).tolist(), len(prompt) + len(facts["greedy"])
    call = jax.jit(lambda x: model(x)[0])
    for _ in facts["greedy"]:
        padded = jnp.asarray([ids + [0] * (total - len(ids))], jnp.int32)
        ids.append(int(jnp.argmax(call(padded)[len(ids) - 1])))
    assert ids[len(prompt) :] == facts["greedy"]


class TestMTP:
    @pytest.fixture(scope="class")
    @classmethod
    def mtp(cls):
        directory = GOLDENS / "text_mtp"
        model = hybridjax.load_model(directory, dtype="float32")
        facts = json.loads((directory / "golden.json").read_text())
        return model, load_file(directory / "golden.safetensors"), facts

    def test_teacher_forced_drafts(self, mtp):
        model, want, _ = mtp
        ids = jnp.asarray(want["input_ids"], jnp.int32)
        rows = ids.shape[1] - 1
        logits, seen = forced(model, ids)
        assert relative_errors(logits[0], want["logits"][0]).max() < 2e-5
        streams = seen["hidden"]
        assert relative_errors(streams[:rows], want["streams"][0]).max() < 2e-5
        batch = Batch.whole(ids[:, 1:])
        drafted, _ = model.draft(batch, streams[: batch.tokens.shape[0]], None)
        assert relative_errors(drafted[:rows], want["draft_streams"][0]).max() < 2e-5
        assert relative_errors(model.draft_logits(drafted)[:rows], want["draft_logits"][0]).max() < 2e-5

    def test_autoregressive_draft_steps_on_the_heads_own_cache(self, mtp):
        model, want, facts = mtp
        ids = np.asarray(want["input_ids"][0], np.int32)
        rows = len(ids) - 1
        pages = -(-(rows + 2) // TILE)
        table = jnp.arange(1, pages + 1, dtype=jnp.int32)[None]
        cache = jax.tree.map(lambda x: jnp.full_like(x, -1), model.init_draft_cache(pages + 1, 2))
        cache = dataclasses.replace(cache, keys=jnp.full_like(cache.keys, jnp.nan))
        batch = prefill_batch(ids[1:], 0, rows, table, 1)
        streams = jnp.pad(jnp.asarray(want["streams"][0]), ((0, -rows % TILE), (0, 0)))
        drafted, cache = model.draft(batch, streams, cache)
        assert relative_errors(drafted[:rows], want["draft_streams"][0]).max() < 2e-5
        last = drafted[rows - 1][None]
        tokens = [int(jnp.argmax(model.draft_logits(last)))]
        for step, position in enumerate((rows, rows + 1)):
            last, cache = model.draft(decode_batch(tokens[-1], position, table, 1), last, cache)
            logits = model.draft_logits(last)
            assert relative_errors(logits[0], want["draft_step_logits"][step]) < 2e-5
            tokens.append(int(jnp.argmax(logits)))
        assert tokens == facts["draft_tokens"]

    def test_index_share_within_the_budget_changes_nothing(self, mtp):
        """Beyond what a captured row listed, later steps see the tokens that came after it."""
        model, want, _ = mtp
        ids, rows = np.asarray(want["input_ids"][0], np.int32), 15  # below the budget of 16: all is listed
        table = jnp.array([[1]], jnp.int32)
        cache = jax.tree.map(lambda x: jnp.full_like(x, -1), model.init_draft_cache(2, 2))
        streams = jnp.pad(jnp.asarray(want["streams"][0][:rows]), ((0, TILE - rows), (0, 0)))
        seen = {}
        drafted, cache = model.draft(
            prefill_batch(ids[1:], 0, rows, table, 1), streams, cache, seen.__setitem__
        )
        shared = SharedBlocks(seen["mtp.block_ids"][rows - 1 : rows], jnp.array([rows], jnp.int32), 3)
        plain = alike = drafted[rows - 1][None]
        before = other = cache
        for position in range(rows, rows + 3):
            batch = decode_batch(ids[position + 1], position, table, 1)
            plain, cache = model.draft(batch, plain, cache)
            alike, other = model.draft(batch, alike, other, shared=shared)
            assert relative_errors(alike, plain).max() < 2e-6
        # A draft step that does not select leaves the index state to the one that does.
        np.testing.assert_array_equal(other.pending, before.pending)
        np.testing.assert_array_equal(other.index_keys, before.index_keys)
        assert not np.array_equal(cache.pending, before.pending)


class TestImages:
    @pytest.fixture(scope="class")
    @classmethod
    def multimodal(cls):
        directory = GOLDENS / "multimodal"
        model = hybridjax.load_model(directory, dtype="float32")
        return (
            model,
            load_file(directory / "golden.safetensors"),
            json.loads((directory / "golden.json").read_text()),
        )

    def inputs(self, model, want):
        config = model.config
        merge = config.vision_config.spatial_merge_size
        grids = [tuple(grid) for grid in want["image_grid_thw"].tolist()]
        layout = patch_layout(grids, side=config.vision_config.grid_side, merge_size=merge)
        features = model.visual(
            jnp.asarray(want["pixel_values"]),
            layout.positions,
            (layout.taps, layout.weights),
            layout.frame,
        )
        ids = want["input_ids"][0].astype(np.int32)
        placeholder = ids == config.image_token_id
        index = np.where(placeholder, np.cumsum(placeholder) - 1, -1)
        rope, delta = rope_positions(ids, grids, config.image_token_id, merge)
        return features, ids, index, rope, delta

    def test_image_features_and_teacher_forced_logits(self, multimodal):
        model, want, _ = multimodal
        features, ids, index, rope, _ = self.inputs(model, want)
        assert relative_errors(features, want["image_embeds"]).max() < 2e-5
        logits = model(
            jnp.asarray(ids)[None], features=features, feature_index=index[None], rope_positions=rope[None]
        )
        assert relative_errors(logits[0], want["logits"][0]).max() < 2e-5

    def test_cached_prefill_and_greedy_decoding(self, multimodal):
        model, want, facts = multimodal
        features, ids, index, rope, delta = self.inputs(model, want)
        length, total = len(ids), len(ids) + len(facts["greedy"])
        table = jnp.arange(1, -(-total // TILE) + 1, dtype=jnp.int32)[None]
        state = poisoned_state(model, table.shape[1] + 1, 2)
        pad = -length % TILE
        batch = dataclasses.replace(
            prefill_batch(ids, 0, length, table, 1),
            features=features,
            feature_index=jnp.asarray(np.pad(index, (0, pad), constant_values=-1), jnp.int32),
            rope_positions=jnp.asarray(np.pad(rope, ((0, pad), (0, 0))), jnp.int32),
        )
        step = jax.jit(model.forward)
        hidden, state = step(batch, state)
        logits = model.logits(hidden[:length])
        assert relative_errors(logits, want["logits"][0]).max() < 2e-5
        tokens = [int(jnp.argmax(logits[-1]))]
        for position in range(length, total - 1):
            triple = jnp.full((1, 3), position + delta, jnp.int32)
            batch = dataclasses.replace(decode_batch(tokens[-1], position, table, 1), rope_positions=triple)
            hidden, state = step(batch, state)
            tokens.append(int(jnp.argmax(model.logits(hidden)[0])))
        assert tokens == facts["greedy"]
