"""Splits what a model thinks aloud, ``<think>...</think>``, from its answer, while it writes."""

from typing import Literal, NamedTuple

from hybridjax.text.tool_readers import overlap

Form = Literal["qwen3", "deepseek-r1"]
FORMS: tuple[Form, ...] = ("qwen3", "deepseek-r1")

OPEN, CLOSE = "<think>", "</think>"
MAX_SPACE = 64  # before the opening tag


class Split(NamedTuple):
    """What is new: of the reasoning, and of the answer."""

    reasoning: str = ""
    answer: str = ""


def is_open(prompt: str, form: Form) -> bool:
    """Whether a reply to this prompt begins within the reasoning.

    Args:
      prompt: its last turn is enough.
      form: of models that always reason, ``deepseek-r1``, templates may leave the tag out.
    """
    end = prompt.rstrip()
    return end.endswith(OPEN) or (form == "deepseek-r1" and not end.endswith(CLOSE))


class ReasoningSplitter:
    """Takes text in pieces of any size; the result does not depend on them.

    The reasoning stands at the beginning or nowhere. Tags are dropped, with the line breaks beside them.

    Attributes:
      began: there is a reasoning.
      inside: it has not ended yet.
    """

    def __init__(self, *, opened: bool, keep: bool = False):
        """Begins a reply.

        Args:
          opened: the prompt has opened the reasoning.
          keep: leave the reasoning as it is, tags and line breaks included.
        """
        self.began = self.inside = opened
        self._keep = keep
        self._before = True  # nothing but space so far
        self._rest = ""
        self._breaks = 0  # held back within the reasoning
        self._at_start = True  # of the reasoning or of what is behind it

    def push(self, text: str) -> Split:
        """Takes more of the reply and returns what is certain."""
        text = self._rest + text
        self._rest = ""
        reasoning = ""
        if self._before:
            start = len(text) - len(text.lstrip())
            self._before = start <= MAX_SPACE and OPEN.startswith(text[start : start + len(OPEN)])
            if self._before and len(text) < start + len(OPEN):
                self._rest = text
                return Split()
            if self._before:
                self._before, self.began, self.inside = False, True, True
                reasoning = text[: start + len(OPEN)] if self._keep else ""
                text = text[start + len(OPEN) :]
            self._at_start = self.inside
        if self.inside:
            end = text.find(CLOSE)
            cut = len(text) - overlap(text, CLOSE) if end < 0 else end
            reasoning += text[:cut] if self._keep else self._without_breaks(text[:cut])
            if end < 0:
                self._rest = text[cut:]
                return Split(reasoning)
            reasoning += CLOSE if self._keep else ""
            text = text[end + len(CLOSE) :]
            self.inside, self._at_start = False, not self._keep
        if self._at_start:
            text = text.lstrip("\r\n")
            self._at_start = not text
        return Split(reasoning, text)

    def flush(self) -> Split:
        """Ends the reply and returns what was held back."""
        rest, self._rest = self._rest, ""
        if not self.inside:
            return Split(answer=rest)
        return Split(rest if self._keep or not rest else self._without_breaks(rest))

    def _without_breaks(self, text: str) -> str:
        """Drops line breaks at the beginning, and holds those at the end back."""
        if self._at_start:
            text = text.lstrip("\n")
        shown = text.rstrip("\n")
        breaks = self._breaks
        self._breaks = len(text) - len(shown) + (0 if shown else breaks)
        if not shown:
            return ""
        self._at_start = False
        return "\n" * breaks + shown
