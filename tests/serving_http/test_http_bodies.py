import json
import math
from collections.abc import Sequence

import pytest
from http_fakes import ByteTokenizer

from hybridjax.serving.api import RequestOutput, TokenLogprob
from hybridjax.serving.http.bodies import CompletionBodies
from hybridjax.serving.http.errors import dumps
from hybridjax.serving.http.protocol import CompletionRequest
from hybridjax.serving.http.tokens import Piece, TokenTexts


class SpaceDroppingTokenizer(ByteTokenizer):
    """Drops the first space of a text, as decoders of the SentencePiece kind do; 1 is half a character."""

    is_byte_level = False
    _texts = {97: " a", 2: " dog", 1: "\ufffd"}

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(self._texts[i] for i in ids).removeprefix(" ")

    def id_to_token(self, index: int) -> str | None:
        return "<0xE4>" if index == 1 else None


def test_a_token_keeps_its_leading_space():
    texts = TokenTexts(SpaceDroppingTokenizer())
    assert texts.piece(2) == Piece(" dog", b" dog", 4)


def test_a_byte_token_knows_its_byte():
    texts = TokenTexts(SpaceDroppingTokenizer())
    assert texts.piece(1) == Piece("bytes:\\xe4", b"\xe4", 1)


def test_the_pieces_of_a_character_count_it_once():
    texts = TokenTexts(ByteTokenizer())
    assert [texts.piece(byte).characters for byte in "a世b".encode()] == [1, 1, 0, 0, 1]


def test_impossible_tokens_have_a_json_logprob():
    request = CompletionRequest(prompt=["x"], logprobs=2)  # pyright: ignore
    bodies = CompletionBodies(request, TokenTexts(ByteTokenizer()), [[1]], [])
    entry = TokenLogprob(97, -math.inf, ((98, math.nan), (97, -0.25)))
    output = RequestOutput(request_id="r", token_ids=(97,), text="a", logprobs=(entry,))
    logprobs = json.loads(dumps(bodies.delta(0, output, always=False)))["logprobs"]
    assert logprobs["token_logprobs"] == [-9999.0]
    assert logprobs["top_logprobs"] == [{"b": -9999.0, "a": -0.25}]


@pytest.mark.parametrize(
    "text", ["a\nb\rc", "\x85\u2028\u2029", "世界 😀", "\x00\x1f\x7f", "lone \ud800 half", '"\\']
)
def test_json_stays_on_one_line_and_keeps_the_text(text: str):
    encoded = dumps({"text": text})
    assert len(encoded.decode().splitlines()) == 1
    assert json.loads(encoded) == {"text": text}


def test_other_languages_stay_readable():
    assert dumps("你好") == '"你好"'.encode()
