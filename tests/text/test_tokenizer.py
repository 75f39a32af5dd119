"""Reading tokenizer directories and encoding with them."""

import json
from pathlib import Path

import pytest
from small_tokenizers import CHATML, adding_bos, byte_level, write

from hybridjax.errors import CheckpointError, RequestError
from hybridjax.text import load_tokenizer

MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_text_comes_back(tokenizer_directories, kind: str):
    tokenizer = load_tokenizer(tokenizer_directories[kind])
    for text in ("the quick fox", "你好 😀", "", "line\nbreak", "naïve e\u0301"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_attributes(tokenizer_directories):
    tokenizer = load_tokenizer(tokenizer_directories["byte_level"])
    assert (tokenizer.bos_token, tokenizer.bos_token_id) == ("<s>", 0)
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("</s>", 1)
    assert tokenizer.vocab_size == 401
    assert tokenizer.special_ids == {0, 1, 2, 3}
    assert tokenizer.id_to_token(2) == "<|im_start|>" and tokenizer.token_to_id("</s>") == 1
    assert tokenizer.id_to_token(401) is None and tokenizer.token_to_id("nothing") is None
    assert tokenizer.decode([0, 10**6]) == ""


def test_the_file_itself_may_be_given(tokenizer_directories):
    tokenizer = load_tokenizer(tokenizer_directories["byte_level"] / "tokenizer.json")
    assert tokenizer.eos_token_id == 1 and tokenizer.has_chat_template


@pytest.mark.parametrize(
    ("processor_adds", "add_bos_token", "wanted"),
    [
        (False, None, 0),
        (False, False, 0),
        (False, True, 1),
        (True, None, 1),
        (True, True, 1),
        (True, False, 0),
    ],
)
def test_bos_comes_at_most_once(tmp_path, processor_adds, add_bos_token, wanted):
    backend = adding_bos(byte_level()) if processor_adds else byte_level()
    settings = {"bos_token": "<s>"} | ({} if add_bos_token is None else {"add_bos_token": add_bos_token})
    tokenizer = load_tokenizer(write(tmp_path, backend, **settings))
    plain = tokenizer.encode("the dog", add_special_tokens=False)
    assert 0 not in plain
    assert tokenizer.encode("the dog") == [0] * wanted + plain


def test_stored_truncation_and_padding_are_ignored(tmp_path):
    backend = byte_level()
    backend.enable_truncation(max_length=4)
    backend.enable_padding(length=100)
    tokenizer = load_tokenizer(write(tmp_path, backend))
    assert tokenizer.decode(tokenizer.encode("the quick brown fox")) == "the quick brown fox"


def test_special_tokens_map_is_read_too(tmp_path):
    write(tmp_path, byte_level(), eos_token="</s>")
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"bos_token": {"content": "<s>"}}))
    tokenizer = load_tokenizer(tmp_path)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1)


def test_without_config_there_are_no_named_tokens(tmp_path):
    byte_level().save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.bos_token_id is None and tokenizer.eos_token is None
    assert not tokenizer.has_chat_template
    with pytest.raises(RequestError, match="no chat template") as caught:
        tokenizer.render_chat(MESSAGES)
    assert caught.value.param == "messages"


def test_a_lone_surrogate_is_the_requests_fault(tokenizer_directories):
    tokenizer = load_tokenizer(tokenizer_directories["byte_level"])
    with pytest.raises(RequestError, match="lone surrogate"):
        tokenizer.encode("a\ud800b")


@pytest.mark.parametrize("index", [-1, 2**32])
def test_ids_that_no_vocabulary_has(tokenizer_directories, index: int):
    tokenizer = load_tokenizer(tokenizer_directories["byte_level"])
    with pytest.raises(RequestError, match="token ids"):
        tokenizer.decode([index])


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("tokenizer.json", None, "no such file"),
        ("tokenizer.json", "{", "not a tokenizer"),
        ("tokenizer.json", '{"version": "1.0"}', "not a tokenizer"),
        ("tokenizer_config.json", "{", "not JSON"),
        ("tokenizer_config.json", "[" * 200_000, "not JSON"),
        ("tokenizer_config.json", "[1]", "must be an object"),
        ("tokenizer_config.json", '{"bos_token": "<bos>"}', "'<bos>', which is not in the vocabulary"),
        ("tokenizer_config.json", '{"add_bos_token": "no"}', "tokenizer_config.json: add_bos_token is 'no'"),
        ("tokenizer_config.json", '{"add_bos_token": 0}', "add_bos_token is 0; it must be true, false or"),
        ("tokenizer_config.json", '{"bos_token": ["<s>"]}', "bos_token is .* it must be a string, an"),
        ("tokenizer_config.json", '{"eos_token": {"special": true}}', "eos_token is .* it must be a string"),
        ("tokenizer_config.json", '{"chat_template": 3}', "chat_template must be a string"),
        ("tokenizer_config.json", '{"chat_template": [{"name": "default"}]}', "chat_template must be"),
        ("tokenizer_config.json", '{"chat_template": {"default": 3}}', "'default' is no string"),
        ("tokenizer_config.json", '{"chat_template": "{% for %}"}', "chat template, line 1"),
    ],
)
def test_broken_files(tmp_path: Path, file: str, text: str | None, message: str):
    write(tmp_path, byte_level())
    (tmp_path / file).unlink()
    if text is not None:
        (tmp_path / file).write_text(text)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_tokenizer(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_template_file_goes_before_the_config(tmp_path):
    write(tmp_path, byte_level(), chat_template="config")
    assert load_tokenizer(tmp_path).render_chat(MESSAGES) == "config"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert load_tokenizer(tmp_path).render_chat(MESSAGES) == "file"
    (tmp_path / "mine.jinja").write_text("mine {{ messages[0].content }}")
    assert load_tokenizer(tmp_path, tmp_path / "mine.jinja").render_chat(MESSAGES) == "mine Hi"
    assert load_tokenizer(tmp_path, str(tmp_path / "mine.jinja")).render_chat(MESSAGES) == "mine Hi"
    assert load_tokenizer(tmp_path, "{{ messages|length }}").render_chat(MESSAGES) == "1"
    with pytest.raises(CheckpointError, match="cannot read the chat template"):
        load_tokenizer(tmp_path, "absent.jinja")


def test_named_templates(tmp_path):
    named = [
        {"name": "default", "template": CHATML},
        {"name": "tool_use", "template": "{{ tools|length }} tools"},
    ]
    tokenizer = load_tokenizer(write(tmp_path, byte_level(), chat_template=named))
    assert tokenizer.render_chat(MESSAGES) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.render_chat(MESSAGES, tools=[{"type": "function"}]) == "1 tools"
    tokenizer = load_tokenizer(write(tmp_path, byte_level(), chat_template={"rag": "x"}))
    with pytest.raises(RequestError, match="no default chat template, only rag"):
        tokenizer.render_chat(MESSAGES)


def test_a_chat_is_encoded_as_its_template_wrote_it(tokenizer_directories):
    tokenizer = load_tokenizer(tokenizer_directories["byte_level"])
    ids = tokenizer.encode(
        tokenizer.render_chat(MESSAGES, add_generation_prompt=False), add_special_tokens=False
    )
    assert ids[0] == 2 and 3 in ids
    assert tokenizer.decode(ids) == "user\nHi\n"
