"""The forms that models give one tool call: a JSON object, or Qwen3-Coder's XML. Read in pieces.

A reader takes text from where the call begins. What it cannot decide yet it leaves, to be given again
with more behind it; that is never more than a tag or a name, so the work is linear. Nothing here raises.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from hybridjax.text.json_scanner import SPACE, JsonScanner
from hybridjax.text.parameters import Parameters, Values, as_json

MAX_NAME = 256
ARGUMENT_KEYS = ("arguments", "parameters")
PARAMETER_END = "</parameter>"

_QUOTE_OR_END = re.compile(f'"|{PARAMETER_END}')
_STRING_RUN = re.compile(r'(?:[^"\\\x00-\x1f]|\\[^\x00-\x1f])*')

Tools = Mapping[str, Mapping[str, Any]]  # name -> JSON schema of its parameters


def overlap(text: str, tag: str) -> int:
    """How many characters at the end of ``text`` may begin ``tag`` (less than all of it)."""
    for count in range(min(len(tag) - 1, len(text)), 0, -1):
        if text.endswith(tag[:count]):
            return count
    return 0


def is_written_as_json(values: Values) -> bool:
    """Whether XML calls write a value as JSON, or as one that is listed. The parameter's closing tag may then
    stand in JSON's strings; in text it ends the value."""
    return "string" not in values.types and not values.is_text


def skip_space(text: str, at: int) -> int:
    while at < len(text) and text[at] in SPACE:
        at += 1
    return at


class Reader:
    """Reads one call: runs the method of the current state until it makes no progress.

    Attributes:
      name: of the tool, once known; one of the request's.
      pieces: JSON text of the arguments since ``pieces`` was last emptied.
      done: the call is complete.
      failed: what follows the text taken so far is not the rest of a call.
    """

    def __init__(self, tools: Tools, state: Callable[[str, int], int]):
        self.name: str | None = None
        self.pieces: list[str] = []
        self.done = self.failed = False
        self._tools = tools
        self._state = state

    def feed(self, text: str, at: int) -> int:
        """Takes some of ``text[at:]`` and returns where it stopped; if neither done nor failed, it needs
        more text behind that."""
        while not (self.done or self.failed):
            state, before = self._state, at
            at = state(text, at)
            if at == before and self._state == state:
                break
        return at

    def _fail(self, at: int) -> int:
        self.failed = True
        return at


class JsonReader(Reader):
    """``{"name": ..., "arguments": {...}}``, the keys in any order; further keys are ignored."""

    def __init__(self, tools: Tools):
        super().__init__(tools, self._open)
        self._scanner = JsonScanner()
        self._raw: list[str] = []
        self._key = ""
        self._has_arguments = False
        self._early: list[str] = []  # arguments that came before the name

    def _next(self, text: str, at: int, wanted: Mapping[str, Callable[[str, int], int]]) -> int:
        """Behind space, one of the characters wanted, which names the next state."""
        at = skip_space(text, at)
        if at == len(text):
            return at
        if text[at] not in wanted:
            return self._fail(at)
        self._state = wanted[text[at]]
        return at + 1

    def _open(self, text: str, at: int) -> int:
        return self._next(text, at, {"{": self._first})

    def _first(self, text: str, at: int) -> int:
        at = skip_space(text, at)
        if text[at : at + 1] == "}":
            return self._fail(at)  # no name
        return self._member(text, at)

    def _member(self, text: str, at: int) -> int:
        at = skip_space(text, at)
        if at == len(text):
            return at
        if text[at] != '"':
            return self._fail(at)
        self._scanner, self._raw, self._state = JsonScanner(), [], self._in_key
        return at

    def _in_key(self, text: str, at: int) -> int:
        at = self._scan(text, at)
        if self._scanner.done:
            self._key = json.loads("".join(self._raw))
            repeated = self._has_arguments if self._key in ARGUMENT_KEYS else self.name is not None
            if repeated and self._key in ("name", *ARGUMENT_KEYS):
                return self._fail(at)
            self._state = self._colon
        return at

    def _colon(self, text: str, at: int) -> int:
        return self._next(text, at, {":": self._value})

    def _value(self, text: str, at: int) -> int:
        at = skip_space(text, at)
        if at == len(text):
            return at
        first = {"name": '"', **dict.fromkeys(ARGUMENT_KEYS, "{")}.get(self._key)
        if first not in (None, text[at]):
            return self._fail(at)
        self._scanner, self._raw, self._state = JsonScanner(), [], self._in_value
        return at

    def _in_value(self, text: str, at: int) -> int:
        end = self._scan(text, at)
        if self._key in ARGUMENT_KEYS:
            self._has_arguments = True
            (self._early if self.name is None else self.pieces).append(text[at:end])
        if self._scanner.done:
            if self._key == "name":
                name = json.loads("".join(self._raw))
                if name not in self._tools:
                    return self._fail(end)
                self.name, self.pieces, self._early = name, self._early, []
            self._state = self._after
        return end

    def _after(self, text: str, at: int) -> int:
        at = skip_space(text, at)
        if text[at : at + 1] != "}":
            return self._next(text, at, {",": self._member})
        if self.name is None:
            return self._fail(at)
        if not self._has_arguments:
            self.pieces.append("{}")
        self.done = True
        return at + 1

    def _scan(self, text: str, at: int) -> int:
        end = self._scanner.feed(text, at)
        self.failed = self._scanner.failed
        if self._key == "name" or self._state == self._in_key:
            self._raw.append(text[at:end])
        return end


