"""Checks JSON that arrives in pieces, one look at each character."""

import re
from collections.abc import Mapping

MAX_DEPTH = 64
SPACE = " \t\n\r"

_DIGITS = "0123456789"
_HEX = frozenset("0123456789abcdefABCDEF")
_STRING_RUN = re.compile(r'[^"\\\x00-\x1f]*')
_LITERALS = {"t": "rue", "f": "alse", "n": "ull"}


def _to(state: str, characters: str) -> dict[str, str]:
    return dict.fromkeys(characters, state)


# What may follow within a number: state -> character -> state.
_NUMBER: Mapping[str, Mapping[str, str]] = {
    "start": _to("minus", "-") | _to("zero", "0") | _to("whole", "123456789"),
    "minus": _to("zero", "0") | _to("whole", "123456789"),
    "zero": _to("point", ".") | _to("e", "eE"),
    "whole": _to("whole", _DIGITS) | _to("point", ".") | _to("e", "eE"),
    "point": _to("fraction", _DIGITS),
    "fraction": _to("fraction", _DIGITS) | _to("e", "eE"),
    "e": _to("sign", "+-") | _to("exponent", _DIGITS),
    "sign": _to("exponent", _DIGITS),
    "exponent": _to("exponent", _DIGITS),
}
_NUMBER_ENDS = ("zero", "whole", "fraction", "exponent")


class JsonScanner:
    """Accepts one JSON value (RFC 8259), whatever the pieces; the work is linear in their length.

    Attributes:
      done: the value is complete.
      failed: the character after the last one taken cannot follow.
    """

    def __init__(self):
        self.done = self.failed = False
        self._closers: list[str] = []
        # value, first (value or "]"), key, first_key (key or "}"), colon, next, string, escape, hex,
        # literal, or a state of _NUMBER.
        self._state = "value"
        self._rest = ""  # of a literal
        self._hex = 0
        self._is_key = False

    def feed(self, text: str, start: int = 0) -> int:
        """Takes ``text[start:]`` as far as it belongs to the value; returns the end of what it took."""
        at, end = start, len(text)
        while at < end and not (self.done or self.failed):
            if self._state == "string":
                match = _STRING_RUN.match(text, at)
                assert match is not None
                at = match.end()
                if at < end:
                    at += self._in_string(text[at])
            else:
                at += self._step(text[at])
        return at

    def _in_string(self, character: str) -> int:
        if character == "\\":
            self._state = "escape"
        elif character != '"':
            return self._fail()
        elif self._is_key:
            self._state = "colon"
        else:
            self._end_value()
        return 1

    def _step(self, character: str) -> int:
        state = self._state
        if state in _NUMBER:
            return self._in_number(character)
        if state == "literal":
            return self._in_literal(character)
        if state == "escape":
            return self._in_escape(character)
        if state == "hex":
            if character not in _HEX:
                return self._fail()
            self._hex -= 1
            self._state = "hex" if self._hex else "string"
            return 1
        if character in SPACE:
            return 1
        match state:
            case "key" | "first_key" if character == '"':
                self._state, self._is_key = "string", True
            case "colon" if character == ":":
                self._state = "value"
            case "next" if character == ",":
                self._state = "key" if self._closers[-1] == "}" else "value"
            case "next" | "first_key" | "first" if character == self._closers[-1]:
                self._closers.pop()
                self._end_value()
            case "value" | "first":
                return self._begin_value(character)
            case _:
                return self._fail()
        return 1

    def _begin_value(self, character: str) -> int:
        if character == '"':
            self._state, self._is_key = "string", False
        elif character in "{[":
            if len(self._closers) == MAX_DEPTH:
                return self._fail()
            self._closers.append("}" if character == "{" else "]")
            self._state = "first_key" if character == "{" else "first"
        elif character in _LITERALS:
            self._state, self._rest = "literal", _LITERALS[character]
        elif character in _NUMBER["start"]:
            self._state = _NUMBER["start"][character]
        else:
            return self._fail()
        return 1

    def _in_number(self, character: str) -> int:
        following = _NUMBER[self._state].get(character)
        if following is not None:
            self._state = following
            return 1
        if self._state not in _NUMBER_ENDS:
            return self._fail()
        self._end_value()
        return 0

    def _in_literal(self, character: str) -> int:
        if character != self._rest[0]:
            return self._fail()
        self._rest = self._rest[1:]
        if not self._rest:
            self._end_value()
        return 1

    def _in_escape(self, character: str) -> int:
        if character == "u":
            self._state, self._hex = "hex", 4
        elif character in '"\\/bfnrt':
            self._state = "string"
        else:
            return self._fail()
        return 1

    def _end_value(self) -> None:
        self._state = "next"
        self.done = not self._closers

    def _fail(self) -> int:
        self.failed = True
        return 0
