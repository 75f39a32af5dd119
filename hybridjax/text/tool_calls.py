"""Tool calls in what a model writes, found while it writes: text outside them stays text.

Formats:
  hermes: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>`` (Hermes, Qwen2.5, Qwen3).
  qwen3_coder: ``<tool_call><function=NAME><parameter=NAME>value</parameter></function></tool_call>``.
  json: the whole reply is one such JSON object (``parameters`` means ``arguments``), or several.
"""

import dataclasses
from typing import Literal

from hybridjax.text.json_scanner import SPACE
from hybridjax.text.parameters import Parameters
from hybridjax.text.tool_readers import (
    ARGUMENT_KEYS,
    JsonReader,
    Reader,
    Tools,
    XmlReader,
    overlap,
    skip_space,
)

Format = Literal["hermes", "qwen3_coder", "json"]
FORMATS: tuple[Format, ...] = ("hermes", "qwen3_coder", "json")

OPEN, CLOSE, FUNCTION = "<tool_call>", "</tool_call>", "<function="
_OPENERS: dict[Format, tuple[str, ...]] = {"hermes": (OPEN,), "qwen3_coder": (OPEN, FUNCTION), "json": ()}


@dataclasses.dataclass
class CallDelta:
    """What is new of the call ``index``; the name comes once, first."""

    index: int
    name: str | None
    arguments: str


@dataclasses.dataclass
class Delta:
    """What is new of a reply."""

    reasoning: str = ""
    content: str = ""
    calls: list[CallDelta] = dataclasses.field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.calls)

    def add_call(self, index: int, name: str | None, arguments: str) -> None:
        if self.calls and self.calls[-1].index == index:
            self.calls[-1].arguments += arguments
        else:
            self.calls.append(CallDelta(index, name, arguments))

    def add(self, other: "Delta") -> None:
        self.reasoning += other.reasoning
        self.content += other.content
        for call in other.calls:
            self.add_call(call.index, call.name, call.arguments)


def detect(sample: str, probe: str) -> Format | None:
    """The format of a conversation as a chat template writes it.

    Args:
      sample: the text, with a call of the tool ``probe``.
      probe: a name that stands nowhere else.
    """
    if f"<function={probe}>" in sample and "<parameter=" in sample:
        return "qwen3_coder"
    if OPEN in sample:
        return "hermes"
    compact = "".join(sample.split())
    calls = (f'{{"name":"{probe}","{key}":{{' for key in ARGUMENT_KEYS)
    return "json" if any(call in compact for call in calls) else None


