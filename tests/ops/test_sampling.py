import dataclasses
import re

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from hybridjax.ops import sampling
from hybridjax.ops.sampling import (
    SamplingRows,
    gumbel_noise,
    init_sampler_state,
    neutral_rows,
    record_tokens,
    reset_slot,
    sample,
    sample_reference,
    seed_words,
    write_masks,
)
from hybridjax.serving.api import MAX_TOP_LOGPROBS

VOCAB = 50
SLOTS = 5
run = jax.jit(sample)
noise_of = jax.jit(gumbel_noise, static_argnums=2)


def rows_of(*settings_per_row: dict) -> SamplingRows:
    rows = jax.tree.map(lambda x: np.array(x), neutral_rows(len(settings_per_row)))
    for i, row in enumerate(settings_per_row):
        for name, value in row.items():
            getattr(rows, name)[i] = seed_words(value) if name == "seed" else value
    return jax.tree.map(jnp.asarray, rows)


def call(logits, rows, *, state=None, slot=None, positions=None, stop=None, min_position=None):
    count = len(logits)
    state = init_sampler_state(SLOTS, logits.shape[1]) if state is None else state
    zeros = np.zeros(count, np.int32)
    return run(
        jnp.asarray(logits, jnp.float32),
        rows,
        state,
        jnp.asarray(zeros if slot is None else slot, jnp.int32),
        jnp.asarray(zeros if positions is None else positions, jnp.int32),
        jnp.full((count, 8), -1, jnp.int32) if stop is None else jnp.asarray(stop, jnp.int32),
        jnp.asarray(zeros if min_position is None else min_position, jnp.int32),
    )


def packed(allowed: np.ndarray) -> np.ndarray:
    """uint32[B, ceil(V / 32)] of bool[B, V], as plain as can be."""
    words = np.zeros((len(allowed), -(-allowed.shape[1] // 32)), np.uint32)
    for row, token in zip(*np.nonzero(allowed)):
        words[row, token // 32] |= np.uint32(1 << (token % 32))
    return words


def logits_of(seed: int, count: int, vocab: int = VOCAB) -> np.ndarray:
    return np.random.default_rng(seed).normal(scale=2, size=(count, vocab)).astype(np.float32)


def test_constants_agree_with_the_front_door():
    assert sampling.MAX_TOP_LOGPROBS == MAX_TOP_LOGPROBS


def test_greedy_takes_the_lowest_id_of_equal_maxima():
    logits = np.zeros((2, VOCAB), np.float32)
    logits[0, [7, 9]] = 3
    tokens, _ = call(logits, neutral_rows(2))
    assert tokens.tolist() == [7, 0]
    assert tokens.dtype == jnp.int32


filters = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 1e-6, 0.3, 1.0, 2.5]),
        "top_k": st.sampled_from([0, 1, 2, 7, VOCAB - 1, VOCAB, VOCAB + 10, 2**31 - 1]),
        "top_p": st.sampled_from([0.0, 0.1234, 0.5067, 0.90123, 1.0]),
        "min_p": st.sampled_from([0.0, 0.0123, 0.2345, 1.0]),
        "seed": st.integers(-(2**63), 2**63 - 1),
        "repetition_penalty": st.sampled_from([1.0, 0.5, 1.75]),
        "presence_penalty": st.sampled_from([0.0, -0.5, 1.25]),
        "frequency_penalty": st.sampled_from([0.0, 0.75]),
        "use_bias": st.booleans(),
        "use_mask": st.booleans(),
    }
)


