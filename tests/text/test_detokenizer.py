"""However the ids are cut into pushes, the pieces add up to decode(ids)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridjax.text import Detokenizer, Tokenizer, load_tokenizer

KINDS = ["byte_level", "byte_fallback"]
PIECES = [
    " the ",
    "你好",
    "😀",
    "👩‍👩‍👧",
    "🇨🇭",
    "e\u0301",
    "\u200d",
    "<|im_end|>",
    "tool call é",
    "\ufffd",
    "\n",
    " ",
]
TEXT = st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=6)), max_size=8).map("".join)
CUTS = st.lists(st.integers(1, 5), max_size=40)


@pytest.fixture(scope="module")
def tokenizers(tokenizer_directories) -> dict[str, Tokenizer]:
    return {kind: load_tokenizer(path) for kind, path in tokenizer_directories.items()}


def stream(tokenizer: Tokenizer, ids: list[int], cuts: list[int], skip: bool) -> list[str]:
    detokenizer, pieces, start = Detokenizer(tokenizer, skip_special_tokens=skip), [], 0
    for cut in [*cuts, len(ids)]:
        pieces.append(detokenizer.push(ids[start : start + cut]))
        start += cut
    return [*pieces, detokenizer.flush()]


@pytest.mark.parametrize("kind", KINDS)
@given(text=TEXT, cuts=CUTS, skip=st.booleans())
def test_pieces_of_a_text_add_up(tokenizers, kind: str, text: str, cuts: list[int], skip: bool):
    tokenizer = tokenizers[kind]
    ids = tokenizer.encode(text)
    assert "".join(stream(tokenizer, ids, cuts, skip)) == tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("kind", KINDS)
@given(ids=st.lists(st.integers(0, 420), max_size=40), cuts=CUTS, skip=st.booleans())
def test_pieces_of_random_ids_add_up(tokenizers, kind: str, ids: list[int], cuts: list[int], skip: bool):
    tokenizer = tokenizers[kind]
    assert "".join(stream(tokenizer, ids, cuts, skip)) == tokenizer.decode(ids, skip_special_tokens=skip)


@given(
    data=st.lists(st.sampled_from([0x61, 0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0x98, 0x80, 0xED, 0xA0, 0xFF, 0xC3]))
)
def test_broken_utf8_add_up(tokenizers, data: list[int]):
    tokenizer = tokenizers["byte_level"]
    single = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}
    ids = [single[bytes([byte])] for byte in data]
    assert "".join(stream(tokenizer, ids, [1] * len(ids), True)) == tokenizer.decode(ids)


def test_a_character_appears_with_its_last_byte(tokenizers):
    tokenizer = tokenizers["byte_level"]
    single = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}
    ids = [single[bytes([byte])] for byte in "a€b".encode()]
    assert stream(tokenizer, ids, [1] * 5, True) == ["a", "", "", "€", "b", "", ""]


def test_an_unfinished_character_is_replaced_at_the_end(tokenizers):
    for kind, last in (("byte_level", "\ufffd"), ("byte_fallback", "\ufffd\ufffd")):
        tokenizer = tokenizers[kind]
        token = {bytes([b]): i for i in range(tokenizer.vocab_size) for b in _byte(tokenizer, kind, i)}
        detokenizer = Detokenizer(tokenizer)
        assert detokenizer.push([token[b"\xe2"], token[b"\x82"]]) == ""
        assert detokenizer.flush() == last


def test_byte_fallback_holds_a_run_of_bytes_until_it_ends(tokenizers):
    tokenizer = tokenizers["byte_fallback"]
    ids = tokenizer.encode("he😀 the")
    pieces = stream(tokenizer, ids, [1] * len(ids), True)
    assert [piece for piece in pieces if piece] == ["he", "😀 the"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_window_stays_short(tokenizers, kind: str, monkeypatch):
    tokenizer = tokenizers[kind]
    decoded: list[int] = []
    original = Tokenizer.decode

    def counting(self, ids, skip_special_tokens=True):
        decoded.append(len(ids))
        return original(self, ids, skip_special_tokens)

    monkeypatch.setattr(Tokenizer, "decode", counting)
    ids = tokenizer.encode("the fox and the dog " * 50)
    stream(tokenizer, ids, [1] * len(ids), True)
    assert max(decoded, default=0) <= 4


def test_special_tokens_are_left_out_unless_asked_for(tokenizers):
    tokenizer = tokenizers["byte_level"]
    ids = tokenizer.encode("the<|im_end|> dog")
    assert "".join(stream(tokenizer, ids, [], True)) == "the dog"
    assert "".join(stream(tokenizer, ids, [], False)) == "the<|im_end|> dog"


def _byte(tokenizer: Tokenizer, kind: str, index: int) -> bytes:
    token = tokenizer.id_to_token(index) or ""
    if kind == "byte_fallback":
        return bytes.fromhex(token[3:5]) if token.startswith("<0x") else b""
    value = tokenizer.token_bytes(index)
    return value if len(value) == 1 else b""
