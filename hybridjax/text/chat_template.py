"""Chat templates: the Jinja programs that turn messages into a prompt.

A template comes with the weights, so it is a program from strangers. It runs in the closed world of
hybridjax/text/sandbox.py, with the names that Hugging Face's ``apply_chat_template`` offers.
"""

import functools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jinja2

from hybridjax.errors import CheckpointError, RequestError
from hybridjax.text import sandbox

MAX_TEMPLATE_CHARS = 256 * 1024
MAX_OPTION_CHARS = 4096

# Set by the caller or the tokenizer, never by a request's template options.
_RESERVED = {"messages", "tools", "documents", "add_generation_prompt"}
# Options that clients send to every model; templates that do not read them ignore them.
_COMMON_OPTIONS = {"enable_thinking", "thinking", "reasoning_effort"}

_IMAGE = {"type": "image"}
_PROBE = "HybridjaxProbe"

# The tool that ``ToolUse.sample`` calls, and what with.
PROBE_TOOL = "hybridjax_probe"
_PROBE_KEY, _PROBE_VALUE = "hybridjax_key", "hybridjax_value"
_PROBE_SCHEMA = {
    "type": "function",
    "function": {
        "name": PROBE_TOOL,
        "description": "Does nothing.",
        "parameters": {
            "type": "object",
            "properties": {_PROBE_KEY: {"type": "string", "description": "A word."}},
            "required": [_PROBE_KEY],
        },
    },
}


class Accepts(NamedTuple):
    """What a template makes of the content of a message.

    Attributes:
      strings: it writes a content that is a string.
      parts: it writes the text of a content that is a list of parts.
      images: it writes something for a part that is an image.
    """

    strings: bool
    parts: bool
    images: bool


class ToolUse(NamedTuple):
    """What a template makes of tools.

    Attributes:
      tools: it writes the tools that it is given.
      calls: it writes the tool calls of a message.
      as_text: it wants the arguments of a call as JSON text, not as an object.
      sample: a conversation with tools and, if it writes them, a call of PROBE_TOOL.
    """

    tools: bool = False
    calls: bool = False
    as_text: bool = False
    sample: str = ""