@settings(max_examples=150)
@given(st.lists(filters, min_size=4, max_size=4), st.integers(0, 2**32 - 1), st.integers(0, 2**31 - 1))
def test_agrees_with_the_reference(settings_per_row, data_seed, position):
    rng = np.random.default_rng(data_seed)
    # Halves make ties common; margins at the filters' borders stay far above float32 rounding.
    logits = (rng.integers(-8, 8, (4, VOCAB)) / 2).astype(np.float32)
    counts = rng.integers(0, 3, (SLOTS, VOCAB)).astype(np.int32)
    seen = rng.random((SLOTS, VOCAB)) < 0.3
    bias = (rng.integers(-4, 4, (SLOTS, VOCAB)) / 2).astype(np.float32)
    allowed = rng.random((SLOTS, VOCAB)) < 0.6
    stop = np.full((4, 8), -1, np.int32)
    stop[:, :3] = rng.integers(0, VOCAB, (4, 3))
    slot = rng.permutation(SLOTS - 1)[:4] + 1
    min_position = np.array([0, position, min(position + 1, 2**31 - 1), 2**31 - 1])
    state = dataclasses.replace(
        init_sampler_state(SLOTS, VOCAB),
        output_counts=jnp.asarray(counts),
        prompt_seen=jnp.asarray(seen),
        logit_bias=jnp.asarray(bias),
        token_mask=jnp.asarray(packed(allowed)),
    )
    tokens, _ = call(
        logits,
        rows_of(*settings_per_row),
        state=state,
        slot=slot,
        positions=[position] * 4,
        stop=stop,
        min_position=min_position,
    )
    for i, row in enumerate(settings_per_row):
        row = dict(row)
        words = jnp.array(seed_words(row.pop("seed")), jnp.uint32)
        noise = np.asarray(noise_of(words, jnp.int32(position), VOCAB), np.float64)
        use_bias, use_mask = row.pop("use_bias"), row.pop("use_mask")
        expected = sample_reference(
            logits[i],
            noise,
            **row,
            prompt_seen=seen[slot[i]],
            output_counts=counts[slot[i]],
            bias=bias[slot[i]] if use_bias else None,
            allowed=allowed[slot[i]] if use_mask else None,
            forbidden=tuple(stop[i, :3]) if position < min_position[i] else (),
        )
        assert tokens[i] == expected


kept = jax.jit(lambda x, rows: sampling._ranked_filter(x - x.max(-1, keepdims=True), rows))


@settings(max_examples=150)
@given(
    st.lists(st.integers(-6, 6), min_size=12, max_size=12),
    st.integers(0, 14),
    st.sampled_from([0.0, 0.0517, 0.3331, 0.7003, 0.9909, 1.0]),
)
def test_filter_sets_agree_with_the_reference(halves, top_k, top_p):
    x = np.array(halves, np.float32)[None] / 2
    mask = kept(jnp.asarray(x), rows_of({"top_k": top_k, "top_p": top_p}))
    expected = sampling.filter_reference(x[0].astype(np.float64), top_k=top_k, top_p=top_p)
    assert np.flatnonzero(mask[0]).tolist() == expected.tolist()


def test_filter_reference_by_hand():
    x = np.log([0.1, 0.4, 0.1, 0.4])
    assert sampling.filter_reference(x, top_k=3).tolist() == [0, 1, 3]
    assert sampling.filter_reference(x, top_p=0.3).tolist() == [1]
    assert sampling.filter_reference(x, top_p=0.5).tolist() == [1, 3]
    assert sampling.filter_reference(x, top_p=0).tolist() == [1]
    assert sampling.filter_reference(x, min_p=0.5).tolist() == [1, 3]
    assert sampling.filter_reference(x, top_k=2, top_p=0.5).tolist() == [1], "top_p of what top_k left"


@pytest.mark.parametrize(
    ("row", "allowed"),
    [
        ({}, [0, 1, 2, 3, 4]),
        ({"temperature": 0.5}, [0, 1, 2, 3, 4]),
        ({"top_k": 3}, [0, 1, 2]),
        ({"top_p": 0.6}, [0, 1]),
        ({"min_p": 0.3}, [0, 1, 2]),
    ],
)
def test_distribution(row, allowed):
    """Pearson's statistic over 4000 draws stays below the 1e-4 quantile of chi-square with 4 degrees."""
    probability = np.array([0.4, 0.25, 0.2, 0.1, 0.05])
    draws = 4000
    rows = rows_of(*[{"temperature": 1.0, "seed": 7, **row}] * draws)
    logits = np.broadcast_to(np.log(probability), (draws, 5))
    tokens, _ = call(logits, rows, positions=np.arange(draws))
    expected = probability ** (1 / row.get("temperature", 1.0))
    expected = np.array([p if i in allowed else 0 for i, p in enumerate(expected)])
    expected = draws * expected / expected.sum()
    observed = np.bincount(tokens, minlength=5)
    assert observed[expected == 0].sum() == 0
    nonzero = expected > 0
    statistic = np.sum((observed - expected)[nonzero] ** 2 / expected[nonzero])
    assert statistic < 23.5


def test_seeds_make_different_streams():
    logits = np.zeros((64, VOCAB), np.float32)
    rows = rows_of(*[{"temperature": 1.0, "seed": s} for s in range(-32, 32)])
    tokens, _ = call(logits, rows)
    assert len(set(tokens.tolist())) > 20
    words = {seed_words(s) for s in (-(2**63), -1, 0, 1, 2**32, 2**63 - 1)}
    assert len(words) == 6
    assert seed_words(-1) == (2**32 - 1, 2**32 - 1)


