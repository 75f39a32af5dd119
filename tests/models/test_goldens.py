"""MiniCPM-SALA against the golden checkpoints: teacher-forced, and cached in every kind of step."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from model_batches import decode_batch, poisoned_state, prefill_batch, relative_errors, relative_to_peak
from safetensors.numpy import load_file

import hybridjax
from hybridjax.batch import TILE, PagedCache

GOLDENS = Path(__file__).parent.parent / "goldens" / "minicpm_sala"
NAMES = ("dense", "sparse", "sparse_wide")


@pytest.fixture(scope="module", params=NAMES)
def golden(request):
    directory = GOLDENS / request.param
    model = hybridjax.load_model(directory, dtype="float32")
    return model, load_file(directory / "golden.safetensors")


@nnx.jit
def forced(model, ids):
    """Teacher-forced logits and everything that the model shows a probe."""
    seen = {}
    return model(ids, probe=seen.__setitem__), seen


def assert_blocks(got, want, dense_len):
    """Selected blocks equal the golden ones on every row that selects (goldens list none for dense rows)."""
    for position in range(max(0, dense_len - 1), len(want)):
        for g in range(want.shape[1]):
            a, b = np.asarray(got[position, g]), want[position, g]
            assert a[a >= 0].tolist() == b[b >= 0].tolist(), (position, g)


def test_teacher_forced_call(golden):
    model, want = golden
    ids = jnp.asarray(want["input_ids"], jnp.int32)[None]
    logits, seen = forced(model, ids)
    length = ids.shape[1]
    assert logits.dtype == jnp.float32
    assert relative_errors(logits[0], want["logits"]).max() < 2e-5
    layers = model.config.num_hidden_layers
    for name, value in want.items():
        kind, _, index = name.partition(".")
        if kind == "hidden":
            got = seen["hidden" if int(index) == layers else f"layers.{index}.hidden"]
            assert relative_errors(got[:length], value).max() < 2e-5, name
        elif kind == "state":
            assert relative_to_peak(seen[f"layers.{index}.state"][0], value) < 1e-5, name
        elif kind == "blocks":
            assert_blocks(seen[f"layers.{index}.block_ids"], value, model.config.sparse_config.dense_len)


def test_sequences_of_a_batch_do_not_see_each_other(golden):
    model, want = golden
    ids = jnp.asarray(want["input_ids"], jnp.int32)
    pair = jnp.stack([ids, jnp.roll(ids, 1)])
    assert relative_errors(forced(model, pair)[0][0], want["logits"]).max() < 2e-5


@pytest.mark.parametrize("chunk", [64, 128, None])
def test_prefill_in_chunks_then_decode_one_by_one(golden, chunk):
    model, want = golden
    ids = np.asarray(want["input_ids"], np.int32)
    length = len(ids)
    cut = length - 70  # the last tokens one by one, over a block border
    cut = max(TILE, cut - cut % TILE)
    pages = -(-length // TILE)
    # Scattered pages, everything poisoned with NaN: only what was written may be read.
    order = np.random.default_rng(0).permutation(np.arange(1, pages + 4))[:pages]
    table = jnp.asarray(order, jnp.int32)[None]
    state = poisoned_state(model, pages + 4, 4)
    blocks = {}

    def run(batch, state):
        seen = {}
        hidden, state = model.forward(batch, state, seen.__setitem__)
        return model.logits(hidden), state, {k: v for k, v in seen.items() if k.endswith("block_ids")}

    step = jax.jit(run)
    logits = []
    for start in range(0, cut, chunk or cut):
        end = min(cut, start + (chunk or cut))
        out, state, seen = step(prefill_batch(ids, start, end, table, 2), state)
        logits.append(out[: end - start])
        for name, value in seen.items():
            blocks.setdefault(name, []).append(value[: end - start])
    for position in range(cut, length):
        out, state, seen = step(decode_batch(ids[position], position, table, 2), state)
        logits.append(out)
        for name, value in seen.items():
            blocks.setdefault(name, []).append(value)
    assert relative_errors(jnp.concatenate(logits), want["logits"]).max() < 2e-5

    for name, value in want.items():
        kind, _, index = name.partition(".")
        if kind == "state":
            assert relative_to_peak(state[int(index)].state[2], value) < 1e-5, name
        elif kind == "blocks":
            got = np.concatenate([np.asarray(b) for b in blocks[f"layers.{index}.block_ids"]])
            assert_blocks(got, value, model.config.sparse_config.dense_len)
    # What the batches did not name is still poison: slots 1 and 3, and the unused pages.
    spare = sorted(set(range(1, pages + 4)) - set(order.tolist()))
    for cache in state:
        rest = (
            [cache.keys[np.array(spare)]]
            if isinstance(cache, PagedCache)
            else [cache.state[1], cache.state[3]]
        )
        assert all(np.isnan(x).all() for x in rest)


@pytest.mark.parametrize("name", NAMES)
def test_greedy_continuation_through_the_teacher_forced_call(name):
    model = hybridjax.load_model(GOLDENS / name, dtype="float32")
    golden = json.loads((GOLDENS / name / "golden.json").read_text())
    prompt = load_file(GOLDENS / name / "golden.safetensors")["input_ids"][: golden["greedy_prompt_len"]]
    ids, total = prompt.astype(np.int32).tolist(), len(prompt) + len(golden["greedy"])
    call = jax.jit(lambda x: model(x)[0])
    for _ in golden["greedy"]:
        padded = jnp.asarray([ids + [0] * (total - len(ids))], jnp.int32)
        ids.append(int(jnp.argmax(call(padded)[len(ids) - 1])))
    assert ids[len(prompt) :] == golden["greedy"]


def test_the_call_rule_makes_a_long_call_sparse_from_its_first_token():
    model = hybridjax.load_model(GOLDENS / "sparse", dtype="float32")
    model.config = dataclasses.replace(model.config, dense_switch="call")
    for layer in model.layers:
        layer.mixer.config = model.config
    _, seen = forced(model, jnp.zeros((1, 200), jnp.int32))
    assert (np.asarray(seen["layers.0.block_ids"])[199, 0] >= 0).sum() == 4  # all blocks: a dense call
    _, seen = forced(model, jnp.zeros((1, 900), jnp.int32))
    sparse = model.config.sparse_config
    assert (np.asarray(seen["layers.0.block_ids"])[899, 0] >= 0).sum() == sparse.selected_blocks


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([1, 2], "must hold integers of shape"),
        ([[]], "must hold integers of shape"),
        ([[1.5]], "must hold integers of shape"),
        ([[5, 97]], "ids from 5 to 97; they must be in 0..96"),
        ([[-1, 3]], "ids from -1 to 3"),
    ],
)
def test_ids_that_are_none_are_refused(ids, message):
    model = hybridjax.load_model(GOLDENS / "dense", dtype="float32")
    with pytest.raises(ValueError, match=message):
        model(np.array(ids))
