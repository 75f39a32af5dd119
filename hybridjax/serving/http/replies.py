"""From the text of a chat completion to its reasoning, content and tool calls."""

import dataclasses
from collections.abc import Sequence

from hybridjax.configs.serving import ServerConfig
from hybridjax.serving.api import RequestOutput
from hybridjax.serving.http.tokens import TextTokenizer
from hybridjax.text import reasoning, tool_calls
from hybridjax.text.chat_template import PROBE_TOOL, ToolUse
from hybridjax.text.reasoning import Form as ReasoningForm
from hybridjax.text.reasoning import ReasoningSplitter, Split
from hybridjax.text.tool_calls import Delta, ToolCallParser
from hybridjax.text.tool_readers import Tools

TOOL_PARSERS: dict[str, tool_calls.Format] = {"qwen": "hermes", "qwen25": "hermes", "llama3": "json"}
TOOL_PARSERS |= {form: form for form in tool_calls.FORMATS}


@dataclasses.dataclass(frozen=True)
class ReplyForms:
    """How this server's model writes calls and reasoning; None: not at all.

    Attributes:
      use: what the chat template makes of tools.
      closing: token ids of the tag that ends the reasoning.
      hidden: texts of tags that are special tokens, which are left out of a text by default.
    """

    use: ToolUse = ToolUse()
    calls: tool_calls.Format | None = None
    reasoning: ReasoningForm | None = None
    closing: tuple[int, ...] = ()
    hidden: frozenset[str] = frozenset()

    @classmethod
    def of(cls, tokenizer: TextTokenizer, config: ServerConfig) -> "ReplyForms":
        """What the flags say, or else what the chat template shows."""
        if not tokenizer.has_chat_template:
            return cls()
        use = tokenizer.tool_use
        calls = TOOL_PARSERS.get(config.tool_call_parser)
        if config.tool_call_parser == "auto":
            calls = tool_calls.detect(use.sample, PROBE_TOOL)
        wanted = config.reasoning_parser
        if wanted == "auto" and tokenizer.chat_reasons:
            wanted = "qwen3"
        forms: dict[str, ReasoningForm] = {form: form for form in reasoning.FORMS}
        tags = (tool_calls.OPEN, tool_calls.CLOSE, reasoning.OPEN, reasoning.CLOSE)
        hidden = frozenset(tag for tag in tags if not tokenizer.decode(tokenizer.encode(tag, False)))
        return cls(use, calls, forms.get(wanted), tuple(tokenizer.encode(reasoning.CLOSE, False)), hidden)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplyPlan:
    """How to read the completions of one request.

    Attributes:
      forms: how the model writes.
      calls: the form of its calls; None: there are none.
      tools: that it may call.
      max_calls: of a completion.
      opened: whether it begins within the reasoning; None: there is none.
      keep_reasoning: leave the reasoning in the content.
      incremental: report pieces of calls.
    """

    forms: ReplyForms = ReplyForms()
    calls: tool_calls.Format | None = None
    tools: Tools = dataclasses.field(default_factory=dict)
    max_calls: int | None = None
    opened: bool | None = None
    keep_reasoning: bool = False
    incremental: bool = False

    @property
    def needs_special_tokens(self) -> bool:
        """Whether a tag to be found is a special token."""
        tags = {tool_calls.OPEN, tool_calls.CLOSE} if self.calls else set[str]()
        tags |= {reasoning.OPEN, reasoning.CLOSE} if self.opened is not None else set[str]()
        return bool(tags & self.forms.hidden)


class Reply:
    """One completion as it comes."""

    def __init__(self, plan: ReplyPlan):
        self._plan = plan
        self._splitter = None
        if plan.opened is not None:
            self._splitter = ReasoningSplitter(opened=plan.opened, keep=plan.keep_reasoning)
        self._calls = None
        if plan.calls is not None:
            self._calls = ToolCallParser(
                plan.calls, plan.tools, incremental=plan.incremental, max_calls=plan.max_calls
            )
        self._closing = _Finder(plan.forms.closing)

    def push(self, output: RequestOutput) -> Delta:
        """What is new, all that was held back included once the completion has ended."""
        if self._splitter is None:
            split = Split(answer=output.text)
        else:
            self._closing.push(output.token_ids)
            split = self._splitter.push(output.text)
            if output.finish_reason is not None:
                last = self._splitter.flush()
                split = Split(split.reasoning + last.reasoning, split.answer + last.answer)
        kept, apart = (split.reasoning, "") if self._plan.keep_reasoning else ("", split.reasoning)
        delta = Delta(reasoning=apart, content=kept)
        if self._calls is None:
            delta.content += split.answer
            return delta
        delta.add(self._calls.push(split.answer))
        if output.finish_reason is not None:
            delta.add(self._calls.flush())
        return delta

    @property
    def has_calls(self) -> bool:
        return self._calls is not None and self._calls.calls > 0

    @property
    def reasoning_tokens(self) -> int | None:
        """How many tokens the reasoning took, its tags included; None if that is not known."""
        if self._splitter is None:
            return None
        if not self._splitter.began:
            return 0
        return self._closing.seen if self._splitter.inside else self._closing.end


class _Finder:
    """Finds where a sequence of token ids ends.

    Attributes:
      seen: tokens so far.
      end: how many of them up to the end of the sequence; None if it has not come.
    """

    def __init__(self, wanted: Sequence[int]):
        self.seen = 0
        self.end: int | None = None
        self._wanted = tuple(wanted)
        self._last: tuple[int, ...] = ()

    def push(self, ids: Sequence[int]) -> None:
        size = len(self._wanted)
        if self.end is None and size:
            window = (*self._last, *ids)
            for start in range(len(window) - size + 1):
                if window[start : start + size] == self._wanted:
                    self.end = self.seen - len(self._last) + start + size
                    break
            self._last = window[max(len(window) - size + 1, 0) :]
        self.seen += len(ids)