def test_stream_does_not_depend_on_batch_slot_or_neighbours():
    logits = logits_of(0, 6)
    mine = {"temperature": 0.8, "seed": 2**40 + 3, "min_p": 0.01}
    alone, _ = call(logits[:1], rows_of(mine), positions=[77])
    others = [
        {"temperature": 1.3, "top_k": 3, "seed": 5},
        {"repetition_penalty": 1.5},
        {"temperature": 1.0, "top_p": 0.5},
        {},
        {"temperature": 1.0, "presence_penalty": 1.0, "want_top": True},
    ]
    for place in range(6):
        order = [*range(1, place + 1), 0, *range(place + 1, 6)]
        rows = rows_of(*[mine if i == 0 else others[i - 1] for i in order])
        positions = [77 if i == 0 else i for i in order]
        tokens, _ = call(logits[order], rows, positions=positions, slot=[i % SLOTS for i in order])
        assert tokens[place] == alone[0]


def test_positions_make_different_draws():
    rows = rows_of(*[{"temperature": 1.0, "seed": 1}] * 64)
    tokens, _ = call(np.zeros((64, VOCAB), np.float32), rows, positions=np.arange(64))
    assert len(set(tokens.tolist())) > 20


def test_tiny_temperature_stays_finite():
    logits = np.array([[-3e38, 3e38, 1.0, 3e38]], np.float32)
    for temperature in (1e-40, 1e-30, 1e-5, 1e-4):
        tokens, _ = call(logits, rows_of({"temperature": temperature, "top_p": 0.9}))
        assert tokens[0] in (1, 3)


def test_stop_tokens_are_suppressed_below_the_minimum_only():
    logits = np.zeros((3, VOCAB), np.float32)
    logits[:, 4], logits[:, 9], logits[:, 2] = 3, 2, 1
    stop = np.full((3, 8), -1)
    stop[:, :2] = [4, 9]
    tokens, _ = call(logits, neutral_rows(3), positions=[9, 10, 11], min_position=[10] * 3, stop=stop)
    assert tokens.tolist() == [2, 4, 4]


def test_logprobs_are_of_the_raw_distribution():
    logits = logits_of(3, 2)
    reference = np.asarray(jax.nn.log_softmax(logits, axis=-1))
    rows = rows_of({"temperature": 0.7, "top_k": 2, "seed": 1, "want_top": True}, {"frequency_penalty": 1.0})
    tokens, logprobs = call(logits, rows)
    np.testing.assert_allclose(logprobs.sampled, reference[np.arange(2), tokens], rtol=1e-5)
    order = np.argsort(-reference[0], kind="stable")[:MAX_TOP_LOGPROBS]
    assert logprobs.top_ids[0].tolist() == order.tolist()
    np.testing.assert_allclose(logprobs.top_logprobs[0], reference[0][order], rtol=1e-5)


def test_top_logprobs_of_a_small_vocabulary_are_padded():
    _, logprobs = call(logits_of(4, 1, vocab=3), rows_of({"want_top": True}))
    assert logprobs.top_ids.shape == (1, MAX_TOP_LOGPROBS)
    assert sorted(logprobs.top_ids[0, :3].tolist()) == [0, 1, 2]
    assert logprobs.top_ids[0, 3:].tolist() == [-1] * (MAX_TOP_LOGPROBS - 3)
    assert np.all(np.asarray(logprobs.top_logprobs[0, 3:]) == -np.inf)


def test_reset_and_record():
    state = init_sampler_state(SLOTS, VOCAB)
    state = jax.jit(record_tokens)(
        state, jnp.array([2, 3, 4]), jnp.array([7, 7, -1]), jnp.array([True, True, False])
    )
    state = jax.jit(record_tokens)(
        state, jnp.array([2, 3, 4]), jnp.array([7, 1, 5]), jnp.array([True, False, True])
    )
    assert state.last_token[2:].tolist() == [7, 7, 5]
    assert state.output_counts[2, 7] == 2
    assert state.output_counts[3].sum() == 1
    before = jax.tree.map(np.asarray, state)
    state = jax.jit(reset_slot)(
        state, jnp.int32(2), jnp.array([4, 4, 9, -1, -1]), jnp.array([3, -1]), jnp.array([1.5, 9.0])
    )
    assert np.flatnonzero(state.prompt_seen[2]).tolist() == [4, 9]
    assert state.output_counts[2].sum() == 0
    assert state.logit_bias[2, 3] == 1.5
    assert jnp.sum(jnp.abs(state.logit_bias)) == 1.5
    for name in ("output_counts", "prompt_seen", "logit_bias"):
        np.testing.assert_array_equal(getattr(state, name)[3:], getattr(before, name)[3:])


