"""Token files and training batches."""

import hashlib
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from hybridjax.errors import ConfigError
from hybridjax.training.corpus import split_corpus
from hybridjax.training.data import batch_at, load_prepared, prepare
from hybridjax.training.tokenizer import BOS, EOS, IM_END, IM_START


@pytest.fixture(scope="module")
def tokenizer(prepared):
    return Tokenizer.from_file(str(prepared.directory / "tokenizer.json"))


def pieces(tokens):
    """The documents of a token file, each with its first and last token."""
    return [p for p in np.split(tokens, np.flatnonzero(tokens == BOS)) if len(p)]


def test_each_document_starts_with_bos_and_ends_with_eos(prepared):
    for tokens in (prepared.train, prepared.heldout):
        for ids in pieces(tokens):
            assert ids[0] == BOS and ids[-1] == EOS
            assert np.count_nonzero(ids == BOS) == np.count_nonzero(ids == EOS) == 1


def test_token_files_hold_the_two_sides_of_the_split(prepared, documents, tokenizer):
    split = split_corpus(documents)
    plain = [ids for ids in pieces(prepared.train) if IM_START not in ids]
    found = [tokenizer.decode(ids[1:-1].tolist(), skip_special_tokens=False) for ids in plain]
    assert found == [d.text for d in split.train]
    assert prepared.text == b"".join(d.data for d in split.heldout)


def test_the_held_out_table_points_at_tokens_and_bytes(prepared, tokenizer):
    assert {d.source for d in prepared.documents} == {"code", "prose"}
    for d in prepared.documents:
        ids = prepared.heldout[d.token_start : d.token_start + d.tokens]
        text = tokenizer.decode(ids[1:-1].tolist(), skip_special_tokens=False)
        assert text.encode() == prepared.text[d.byte_start : d.byte_start + d.bytes]
    assert sum(d.tokens for d in prepared.documents) == len(prepared.heldout)
    assert sum(d.bytes for d in prepared.documents) == len(prepared.text)


def test_a_share_of_the_training_documents_appears_in_chat_form(prepared, documents, tokenizer):
    chats = [ids for ids in pieces(prepared.train) if IM_START in ids]
    assert len(chats) == prepared.info["train"]["chat"]["documents"]
    assert 0.1 < len(chats) / len(documents) < 0.4
    texts = "".join(d.text for d in split_corpus(documents).train)
    for ids in chats:
        text = tokenizer.decode(ids.tolist(), skip_special_tokens=False)
        _, user, assistant = text.split("<|im_start|>")
        assert user.startswith("user\n") and user.endswith("<|im_end|>\n")
        assert assistant.startswith("assistant\n") and assistant.endswith("<|im_end|>\n</s>")
        question = user.removeprefix("user\n").removesuffix("<|im_end|>\n")
        answer = assistant.removeprefix("assistant\n").removesuffix("<|im_end|>\n</s>")
        assert question + "\n" + answer in texts
        assert np.count_nonzero(ids == IM_END) == 2


def test_preparing_again_writes_the_same_bytes(prepared, documents, tmp_path):
    again = prepare(tmp_path, tmp_path, vocab_size=prepared.vocab_size, documents=documents[::-1][::-1])
    assert again.info == prepared.info
    for name, digest in again.info["sha256"].items():
        assert hashlib.sha256((tmp_path / name).read_bytes()).hexdigest() == digest


def test_the_manifest_hashes_every_document(prepared, documents):
    manifest = json.loads((prepared.directory / "manifest.json").read_text())
    known = {d.path: d for d in documents}
    assert len(manifest["documents"]) + len(manifest["dropped"]) == len(documents)
    for record in manifest["documents"]:
        data = known[record["path"]].data
        assert record["sha256"] == hashlib.sha256(data).hexdigest() and record["bytes"] == len(data)


@settings(max_examples=50, deadline=None)
@given(
    seed=st.integers(0, 2**31 - 1),
    step=st.integers(0, 10**6),
    rows=st.integers(1, 5),
    length=st.integers(1, 9),
)
def test_a_batch_depends_on_seed_and_step_alone(seed, step, rows, length):
    tokens = np.arange(5000, dtype=np.uint16)
    a, b = (batch_at(tokens, seed=seed, step=step, batch_size=rows, length=length) for _ in range(2))
    assert (a.inputs == b.inputs).all() and (a.targets == b.targets).all()
    assert a.inputs.shape == a.targets.shape == a.mask.shape == (rows, length) and a.mask.all()
    assert (a.targets == a.inputs + 1).all()


def test_batches_differ_between_steps_and_seeds():
    tokens = np.arange(5000, dtype=np.uint16)
    starts = {
        tuple(batch_at(tokens, seed=seed, step=step, batch_size=4, length=8).inputs[:, 0])
        for seed in range(5)
        for step in range(5)
    }
    assert len(starts) == 25


def test_windows_reach_the_last_token():
    tokens = np.arange(11, dtype=np.uint16)
    batch = batch_at(tokens, seed=0, step=0, batch_size=200, length=8)
    assert batch.targets.max() == 10 and batch.inputs.min() == 0


def test_a_stream_shorter_than_the_window_is_padded_and_masked():
    tokens = np.array([BOS, 7, 8, EOS], np.uint16)
    batch = batch_at(tokens, seed=0, step=0, batch_size=2, length=6)
    assert batch.inputs.tolist() == [[BOS, 7, 8, EOS, EOS, EOS]] * 2
    assert batch.mask.tolist() == [[True, True, True, False, False, False]] * 2


def test_a_directory_without_prepared_data_says_how_to_prepare_it(tmp_path):
    with pytest.raises(ConfigError, match="--prepare-data"):
        load_prepared(tmp_path)


def test_data_of_another_format_is_refused(tmp_path):
    (tmp_path / "data.json").write_text('{"format": 99}')
    with pytest.raises(ConfigError, match="format 99"):
        load_prepared(tmp_path)


def test_a_vocabulary_beyond_16_bits_is_refused(tmp_path, documents):
    with pytest.raises(ConfigError, match="65536"):
        prepare(tmp_path, tmp_path, vocab_size=70_000, documents=documents)