class XmlReader(Reader):
    """``<function=NAME> <parameter=NAME>value</parameter>... </function>``; the schema types values. Of a
    parameter that is repeated, the first value holds."""

    def __init__(self, tools: Tools, parameters: dict[str, Parameters], *, opened: bool):
        """``parameters``: what is known of the tools', kept here; ``opened``: behind ``<function=``."""
        super().__init__(tools, self._name if opened else self._open)
        self._parameters = parameters
        self._parameter = ""
        self._value: list[str] = []
        self._is_text = self._repeated = False
        self._seen: set[str] = set()

    def _tag(self, text: str, at: int, wanted: Mapping[str, Callable[[str, int], int]]) -> int:
        """Behind space, one of the tags wanted, which names the next state."""
        at = skip_space(text, at)
        for tag, state in wanted.items():
            if text.startswith(tag, at):
                self._state = state
                return at + len(tag)
        rest = text[at : at + 16]
        return at if any(tag.startswith(rest) for tag in wanted) else self._fail(at)

    def _named(self, text: str, at: int) -> tuple[int, str | None]:
        """A name up to ``>`` and the end of that; None if it has not come yet."""
        end = text.find(">", at, at + MAX_NAME + 1)
        if end >= 0:
            return end + 1, text[at:end].strip()
        return (self._fail(at) if len(text) - at > MAX_NAME else at), None

    def _open(self, text: str, at: int) -> int:
        return self._tag(text, at, {"<function=": self._name})

    def _name(self, text: str, at: int) -> int:
        end, name = self._named(text, at)
        if name is None:
            return end
        if name not in self._tools:
            return self._fail(at)
        self.name, self._state = name, self._body
        if name not in self._parameters:
            self._parameters[name] = Parameters(self._tools[name])
        self.pieces.append("{")
        return end

    def _body(self, text: str, at: int) -> int:
        return self._tag(text, at, {"<parameter=": self._parameter_name, "</function>": self._end})

    def _end(self, text: str, at: int) -> int:
        self.pieces.append("}")
        self.done = True
        return at

    def _parameter_name(self, text: str, at: int) -> int:
        end, name = self._named(text, at)
        if name is None:
            return end
        self._parameter, self._value, self._state = name, [], self._first_of_value
        self._is_text, self._repeated = self._values().is_text, name in self._seen
        if not self._repeated:
            comma, quote = ", " if self._seen else "", '"' if self._is_text else ""
            self.pieces.append(f"{comma}{_dumps(name)}: {quote}")
            self._seen.add(name)
        return end

    def _first_of_value(self, text: str, at: int) -> int:
        if at == len(text):
            return at
        self._state = self._in_json if is_written_as_json(self._values()) else self._in_text
        return at + (text[at] == "\n")

    def _in_text(self, text: str, at: int) -> int:
        return self._in_value(text, at, text.find(PARAMETER_END, at))

    def _in_json(self, text: str, at: int) -> int:
        """Outside of JSON's strings."""
        found = _QUOTE_OR_END.search(text, at)
        if found is None or found[0] == PARAMETER_END:
            return self._in_value(text, at, -1 if found is None else found.start())
        self._take(text[at : found.end()])
        self._state = self._in_string
        return found.end()

    def _in_string(self, text: str, at: int) -> int:
        match = _STRING_RUN.match(text, at)
        assert match is not None
        end = match.end()
        if text[end : end + 1] == '"':
            self._state = self._in_json
            end += 1
        elif end < len(text) and text[end:] != "\\":
            self._state = self._in_text  # no JSON
        self._take(text[at:end])
        return end

    def _in_value(self, text: str, at: int, end: int) -> int:
        """Up to the closing tag at ``end``, or to where it may begin if that is negative."""
        if end < 0:
            tail = text[max(at, len(text) - len(PARAMETER_END)) :]
            cut = len(text) - max(overlap(tail, PARAMETER_END), overlap(tail, "\n" + PARAMETER_END))
            self._take(text[at:cut])
            return cut
        self._take(text[at : end - (end > at and text[end - 1] == "\n")])
        if not self._repeated:
            self.pieces.append('"' if self._is_text else as_json("".join(self._value), self._values()))
        self._state = self._body
        return end + len(PARAMETER_END)

    def _take(self, value: str) -> None:
        if self._repeated:
            return
        if self._is_text:
            self.pieces.append(_dumps(value)[1:-1])
        else:
            self._value.append(value)

    def _values(self) -> Values:
        return self._parameters[self.name or ""].values(self._parameter)


def _dumps(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