def test_rows_without_penalties_never_see_stale_slots_or_slot_zero():
    state = init_sampler_state(SLOTS, VOCAB)
    state = dataclasses.replace(
        state,
        output_counts=state.output_counts.at[:].set(1000),
        logit_bias=state.logit_bias.at[:].set(jnp.nan),
    )
    logits = logits_of(5, 2)
    clean, _ = call(logits, neutral_rows(2))
    rows = rows_of({}, {"presence_penalty": 2.0})
    tokens, _ = call(logits, rows, state=state, slot=[0, 1])
    assert tokens[0] == clean[0]


def test_masked_rows_sample_what_is_allowed_with_the_raw_log_probability():
    logits = np.zeros((3, VOCAB), np.float32)
    logits[:, 10], logits[:, 20], logits[:, 30] = 9, 8, -7
    allowed = np.zeros((SLOTS, VOCAB), bool)
    allowed[1, [20, 30]] = allowed[2, 30] = True
    masks = jax.jit(write_masks)(
        init_sampler_state(SLOTS, VOCAB).token_mask, jnp.array([2, 1, 0]), packed(allowed[[2, 1, 0]])
    )
    state = dataclasses.replace(init_sampler_state(SLOTS, VOCAB), token_mask=masks)
    for temperature in (0.0, 0.5):
        row = {"temperature": temperature, "use_mask": True, "top_k": 1 if temperature else 0}
        rows = rows_of(row, row, row | {"use_mask": False})
        tokens, logprobs = call(logits, rows, state=state, slot=[1, 2, 3])
        assert tokens.tolist() == [20, 30, 10]
        raw = logits[0] - np.log(np.exp(logits[0]).sum())
        np.testing.assert_allclose(logprobs.sampled, raw[[20, 30, 10]], rtol=1e-5)


def outside_conditionals(jaxpr) -> set[str]:
    names = set()
    for equation in jaxpr.eqns:
        names.add(equation.primitive.name)
        if equation.primitive.name != "cond" and "jaxpr" in equation.params:
            names |= outside_conditionals(equation.params["jaxpr"])
    return names


def test_work_that_no_row_needs_is_behind_conditionals():
    """The sort, the noise and the top tokens appear in the program only inside cond branches."""
    args = (jnp.zeros((2, VOCAB)), neutral_rows(2), init_sampler_state(SLOTS, VOCAB))
    ints = jnp.zeros(2, jnp.int32)
    jaxpr = jax.make_jaxpr(sample)(*args, ints, ints, jnp.full((2, 8), -1, jnp.int32), ints)
    costly = {"shift_right_logical", "sort", "random_bits", "random_fold_in", "top_k", "cumsum", "scatter"}
    assert not outside_conditionals(jaxpr) & costly
    assert costly <= set(re.findall(r"\w+", str(jaxpr)))


def test_greedy_rows_under_masks_draw_no_noise_and_get_the_same_tokens(monkeypatch):
    rng = np.random.default_rng(3)
    logits = rng.integers(-3, 3, (3, VOCAB)).astype(np.float32)  # with ties
    allowed = rng.random((SLOTS, VOCAB)) < 0.2
    masks = write_masks(init_sampler_state(SLOTS, VOCAB).token_mask, jnp.arange(SLOTS), packed(allowed))
    state = dataclasses.replace(init_sampler_state(SLOTS, VOCAB), token_mask=masks)
    row = {"use_mask": True, "top_k": 3, "top_p": 0.5, "want_top": True}
    greedy, mixed = rows_of(row, row, row), rows_of(row, row, row | {"temperature": 1.0})
    ints = {name: jnp.array(value, jnp.int32) for name, value in (("slot", [1, 2, 3]), ("zeros", [0] * 3))}
    rest = ints["slot"], ints["zeros"], jnp.full((3, 8), -1, jnp.int32), ints["zeros"]

    def nobody(adjusted, rows, positions):
        return jnp.full(adjusted.shape[0], -1, jnp.int32)

    with_noise = jax.jit(sample)(logits, mixed, state, *rest)
    monkeypatch.setattr(sampling, "_draw", nobody)
    patched = jax.jit(lambda *args: sample(*args))
    without = patched(logits, greedy, state, *rest)
    want = np.where(allowed[1:4], logits, -np.inf).argmax(axis=1)
    np.testing.assert_array_equal(without[0], want)
    for one, other in zip(jax.tree.leaves(without), jax.tree.leaves(with_noise), strict=True):
        np.testing.assert_array_equal(one[:2], other[:2])
    assert patched(logits, mixed, state, *rest)[0].tolist() == [-1] * 3, "one random row draws for all"