class ChatTemplate:
    """One compiled template.

    Attributes:
      options: names of the variables that callers may set.
      reasons: it knows of ``<think>``.
    """

    def __init__(self, source: str, *, name: str, special_tokens: Mapping[str, str] | None = None):
        """Compiles ``source``.

        Args:
          source: the Jinja text.
          name: what error messages call the template, for instance its file.
          special_tokens: texts the template may read by name, e.g. ``{"bos_token": "<s>"}``.

        Raises:
          CheckpointError: the template is too long, has a syntax error, or needs a filter, an include
            or an import that templates do not get.
        """
        if len(source) > MAX_TEMPLATE_CHARS:
            raise CheckpointError(
                f"{name}: the chat template has {len(source)} characters; at most {MAX_TEMPLATE_CHARS}"
            )
        self._special_tokens = dict(special_tokens or {})
        self.reasons = "<think>" in source or "</think>" in source
        try:
            self._template, variables = sandbox.compile_template(source)
        except jinja2.TemplateSyntaxError as error:
            raise CheckpointError(f"{name}: chat template, line {error.lineno}: {error.message}") from error
        except Exception as error:
            raise CheckpointError(f"{name}: the chat template does not compile: {error}") from error
        self.options = frozenset(variables - _RESERVED - self._special_tokens.keys() | _COMMON_OPTIONS)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **options: Any,
    ) -> str:
        """The prompt for these messages.

        A content may be a list of parts: ``{"type": "text", "text": ...}`` and ``{"type": "image"}`` or
        ``{"type": "image_url"}``. Templates that know strings only get the texts joined by line breaks.
        Templates are never shown an image's URL.

        Args:
          messages: mappings with ``role``, ``content`` and what else the template reads. The arguments of
            ``tool_calls`` are objects; templates that want JSON text get that.
          tools: JSON schemas of tools, in OpenAI's form.
          add_generation_prompt: end with the opening of the assistant's turn.
          **options: further variables of the template: booleans, numbers or short strings.

        Raises:
          RequestError: the template rejects the messages, knows no images or exceeds its limits (param
            "messages"), or an option is unknown or no scalar (param "chat_template_kwargs").
        """
        if isinstance(messages, str | bytes) or not all(isinstance(m, Mapping) for m in messages):
            raise RequestError("messages must be a list of objects", param="messages")
        for name, value in options.items():
            self._check_option(name, value)
        adapted = [self._with_calls(self._adapted(message)) for message in messages]
        try:
            return self._run(adapted, list(tools) if tools else None, bool(add_generation_prompt), options)
        except jinja2.UndefinedError as error:
            reason = f"something it needs is missing: {error.message}"
        except jinja2.TemplateError as error:
            reason = str(error.message)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
        reason = re.sub(r"\s+", " ", reason)[:500]
        raise RequestError(f"the chat template rejects these messages: {reason}", param="messages")

    @functools.cached_property
    def accepts(self) -> Accepts:
        """Found out by trying, because templates say nowhere what they can read."""
        try:
            return self._accepted()
        except sandbox.LimitError:
            return Accepts(False, False, False)

    def _accepted(self) -> Accepts:
        text = {"type": "text", "text": _PROBE}
        string = self._try(_PROBE)
        listed = self._try([text])
        strings, parts = _PROBE in string, _PROBE in listed
        if strings and parts:
            # A template that knows no parts may also write the list as it is.
            parts = "".join(string.split()) == "".join(listed.split())
        pictured = self._try([_IMAGE, text]) if parts else ""
        return Accepts(strings, parts, _PROBE in pictured and pictured.split() != listed.split())

    @functools.cached_property
    def tool_use(self) -> ToolUse:
        """Found out by trying, like ``accepts``."""
        try:
            return self._tool_use()
        except sandbox.LimitError:
            return ToolUse()

    def _tool_use(self) -> ToolUse:
        user = self._adapted({"role": "user", "content": _PROBE})
        content = self._adapted({"role": "assistant", "content": ""})
        plain = self._try_all([user], [_PROBE_SCHEMA])
        knows_tools = PROBE_TOOL in plain and _PROBE_KEY in plain
        for as_text in (False, True):
            arguments: Any = {_PROBE_KEY: _PROBE_VALUE}
            if as_text:
                arguments = json.dumps(arguments)
            function = {"name": PROBE_TOOL, "arguments": arguments}
            # Some templates insist on ids of nine characters.
            call = {"id": "hybridjax", "type": "function", "function": function}
            sample = self._try_all([user, {**content, "tool_calls": [call]}], [_PROBE_SCHEMA])
            if _PROBE_VALUE in sample:
                return ToolUse(knows_tools, True, as_text, sample)
        return ToolUse(knows_tools, sample=plain)

    def _try(self, content: Any) -> str:
        return self._try_all([{"role": "user", "content": content}], None)

    def _try_all(self, messages: list[Any], tools: Any) -> str:
        try:
            return self._run(messages, tools, tools is None, {})
        except sandbox.LimitError:
            raise
        except Exception:  # nothing that a stranger's program may not raise
            return ""

    def _run(self, messages: list[Any], tools: Any, add_generation_prompt: bool, options: Any) -> str:
        variables = self._special_tokens | options
        variables |= {
            "messages": messages,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        return sandbox.render(self._template, variables)

    def _adapted(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        content = message.get("content")
        if isinstance(content, str):
            if self.accepts.strings or not self.accepts.parts:
                return message
            return {**message, "content": [{"type": "text", "text": content}]}
        if not isinstance(content, list | tuple):
            return message
        parts = [_checked(part) for part in content]
        if _IMAGE in parts and not self.accepts.images:
            raise RequestError(
                "messages has images, which this model's chat template does not know",
                param="messages",
                code="images_not_supported",
            )
        if self.accepts.parts:
            return {**message, "content": parts}
        return {**message, "content": "\n".join(part["text"] for part in parts)}

    def _with_calls(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        calls = message.get("tool_calls")
        if not calls or not self.tool_use.as_text:
            return message
        written = []
        for call in calls:
            function = call["function"]
            arguments = json.dumps(function["arguments"], ensure_ascii=False)
            written.append({**call, "function": {**function, "arguments": arguments}})
        return {**message, "tool_calls": written}

    def _check_option(self, name: str, value: Any) -> None:
        param = "chat_template_kwargs"
        if name not in self.options:
            known = ", ".join(sorted(self.options))
            raise RequestError(f"chat template option {name!r} is unknown; known: {known}", param=param)
        if value is not None and type(value) not in (bool, int, float, str):
            raise RequestError(
                f"chat template option {name} must be a boolean, a number, a string or null", param=param
            )
        if isinstance(value, str) and len(value) > MAX_OPTION_CHARS:
            raise RequestError(
                f"chat template option {name} has {len(value)} characters; at most {MAX_OPTION_CHARS}",
                param=param,
            )
        if type(value) is int and value.bit_length() > 63:
            raise RequestError(f"chat template option {name} must fit 64 bits", param=param)


def _checked(part: Any) -> dict[str, str]:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind in ("image", "image_url"):
        return _IMAGE
    if kind == "text" and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    raise RequestError(
        "the content of a message must be a string or a list of parts, each a text or an image",
        param="messages",
    )
