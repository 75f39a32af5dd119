"""Recorded answers of transformers 5.24.0 to a prompt with one tied selection, and damaged copies of them."""

import ast
from pathlib import Path

import comparison
import jax.numpy as jnp
import numpy as np
import pytest
from comparison import DIFFERS, TIE, Answers, InteropError, Prompt, compare_prompt, settle_ties
from safetensors.numpy import load_file

import hybridjax

HERE = Path(__file__).parent
NEW, VOCAB = 4, 256
TIED = (7, 36)  # layer, row


@pytest.fixture(scope="module")
def model():
    return hybridjax.load_model(HERE.parent / "goldens" / "qwen4_exp" / "text_no_ple", dtype="float32")


@pytest.fixture
def tensors():
    return {name: value.copy() for name, value in load_file(HERE / "answers.safetensors").items()}


def row_of(model, tensors, *, engine=None, tolerance=2e-4, encoded=None):
    if encoded is not None:
        tensors["0.encoded"] = np.asarray(encoded)
    answers = Answers(tensors, 0, NEW, VOCAB)
    prompt = Prompt("recorded", tuple(tensors["0.ids"].tolist()))
    return compare_prompt(model, prompt, answers, engine, {}, tolerance=tolerance, rounding=1e-5)


def test_a_tie_explains_the_one_row_that_differs(model, tensors):
    row = row_of(model, tensors, engine=tensors["0.tokens"].tolist())
    assert row["result"] == TIE
    assert (row["rows"], row["rows_over"], row["ties_exact"], row["ties_near"]) == (44, 1, 1, 0)
    assert row["max_error"] > 1e-3 > 2e-5 > row["max_error_ties_aside"]
    assert row["greedy"] == {"new_tokens": NEW, "model": NEW, "engine": NEW}
    assert row["notes"] == ["(layer, row) where the last place of a selection is a tie: (7, 36)"]


def test_logits_that_differ_elsewhere_are_no_tie(model, tensors):
    tensors["0.logits"][11, 3] += 0.1
    row = row_of(model, tensors)
    assert row["result"] == DIFFERS
    assert row["notes"][0] == "rows beyond the tolerance, ties aside: 11"


def test_logits_that_differ_at_the_tie_by_something_else_are_seen(model, tensors):
    tensors["0.logits"][TIED[1], 3] += 0.1
    assert row_of(model, tensors)["result"] == DIFFERS


def test_nan_is_beyond_every_tolerance(model, tensors):
    tensors["0.steps"][1, 0] = np.nan
    row = row_of(model, tensors, tolerance=1e9)
    assert row["result"] == DIFFERS
    assert "ties aside: 41" in row["notes"][0]


def test_another_selection_without_a_tie_is_a_fault(model, tensors):
    row, ratio = 43, 4
    bits = np.unpackbits(tensors["0.selected.3"], axis=1, bitorder="little")
    blocks = bits[row, :44].reshape(-1, ratio)
    listed = np.flatnonzero(blocks[:, 0])
    missing = np.setdiff1d(np.arange(11), listed)
    blocks[listed[0]], blocks[missing[0]] = 0, 1
    tensors["0.selected.3"] = np.packbits(bits, axis=1, bitorder="little")
    out = row_of(model, tensors)
    assert out["result"] == DIFFERS
    assert "without a tie: (3, 43)" in out["notes"][0]


def test_a_greedy_token_that_is_neither_near_nor_tied(model, tensors):
    tokens = tensors["0.tokens"].tolist()
    other = [*tokens[:2], (tokens[2] + 1) % VOCAB, tokens[3]]
    row = row_of(model, tensors, engine=other)
    assert row["result"] == DIFFERS and row["greedy"]["engine"] == 2
    assert any("greedy token 2 (engine)" in note and "UNEXPLAINED" in note for note in row["notes"])
    assert "the engine's own continuation is not what the model prefers" in row["notes"]


def test_a_near_tie_of_logits_is_reported_and_no_fault(model, tensors):
    tokens = tensors["0.tokens"].tolist()
    second = int(np.argsort(tensors["0.steps"][3])[-2])
    row = row_of(model, tensors, engine=[*tokens[:3], second], tolerance=0.5)
    assert row["result"] == TIE
    assert any(f"{second} instead of {tokens[3]}" in n and n.endswith("near-tie") for n in row["notes"])


def test_tokenizers_that_disagree(model, tensors):
    ids = tensors["0.ids"].tolist()
    assert row_of(model, tensors, encoded=ids)["result"] == TIE
    row = row_of(model, tensors, encoded=ids[1:])
    assert row["result"] == DIFFERS and "the tokenizers give different ids" in row["notes"]


def test_the_model_selects_as_ever_afterwards(model, tensors):
    select = comparison.indexed_attention.select_index_blocks
    row_of(model, tensors)
    assert comparison.indexed_attention.select_index_blocks is select


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("0.logits", None, "the answers lack 0.logits"),
        ("0.tokens", np.zeros((3,), np.int64), r"0.tokens is int64\[3\]; expected \(4,\)"),
        ("0.steps", np.zeros((4, 256), np.int64), "0.steps is int64"),
        ("0.logits", np.zeros((41, 255), np.float32), r"0.logits is float32\[41, 255\]"),
        ("0.selected.3", np.zeros((44, 5), np.uint8), r"0.selected.3 is uint8\[44, 5\]"),
    ],
)
def test_incomplete_answers(tensors, name, value, message):
    tensors = {k: v for k, v in tensors.items() if k != name} | ({} if value is None else {name: value})
    with pytest.raises(InteropError, match=message):
        Answers(tensors, 0, NEW, VOCAB)


@pytest.mark.parametrize(
    ("scores", "theirs", "position", "kind"),
    [
        ([3.0, 0.0, 0.0, 1.0], [1, 0, 1, 0], 15, "exact"),
        ([3.0, 1.0, 1.00001, 1.0], [1, 0, 1, 0], 15, "near"),
        ([3.0, 1.0, 1.1, 1.0], [1, 0, 1, 0], 15, "fault"),
        ([3.0, 0.0, 0.0, 1.0], [1, 0, 0, 0], 15, "fault"),  # a block is missing
        ([3.0, 0.0, 0.0, 1.0], [1, 0, 1, 0], 10, "fault"),  # block 2 is not complete
        ([3.0, 0.0, 0.0, 1.0], [1, 1, 0, 0], 15, None),
    ],
)
def test_what_counts_as_a_tie(scores, theirs, position, kind):
    found = settle_ties(
        jnp.asarray([[1, 1, 0, 0]], bool),
        jnp.asarray([theirs], bool),
        jnp.asarray([scores], jnp.float32),
        jnp.asarray([position], jnp.int32),
        4,
        np.float32(1e-5),
    )
    assert [name for name, flag in zip(("exact", "near", "fault"), found) if flag[0]] == [kind] * bool(kind)


def test_agreement_counts_equal_tokens_at_the_start():
    assert comparison.agreement([1, 2, 3], [1, 2, 3]) == 3
    assert comparison.agreement([1, 5, 3], [1, 2, 3]) == 1


def test_the_other_side_imports_nothing_of_this_one_and_runs_no_foreign_code():
    source = (HERE.parent.parent / "interop" / "transformers_answers.py").read_text()
    tree = ast.walk(ast.parse(source))
    names = set()
    for node in tree:
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module.partition(".")[0])
    assert names <= {"json", "os", "sys", "pathlib", "safetensors", "torch", "transformers"}
    assert '"trust_remote_code": False' in source and source.count("trust_remote_code") == 1
    assert "use_safetensors=True" in source
