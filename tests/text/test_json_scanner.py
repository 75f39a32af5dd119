"""The scanner takes what Python's own parser takes, and says where it stops."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybridjax.text.json_scanner import MAX_DEPTH, JsonScanner

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)


def scan(text: str, cuts: list[int]) -> tuple[int, bool, bool]:
    scanner, taken, start = JsonScanner(), 0, 0
    for cut in [*cuts, len(text)]:
        piece = text[start : start + cut]
        end = scanner.feed(piece)
        taken += end
        if end < len(piece):
            break
        start += len(piece)
    return taken, scanner.done, scanner.failed


@given(VALUES, st.sampled_from([None, 1]), st.booleans(), st.lists(st.integers(0, 5), max_size=20))
def test_takes_all_json(value, indent, ascii_only: bool, cuts: list[int]):
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
    # The blank ends a number; it is not part of it.
    assert scan(text + " ", cuts) == (len(text), True, False)


@given(st.text(alphabet='{}[]",:\\ \n0123456789.-+eEtruefalsn\x01u', max_size=12))
def test_takes_nothing_else(text: str):
    taken, done, _ = scan(text + " ", [])
    try:
        json.loads(text, parse_constant=lambda _: pytest.fail("NaN is none of the letters"))
    except ValueError:
        assert not (done and text[taken:].strip(" \n") == "")
    else:
        assert done and text[taken:].strip(" \n") == ""


@pytest.mark.parametrize(
    ("text", "at"),
    [
        ('{"a" 1}', 5),
        ('{"a": 01}', 7),
        ('{"a": 1,}', 8),
        ("[1 2]", 3),
        ("[1,]", 3),
        ('["\n"]', 2),
        ('["\\x"]', 3),
        ('["\\u12g4"]', 6),
        ("[-]", 2),
        ("[1.]", 3),
        ("[1e+]", 4),
        ("[trve]", 3),
        ("[NaN]", 1),
        ("}", 0),
        ("{]", 1),
        ("[}", 1),
    ],
)
def test_stops_at_the_character_at_fault(text: str, at: int):
    for cuts in ([], [1] * len(text)):
        assert scan(text, cuts) == (at, False, True)


def test_depth_is_bounded():
    deep = "[" * (MAX_DEPTH + 1)
    assert scan(deep, []) == (MAX_DEPTH, False, True)


def test_what_is_behind_the_value_is_left():
    assert scan('{"a": [{}]}}', []) == (11, True, False)
    assert scan("12,", []) == (2, True, False)
    assert scan("12", []) == (2, False, False)


def test_long_values_take_linear_time():
    """With time that grew with the square of the length, this would not end."""
    for text in ('"' + "a" * 2**22, "[" + "1," * 2**17, '{"' + "\\n" * 2**17):
        assert scan(text, []) == (len(text), False, False)
        assert scan(text[: 2**17], [1] * 2**17) == (2**17, False, False)
