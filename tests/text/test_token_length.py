"""Long texts: refused without encoding them, and encoded without stopping other threads."""

import threading
import time
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_tokenizers import TEXTS, adding_bos, byte_fallback, byte_level, write
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from hybridjax.text import Tokenizer, load_tokenizer


def only_eos(backend: Backend) -> Backend:
    """Adds </s> after the text, which reads like a bos token where the text is empty."""
    backend.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return backend


def metaspace() -> Backend:
    backend = byte_fallback()
    backend.normalizer = None
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    return backend


def normalized_token() -> Backend:
    backend = byte_fallback()
    backend.add_tokens([AddedToken("a b c d e f g h", normalized=True)])
    return backend


def split_first() -> Backend:
    backend = byte_level()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\s+"), "isolated"),
            pre_tokenizers.Digits(),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return backend


BOUNDED: dict[str, Callable[[], Backend]] = {
    "byte_level": byte_level,
    "byte_fallback": byte_fallback,
    "adding_bos": lambda: adding_bos(byte_level()),
    "only_eos": lambda: only_eos(byte_level()),
    "metaspace": metaspace,
    "normalized_token": normalized_token,
    "split_first": split_first,
}
SETTINGS = {"only_eos": {"bos_token": "</s>", "add_bos_token": False}}
PIECES = ["a b c d e f g h", "▁", " ", "   ", "<|im_start|>", "tool call é", "é", "e\u0301", *TEXTS]
TEXT = st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=8)), max_size=12).map("".join)


@pytest.fixture(scope="module")
def bounded(tmp_path_factory) -> dict[str, Tokenizer]:
    base = tmp_path_factory.mktemp("bounded")
    return {
        name: load_tokenizer(write(base / name, make(), **SETTINGS.get(name, {"bos_token": "<s>"})))
        for name, make in BOUNDED.items()
    }


@pytest.mark.parametrize("name", BOUNDED)
def test_a_text_called_too_long_is_too_long(bounded, name: str):
    tokenizer = bounded[name]

    @given(TEXT, st.integers(0, 20), st.booleans())
    def holds(text: str, most: int, special: bool):
        ids = tokenizer.encode(text, add_special_tokens=special)
        assert not tokenizer.too_long(text, len(ids))
        if tokenizer.too_long(text, most):
            assert len(ids) > most

    holds()


@pytest.mark.parametrize("name", BOUNDED)
def test_what_no_encoding_can_hold_is_called_too_long(bounded, name: str):
    longest = bounded[name].longest_token_bytes
    assert longest is not None and longest <= 32
    assert bounded[name].too_long("x" * (12 * longest), 10)
    assert bounded[name].too_long("你" * (4 * longest), 10)
    assert not bounded[name].too_long("x" * (10 * longest), 10)
    assert not bounded[name].too_long("\ud800" * 1000, 10)


def test_the_bound_is_the_longest_token(tmp_path):
    backend = byte_level()
    backend.add_tokens(["ü" * 50])
    assert load_tokenizer(write(tmp_path, backend)).longest_token_bytes == 100


def with_step(name: str, step: object) -> Backend:
    backend = byte_level()
    setattr(backend, name, step)
    return backend


def with_token(**how: bool) -> Backend:
    backend = byte_level()
    backend.add_tokens([AddedToken("<mask>", **how)])
    return backend


def without_some_bytes() -> Backend:
    backend = Backend(models.BPE({"a": 0, "<unk>": 1}, [], unk_token="<unk>", fuse_unk=True))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return backend


UNBOUNDED: dict[str, tuple[Callable[[], Backend], str]] = {
    "strip": (lambda: with_step("normalizer", normalizers.Strip()), " " * 1000),
    "shorter": (lambda: with_step("normalizer", normalizers.Replace("  ", " ")), "x"),
    "pattern": (lambda: with_step("normalizer", normalizers.Replace(Regex("x+"), "x")), "x" * 1000),
    "in_sequence": (
        lambda: with_step("normalizer", normalizers.Sequence([normalizers.NFC(), normalizers.Strip()])),
        " " * 1000,
    ),
    "removed": (lambda: with_step("pre_tokenizer", pre_tokenizers.Split("x", "removed")), "x" * 1000),
    "white_space": (lambda: with_step("pre_tokenizer", pre_tokenizers.Whitespace()), " " * 1000),
    "template": (
        lambda: with_step(
            "post_processor",
            processors.TemplateProcessing(single="<s>", pair="$A $B", special_tokens=[("<s>", 0)]),
        ),
        "x" * 1000,
    ),
    "lstrip": (lambda: with_token(lstrip=True), " " * 1000 + "<mask>"),
    "rstrip": (lambda: with_token(rstrip=True), "<mask>" + " " * 1000),
    "unknown": (without_some_bytes, "x" * 1000),
    "words": (lambda: Backend(models.WordLevel({"<unk>": 0}, unk_token="<unk>")), "x" * 1000),
}


@pytest.mark.parametrize("name", UNBOUNDED)
def test_where_a_token_can_swallow_or_lose_text_there_is_no_bound(tmp_path, name: str):
    make, text = UNBOUNDED[name]
    tokenizer = load_tokenizer(write(tmp_path, make()))
    assert tokenizer.longest_token_bytes is None
    assert len(tokenizer.encode(text)) <= 2
    assert not tokenizer.too_long(text, 2)


@pytest.mark.parametrize("name", BOUNDED)
def test_the_ids_are_those_of_the_tokenizers_library(bounded, name: str):
    for text in ("", " ", *TEXTS, "".join(PIECES)):
        for special in (False, True):
            expected = BOUNDED[name]().encode(text, add_special_tokens=special).ids
            found = bounded[name].encode(text, add_special_tokens=special)
            assert found == (expected[1:] if name == "only_eos" and special else expected)


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback"])
def test_other_threads_run_while_a_long_text_is_encoded(bounded, name: str):
    text = (" ".join(TEXTS) + "\n") * 12_000
    assert len(text.encode()) > 2_000_000
    beats, done = [0], threading.Event()

    def beat():
        while not done.is_set():
            beats[0] += 1
            time.sleep(0.001)

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        before = beats[0]
        bounded[name].encode(text)
        during = beats[0] - before
    finally:
        done.set()
        thread.join()
    assert during >= 25
