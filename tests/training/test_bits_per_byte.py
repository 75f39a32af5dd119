"""Held-out figures count every token once, every byte once, and match a float64 computation."""

import lzma
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from training_fakes import VOCABULARY, Bigram

from hybridjax.training.data import HeldOutDocument
from hybridjax.training.evaluation import Evaluator, sliding_windows, xz_size
from hybridjax.training.parameters import ParameterLayout
from hybridjax.training.step import DataParallel, make_row_nats


def documents_of(*lengths):
    starts = np.cumsum([0, *lengths])
    return [HeldOutDocument(str(i), "code", int(s), n, 0, 1) for i, (s, n) in enumerate(zip(starts, lengths))]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(2, 70), min_size=1, max_size=4), st.sampled_from([2, 4, 8, 64]))
def test_every_token_but_the_first_is_scored_once_with_enough_context(lengths, window):
    tokens = np.arange(sum(lengths), dtype=np.uint16)
    documents = documents_of(*lengths)
    found = sliding_windows(tokens, documents, window)
    expected = [t for d in documents for t in range(d.token_start + 1, d.token_start + d.tokens)]
    assert found.targets[found.scored].tolist() == expected
    for row in range(len(found.document)):
        document = documents[found.document[row]]
        for place in np.flatnonzero(found.scored[row]):
            target = int(found.targets[row, place])
            context = found.inputs[row, : place + 1].tolist()
            assert context == list(range(target - place - 1, target))
            assert len(context) >= min(window // 2, target - document.token_start)


def test_a_uniform_model_needs_the_logarithm_of_the_vocabulary_per_token(prepared):
    evaluator = Evaluator(prepared, length=16, batch=3)
    report = evaluator(lambda inputs, targets, scored: scored.sum(axis=1) * math.log(VOCABULARY))
    for name in ("all", "code", "prose"):
        chosen = [d for d in prepared.documents if name in ("all", d.source)]
        tokens, size = sum(d.tokens - 1 for d in chosen), sum(d.bytes for d in chosen)
        assert report[name]["tokens"] == tokens and report[name]["bytes"] == size
        assert report[name]["bits_per_byte"] == pytest.approx(
            math.log2(VOCABULARY) * tokens / size, rel=1e-12
        )


def brute_force(model, prepared):
    """Bits per byte in float64, one document after the other, no windows: a bigram needs none."""
    embed, hidden, norm, head = (
        np.asarray(x[...], np.float64) for x in (model.embed_tokens, model.hidden, model.norm, model.lm_head)
    )
    bits = 0.0
    for d in prepared.documents:
        ids = prepared.heldout[d.token_start : d.token_start + d.tokens].astype(int)
        x = embed[ids[:-1]]
        logits = ((x + np.tanh(x @ hidden.T)) * norm) @ head.T
        logits -= logits.max(axis=1, keepdims=True)
        normaliser = np.log(np.exp(logits).sum(axis=1))
        bits += float((normaliser - logits[np.arange(len(x)), ids[1:]]).sum()) / math.log(2)
    return bits / len(prepared.text)


@pytest.mark.parametrize(("length", "batch"), [(16, 3), (64, 7), (2048, 1)])
def test_windows_and_batches_do_not_change_the_figure_of_a_float64_computation(prepared, length, batch):
    model = Bigram(VOCABULARY, seed=3)
    layout = ParameterLayout.of(model)
    row_nats = make_row_nats(layout, "float32", DataParallel(jax.devices()[:1]))
    tensors = layout.tensors(model)
    report = Evaluator(prepared, length=length, batch=batch)(lambda *rows: row_nats(tensors, *rows))
    assert report["all"]["bits_per_byte"] == pytest.approx(brute_force(model, prepared), rel=1e-6)


def test_documents_add_up_to_the_whole(prepared):
    evaluator = Evaluator(prepared, length=16, batch=4)
    report = evaluator(lambda inputs, targets, scored: (targets * scored).sum(axis=1), per_document=True)
    bits = sum(row["bits_per_byte"] * row["bytes"] for row in report["documents"].values())
    assert bits == pytest.approx(report["all"]["bits_per_byte"] * report["all"]["bytes"])
    assert len(report["documents"]) == report["all"]["documents"] == len(prepared.documents)


def test_xz_sees_the_same_bytes_grouped_the_same_way(prepared):
    report = Evaluator(prepared, length=16, batch=4)(lambda inputs, targets, scored: scored.sum(axis=1))
    for name in ("all", "code", "prose"):
        text = b"".join(
            prepared.text[d.byte_start : d.byte_start + d.bytes]
            for d in prepared.documents
            if name in ("all", d.source)
        )
        size = len(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME))
        assert report[name]["xz_bytes"] == size == xz_size(text)
        assert report[name]["xz_bits_per_byte"] == 8 * size / len(text)


def test_a_limit_takes_evenly_spaced_documents(prepared):
    evaluator = Evaluator(prepared, length=16, batch=4, limit=2)
    paths = [d.path for d in prepared.documents]
    assert [d.path for d in evaluator.documents] == [paths[0], paths[len(paths) // 2]]


def test_the_scores_are_of_the_cast_weights(prepared):
    model = Bigram(VOCABULARY)
    layout = ParameterLayout.of(model)
    tensors = layout.tensors(model)
    rounded = {k: v.astype(jnp.bfloat16).astype(jnp.float32) for k, v in tensors.items()}
    row_nats = make_row_nats(layout, "bfloat16", DataParallel(jax.devices()[:1]))
    rows = (np.full((1, 4), 5, np.int32), np.full((1, 4), 6, np.int32), np.ones((1, 4), bool))
    assert row_nats(tensors, *rows).tolist() == row_nats(rounded, *rows).tolist()
