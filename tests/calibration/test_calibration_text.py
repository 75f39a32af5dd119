"""Text files become samples that hold all of the text, and batches of few shapes."""

import json

import numpy as np
import pytest

from hybridjax.calibration.text import Sample, batches, cut, evenly, hold_out, read_documents
from hybridjax.checkpoints import load_tokenizer
from hybridjax.errors import ConfigError


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer("tiny-sala")


def joined(samples, tokenizer):
    return tokenizer.decode([int(i) for sample in samples for i in sample.ids[1:]])


def test_plain_text_is_cut_between_paragraphs_and_nothing_is_lost(tmp_path, tokenizer):
    text = "\n\n".join(f"Paragraph {i}. " + "It says something. " * (i % 5) for i in range(60)) + "\n"
    (tmp_path / "a.txt").write_text(text)
    documents = read_documents(tmp_path / "a.txt", tokenizer)
    samples = cut(documents, tokenizer, 96)
    assert len(documents) == 60
    assert joined(samples, tokenizer) == text
    assert sum(sample.bytes for sample in samples) == len(text.encode())
    assert all(len(sample.ids) <= 96 and sample.ids[0] == tokenizer.bos_token_id for sample in samples)
    starts = [tokenizer.decode(sample.ids[1:].tolist()) for sample in samples]
    assert all(start.startswith("Paragraph") for start in starts)
    assert np.mean([len(sample.ids) for sample in samples]) > 60


def test_a_long_document_is_cut_where_the_length_says(tmp_path, tokenizer):
    text = "Ein Wort für jedes Ding. " * 200
    (tmp_path / "a.txt").write_text(text)
    samples = cut(read_documents(tmp_path / "a.txt", tokenizer), tokenizer, 128)
    assert [len(sample.ids) for sample in samples[:-1]] == [128] * (len(samples) - 1)
    assert joined(samples, tokenizer) == text
    assert sum(sample.bytes for sample in samples) == len(text.encode())


def test_lengths_may_be_spread_on_a_logarithmic_scale(tmp_path, tokenizer):
    (tmp_path / "a.txt").write_text("def f(x): return x + 1\n" * 9000)
    samples = cut(read_documents(tmp_path / "a.txt", tokenizer), tokenizer, 4096, lengths="log-uniform")
    lengths = np.array([len(sample.ids) for sample in samples[:-1]])
    assert lengths.min() >= 512 and lengths.max() <= 4096
    middle = np.mean(lengths < (512 * 4096) ** 0.5)
    assert 0.4 < middle < 0.6
    assert lengths.max() > 3500 and lengths.min() < 600


def test_json_lines_hold_text_or_conversations(tmp_path, tokenizer):
    turns = [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "Because."}]
    messages = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because."}]
    rows = [{"text": "plain\u2028text"}, {"conversations": turns}, {"messages": messages}]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n\n")
    plain, first, second = read_documents(tmp_path / "a.jsonl", tokenizer)
    assert tokenizer.decode(plain) == "plain\u2028text"
    assert first == second
    assert first == tokenizer.encode(
        tokenizer.render_chat(messages, add_generation_prompt=False), add_special_tokens=False
    )


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"", "a.txt: holds no text"),
        ("a.txt", b" \n\n \n", "a.txt: holds no text"),
        ("a.txt", b"\xff\xfe\x00", "a.txt: cannot be read as text"),
        ("a.jsonl", b'{"text": "a"}\n{"text"', "a.jsonl, line 2: not JSON"),
        ("a.jsonl", b'{"text": "a"}\n\n{"txt": "b"}', "a.jsonl, line 3: must be an object with text"),
        ("a.jsonl", b'{"conversations": [{"from": "human"}]}', "a.jsonl, line 1: must be an object"),
        ("a.jsonl", b"[1]", "a.jsonl, line 1: must be an object"),
    ],
)
def test_files_that_cannot_be_used_are_named(tmp_path, tokenizer, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        read_documents(tmp_path / name, tokenizer)


def test_a_missing_file_is_named(tmp_path, tokenizer):
    with pytest.raises(ConfigError, match="b.txt: cannot be read"):
        read_documents(tmp_path / "b.txt", tokenizer)


def samples_of(*lengths):
    return [Sample(np.arange(1, n + 1, dtype=np.int32), n) for n in lengths]


def test_batches_have_few_shapes_and_every_token_once():
    samples = samples_of(3, 64, 65, 100, 200, 10, 128, 5)
    found = batches(samples, tokens=256)
    assert {batch.ids.shape for batch in found} == {(4, 64), (2, 128), (1, 256)}
    rows = [
        row[:length].tolist() for batch in found for row, length in zip(batch.ids, batch.lengths) if length
    ]
    assert sorted(rows) == sorted(sample.ids.tolist() for sample in samples)


def test_padding_has_position_minus_one():
    (batch,) = batches(samples_of(3, 60))
    whole = batch.whole()
    positions = np.asarray(whole.positions).reshape(2, 64)
    assert positions[0].tolist() == [0, 1, 2] + [-1] * 61
    assert positions[1].tolist() == [*range(60), -1, -1, -1, -1]
    assert whole.whole_length == 64 and np.asarray(whole.context_length).tolist() == [3, 60]
    assert batch.live.tolist() == (positions.reshape(-1) >= 0).tolist()


def test_the_last_tenth_is_held_out():
    known, held = hold_out(samples_of(*range(2, 32)))
    assert len(held) == 3 and len(known) == 27
    with pytest.raises(ConfigError, match="too short to hold a part of it out"):
        hold_out(samples_of(5))


def test_evenly_spaced():
    assert evenly(range(10), 3) == [0, 3, 6]
    assert evenly(range(3), 5) == [0, 1, 2]


def test_a_byte_order_mark_is_no_text(tmp_path, tokenizer):
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "Some words."}) + "\n", encoding="utf-8-sig")
    assert [tokenizer.decode(ids) for ids in read_documents(tmp_path / "a.jsonl", tokenizer)] == [
        "Some words."
    ]


def test_nul_characters_are_no_text(tmp_path, tokenizer):
    (tmp_path / "a.txt").write_text("a\0b")
    with pytest.raises(ConfigError, match="a.txt: holds NUL characters"):
        read_documents(tmp_path / "a.txt", tokenizer)