class ToolCallParser:
    """Splits text, in pieces of any size, into content and calls; never raises, linear in the text.

    A call that is not well-formed, or of a tool that there is not, stays text. Space around calls is
    dropped. The result does not depend on the pieces.
    """

    def __init__(self, form: Format, tools: Tools, *, incremental: bool = True, max_calls: int | None = None):
        """Begins a reply.

        Args:
          form: how calls look.
          tools: names of the tools, and the JSON schemas of their parameters.
          incremental: report a call once its name is known, and its arguments as they come: if they turn
            out to be malformed, what has been reported stays, and the rest is text. Otherwise calls are
            reported whole, or as text.
          max_calls: calls beyond are dropped.
        """
        self._form: Format = form
        self._tools = tools
        self._parameters: dict[str, Parameters] = {}
        self._incremental = incremental
        self._max_calls = max_calls
        self._delta = Delta()
        self._rest = ""
        self._reader: Reader | None = None
        self._raw: list[str] = []  # text of a call that is not reported yet
        self._pieces: list[str] = []  # of its arguments, likewise
        self._reported = False
        self._calls = 0
        self._closing = False  # the closing tag may follow
        self._space: list[str] = []  # behind what was last shown
        self._has_content = False
        self._behind_call = False  # with nothing but space since
        self._plain = False  # json: the reply is text
        self._openers: dict[str, int] = {}  # where the next ones are in the text at hand

    @property
    def calls(self) -> int:
        """How many calls were reported."""
        return self._calls if self._max_calls is None else min(self._calls, self._max_calls)

    def push(self, text: str) -> Delta:
        """Takes more of the reply and returns what is new."""
        text, at = self._rest + text, 0
        self._openers = {}
        while True:
            before = at, self._reader, self._closing
            if self._reader is not None:
                at = self._read(text, at, self._reader)
            elif self._form == "json":
                at = self._begin_json(text, at)
            else:
                at = self._close(text, at) if self._closing else self._begin(text, at)
            if before == (at, self._reader, self._closing):
                break
        self._rest = text[at:]
        return self._take()

    def flush(self) -> Delta:
        """Ends the reply and returns what was held back."""
        if self._reader is None:
            self._content("" if self._closing else self._rest)
        elif not self._reported:
            self._content("".join(self._raw) + self._rest)
        self._reader, self._rest, self._closing = None, "", False
        if not self._behind_call:
            self._delta.content += "".join(self._space)
        self._space = []
        return self._take()

    def _take(self) -> Delta:
        delta, self._delta = self._delta, Delta()
        return delta

    def _content(self, text: str) -> None:
        """Text that is no call; space at its end waits for what follows."""
        shown = text.rstrip(SPACE)
        tail = text[len(shown) :]
        if shown:
            if self._calls and not self._has_content:
                self._space, shown = [], shown.lstrip(SPACE)
            self._delta.content += "".join(self._space) + shown
            self._space, self._has_content, self._behind_call = [], True, False
        if tail:
            self._space.append(tail)

    def _begin(self, text: str, at: int) -> int:
        """Outside of calls: up to where the next one may begin."""
        openers = _OPENERS[self._form]
        for opener in openers:
            if self._openers.get(opener, -1) < at:
                where = text.find(opener, at)
                self._openers[opener] = len(text) if where < 0 else where
        opener = min(openers, key=lambda each: self._openers[each])
        where = self._openers[opener]
        if where == len(text):
            tail = text[max(at, len(text) - len(OPEN)) :]
            cut = len(text) - max(overlap(tail, each) for each in openers)
            self._content(text[at:cut])
            return cut
        self._content(text[at:where])
        as_json = self._form == "hermes"
        reader = JsonReader(self._tools) if as_json else self._xml_reader(opener == FUNCTION)
        self._reader, self._raw = reader, [opener]
        return where + len(opener)

    def _xml_reader(self, opened: bool) -> XmlReader:
        return XmlReader(self._tools, self._parameters, opened=opened)

    def _close(self, text: str, at: int) -> int:
        """Behind a call: its closing tag, which may be missing."""
        start = skip_space(text, at)
        if text.startswith(CLOSE, start):
            self._closing, self._space = False, []
            return start + len(CLOSE)
        if start > at:
            self._space.append(text[at:start])
        self._closing = CLOSE.startswith(text[start : start + len(CLOSE)])
        return start

    def _begin_json(self, text: str, at: int) -> int:
        """Calls stand at the beginning only, one behind the other."""
        start = at
        if not self._plain:
            between = SPACE + (",;]" if self._calls else "")
            while start < len(text) and text[start] in between:
                start += 1
            if start > at:
                self._space.append(text[at:start])
            if start == len(text):
                return start
            is_list = text[start] == "[" and not self._calls
            if is_list or text[start] == "{":
                self._reader, self._raw = JsonReader(self._tools), ["["] if is_list else []
                return start + is_list
            self._plain = True
        self._content(text[start:])
        return len(text)

    def _read(self, text: str, at: int, reader: Reader) -> int:
        """Within a call."""
        end = reader.feed(text, at)
        self._raw.append(text[at:end])
        self._pieces += reader.pieces
        reader.pieces.clear()
        if self._pieces and reader.name is not None and (self._incremental or reader.done):
            self._report(reader.name)
        if reader.failed and not self._reported:
            self._content("".join(self._raw))
            self._plain = True
        if reader.done or reader.failed:
            self._reader, self._raw, self._pieces, self._reported = None, [], [], False
            self._closing = reader.done and self._form != "json"
        return end

    def _report(self, name: str) -> None:
        is_first = not self._reported
        self._calls += is_first
        self._reported = self._behind_call = True
        if self._max_calls is None or self._calls <= self._max_calls:
            arguments = "".join(self._pieces)
            self._delta.add_call(self._calls - 1, name if is_first else None, arguments)
        self._raw, self._pieces, self._space = [], [], []
