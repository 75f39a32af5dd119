"""The needle test's texts and counts, on a model that copies perfectly."""

import dataclasses

import numpy as np
import pytest

from benchmarks import needle
from benchmarks.needle import Score, compose, measure, piece
from hybridjax.training.data import HeldOutDocument


def encode(text):
    return np.frombuffer(text.encode(), np.uint8).astype(np.int32)


def filler(rng, length):
    return rng.integers(1000, 2000, length).astype(np.int32)


def copier(text, count):
    """Finds the last earlier place of the 4 tokens before the answer and goes on as it goes on there."""
    asked, answer = text[-count - 4 : -count], text[-count:]
    ends = [i + 4 for i in range(len(text) - count - 4) if (text[i : i + 4] == asked).all()]
    guess = text[ends[-1] : ends[-1] + count] if ends else np.full(count, -1)
    return Score.of(answer, np.where(guess == answer, 0.0, -5.0), guess)


def test_a_needle_takes_the_place_of_as_much_filler():
    base, end = np.arange(20), np.array([90, 91])
    assert compose(base, None, 0.5, end).tolist() == [*range(18), 90, 91]
    for depth, first in ((0.0, 0), (0.5, 7), (1.0, 15)):
        got = compose(base, np.array([80, 81, 82]), depth, end)
        assert got.tolist() == [*range(first), 80, 81, 82, *range(first + 3, 18), 90, 91]
    assert base.tolist() == list(range(20))


def test_right_tokens_count_in_a_row_from_the_first_on():
    score = Score.of(np.array([5, 6, 7, 8]), [-1, -2, -3, -6], [5, 6, 0, 8])
    assert dataclasses.astuple(score) == (-3.0, 4, 3, 2)
    assert Score.of(np.array([5, 6]), [-1, -1], [0, 6]).in_a_row == 0


@pytest.mark.parametrize("question", needle.QUESTIONS)
def test_a_model_that_copies_finds_every_needle_and_no_other(question):
    rows = list(measure(copier, encode, filler, 200, question, 5))
    assert [row["depth"] for row in rows] == list(needle.DEPTHS)
    for row in rows:
        assert row["trials"] == 5
        assert row["with"] == {"nats": 0, "right": row["tokens"], "in_a_row": row["tokens"]}
        assert row["without"] == {"nats": -5, "right": 0, "in_a_row": 0}
        # Another word shares the space or quote in front, and here and there a letter.
        assert row["another"]["in_a_row"] < 0.5 * row["tokens"]
        assert 2.5 < row["gain"] <= 5 and row["gain_error"] > 0
        assert "found +" in needle.shown(row)


def test_one_trial_has_no_error_to_show():
    row = next(measure(copier, encode, filler, 200, "prose", 1))
    assert row["gain_error"] is None and "+-" not in needle.shown(row)


def test_words_are_pronounceable_and_differ():
    rng = np.random.default_rng(0)
    words = {needle.random_word(rng) for _ in range(100)}
    assert len(words) == 100
    assert all(len(w) == 8 and set(w[1::2]) <= set("aeiou") for w in words)


def test_pieces_lie_within_one_document_that_is_long_enough():
    lengths, start, documents = [30, 200, 120], 0, []
    for i, n in enumerate(lengths):
        documents.append(HeldOutDocument(str(i), "code", start, n, 0, 0))
        start += n
    data = type("Data", (), {"documents": tuple(documents), "heldout": np.arange(start, dtype=np.uint16)})()
    seen = set()
    for seed in range(200):
        got = piece(np.random.default_rng(seed), 118, data)
        assert got.tolist() == list(range(got[0], got[0] + 118)) and got.dtype == np.int32
        seen.add(int(got[0]))
    # Between <s> and </s>: 231 alone in the third document, 31 to 111 in the second.
    assert max(seen) == 231 and {s for s in seen if s < 231} <= set(range(31, 112)) and len(seen) > 40
    with pytest.raises(SystemExit, match="no held-out document has 199 tokens"):
        piece(np.random.default_rng(0), 199, data)
    assert piece(np.random.default_rng(0), 198, data)[0] == 31
