"""The trained tokenizer is lossless, deterministic and good at indentation."""

import json

import jinja2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from hybridjax.errors import ConfigError
from hybridjax.training.tokenizer import (
    BOS,
    EOS,
    IM_END,
    IM_START,
    SPECIAL_TOKENS,
    encode_plain,
    save_tokenizer,
    train_tokenizer,
)

TEXT = (
    "def f(x):\n        return x + 1\n\n    def g(y):\n        return self.x\n" * 20
    + "And the man said, Let it be; and it was so.\n" * 20
)


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([TEXT], 400)


def decoded(tokenizer, ids):
    return tokenizer.decode(ids, skip_special_tokens=False)


@settings(max_examples=200, deadline=None)
@given(st.text())
def test_any_text_round_trips(tokenizer, text):
    assert decoded(tokenizer, encode_plain(tokenizer, [text])[0]) == text


@settings(max_examples=100, deadline=None)
@given(st.binary())
def test_any_byte_values_round_trip_as_latin_1_text(tokenizer, data):
    text = data.decode("latin-1")
    assert decoded(tokenizer, encode_plain(tokenizer, [text])[0]).encode("latin-1") == data


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from(["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<unk>", " ", "\n", "a"])))
def test_text_that_spells_special_tokens_stays_text(tokenizer, parts):
    text = "".join(parts)
    ids = encode_plain(tokenizer, [text])[0]
    assert all(i >= len(SPECIAL_TOKENS) for i in ids)
    assert decoded(tokenizer, ids) == text


def test_plain_encoding_leaves_the_tokenizer_as_it_was(tokenizer):
    encode_plain(tokenizer, ["a"])
    assert tokenizer.encode("<|im_end|>", add_special_tokens=False).ids == [IM_END]


def test_special_tokens_have_fixed_ids_and_sequences_start_with_bos(tokenizer):
    ids = [tokenizer.token_to_id(t) for t in ("<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>")]
    assert ids == [0, BOS, EOS, IM_START, IM_END] == [0, 1, 2, 3, 4]
    assert tokenizer.encode("a").ids[0] == BOS


def test_digits_are_tokens_of_their_own(tokenizer):
    assert len(encode_plain(tokenizer, ["1" * 9])[0]) == 9


def test_a_line_end_with_its_indentation_is_one_token(tokenizer):
    assert len(encode_plain(tokenizer, ["):\n        "])[0]) == 1


def test_the_result_depends_on_the_texts_alone():
    parts = [TEXT[i : i + 50] for i in range(0, len(TEXT), 50)]
    first, second, backwards = (train_tokenizer(p, 330).to_str() for p in (parts, parts, parts[::-1]))
    assert first == second == backwards


def test_a_vocabulary_without_room_for_bytes_is_refused():
    with pytest.raises(ConfigError, match="must be at least 261"):
        train_tokenizer([TEXT], 260)


def test_saved_files_load_and_the_template_renders_a_conversation(tokenizer, tmp_path):
    save_tokenizer(tokenizer, tmp_path)
    again = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert again.encode(TEXT).ids == tokenizer.encode(TEXT).ids
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert (config["bos_token"], config["eos_token"]) == ("<s>", "</s>")
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    template = jinja2.Template(config["chat_template"])
    text = template.render(messages=messages, add_generation_prompt=True, bos_token="<s>")
    assert text == (
        "<s><|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = again.encode(text, add_special_tokens=False).ids
    assert ids.count(BOS) == 1 and ids.count(IM_START) == 3 and ids.count(IM_END) == 2
