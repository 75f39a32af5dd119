"""Whatever text the grammar of strict tools takes, the reply's parser reads the same calls in it."""

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from hybridjax.serving.api import Grammar
from hybridjax.serving.http.tool_grammar import strict_grammar
from hybridjax.structured.source import to_llguidance
from hybridjax.text.reasoning import ReasoningSplitter
from hybridjax.text.tool_calls import CallDelta, Delta, Format, ToolCallParser

STRICT = {
    "type": "object",
    "properties": {
        "a": {"type": "integer"},
        "l": {"type": "array", "items": {"type": "string"}},
        "s": {"type": "string"},
        "e": {"enum": ['"', "red", 5]},
    },
    "required": ["a"],
}
FREE = {"type": "object", "properties": {"l": {"type": "array"}, "a": {"type": "integer"}, "q": {}}}
TOOLS: dict[str, dict[str, Any]] = {"f": STRICT, "g": FREE, "now": {}}
TEXT = [
    *("</parameter>", "\n</parameter>\n", "</function>", "\n</tool_call>", "<tool_call>", "<function="),
    *("<tool_call>\n<function=f>\n", "<function=f>\n", "<function=g>\n", "<function=now>\n", "f>\n", "g>\n"),
    *("<parameter=a>\n", "<parameter=l>\n", "<parameter=q>\n", "<parameter=s>\n", "<parameter=\n", "x", "1"),
    *("</", '"', "\\", "\n", " ", "[", "]", "{", "}", ", ", ": ", '["', '"]', '": ', "é", "\x7f", "<think>"),
    *(
        "</think>",
        '<tool_call>\n{"name": "f", "arguments": {"a": ',
        '<tool_call>\n{"name": "g", "arguments": {',
    ),
    *('"a": ', '"\\u0061": ', '"l": ["', '"s": "', "<parameter=e>\n"),
]
ENDS = ["</think>", "\n</parameter>\n", "</parameter>", '"', "]", "}", "}\n</tool_call>", "</function>"]
ENDS += [
    "\n</tool_call>",
    "1",
    ": 1",
    "5",
    "<parameter=a>\n1\n</parameter>\n",
    '"a": 1',
    "\n<function=now>\n",
]
ENDS += ['\n{"name": "g", "arguments": {}', "now>\n", ">", "x>"]


@pytest.fixture(scope="module")
def tokenizer() -> LLTokenizer:
    return LLTokenizer("byte")


def source_of(form: Format, opened: bool | None) -> str:
    grammar = strict_grammar(form, TOOLS, ["f"], opened=opened)
    assert isinstance(grammar, Grammar)
    return to_llguidance(grammar.kind, grammar.source, 2**16)


def matcher_of(tokenizer: LLTokenizer, source: str) -> LLMatcher:
    matcher = LLMatcher(tokenizer, source)
    assert not matcher.get_error()
    return matcher


def takes(matcher: LLMatcher, text: str) -> bool:
    return matcher.try_consume_tokens(list(text.encode())) == len(text.encode()) and matcher.is_accepting()


def walk(matcher: LLMatcher, draw: random.Random, start: str) -> str | None:
    """A random text of the grammar, made of what calls are made of; None if its end was not found."""
    text = b""

    def take(part: bytes) -> int:
        nonlocal text
        count = matcher.try_consume_tokens(list(part))
        text += part[:count]
        return count

    def fits(part: str) -> bool:
        return matcher.validate_tokens(list(part.encode())) == len(part.encode())

    take(start.encode())
    for _ in range(draw.randrange(2, 30)):
        whole = [part for part in TEXT if fits(part)] if draw.random() < 0.8 else []
        if not take(draw.choice(whole or TEXT).encode()):
            allowed = [i for i, bias in enumerate(matcher.compute_logit_bias()) if bias and i < 256]
            take(bytes(draw.sample(allowed, 1)))
    for _ in range(60):
        if matcher.is_accepting():
            return text.decode()
        whole = [part for part in ENDS if fits(part)]
        if whole:
            take(draw.choice(whole).encode())
        elif not any(take(end.encode()) for end in draw.sample(ENDS, len(ENDS))):
            return None
    return None


def read(form: Format, opened: bool | None, pieces: list[str], incremental: bool) -> Delta:
    splitter = None if opened is None else ReasoningSplitter(opened=opened)
    parser, delta = ToolCallParser(form, TOOLS, incremental=incremental), Delta()
    for piece in pieces:
        delta.add(parser.push(piece if splitter is None else splitter.push(piece).answer))
    delta.add(parser.push("" if splitter is None else splitter.flush().answer))
    delta.add(parser.flush())
    return delta


def check(form: Format, opened: bool | None, text: str) -> list[CallDelta]:
    """Nothing that begins as a call is given up, however it comes, and strict calls keep to the schema."""
    whole = read(form, opened, [text], False)
    openers = ["<tool_call>"] if form == "hermes" else ["<tool_call>", "<function="]
    assert not any(opener in whole.content for opener in openers)
    for incremental in (False, True):
        assert read(form, opened, list(text), incremental) == whole
        assert read(form, opened, [text], incremental) == whole
    for call in whole.calls:
        arguments = json.loads(call.arguments)
        assert isinstance(arguments, dict)
        if call.name == "f":
            assert type(arguments["a"]) is int
            assert all(isinstance(item, str) for item in arguments.get("l", []))
            assert isinstance(arguments.get("l", []), list) and isinstance(arguments.get("s", ""), str)
            assert arguments.get("e", 5) in ('"', "red", 5)
    return whole.calls


@pytest.mark.parametrize("opened", [None, False, True])
@pytest.mark.parametrize("form", ["hermes", "qwen3_coder"])
def test_what_the_grammar_takes_is_read_as_it_says(tokenizer: LLTokenizer, form: Format, opened: bool | None):
    matcher = matcher_of(tokenizer, source_of(form, opened))
    ended, names = 0, list[str | None]()
    for seed in range(600):
        matcher.reset()
        text = walk(matcher, random.Random(seed), "so\n</think>\n" if opened and seed % 8 else "")
        if text is not None:
            ended += 1
            names += [call.name for call in check(form, opened, text)]
    # The walks are worth something.
    assert ended > 300 and names.count("f") > 20 and names.count("g") > 20


XML = "<function=f>\n<parameter=a>\nx\n</parameter>\n</function>\n</tool_call>"
JSON = '<tool_call>\n{"name": "f", "arguments": {"a": "x"}}\n</tool_call>'


def hidden() -> Iterator[tuple[Format, str]]:
    """Calls of the strict tool, with a wrong argument, where something else is or seems to be unfinished."""
    for before in (
        *("<function=g>\n", "<tool_call>\n<function=g>\n", "<tool_call>\n<function=g>\n<tool_call>\n"),
        *("<function=g>\nfoo\n", "<function=g>\n<parameter=q>\n", "<function=g>\n<parameter=\n"),
        "<function=g>\n<parameter=q>\nv\n</parameter>\n",
        "<function=g>\n<parameter=q>\n1\n</parameter>\n<parameter=q>\n2\n</parameter>\n",
        "<function=g>\n<parameter=q>v</parameter>\n\n</tool_call>",
        '<function=g>\n<parameter=l>\n["</parameter></function>',
        f"<function=g>\n<parameter={'q' * 257}>\n",
        '<function=f>\n<parameter=a>\n1\n</parameter>\n<parameter=l>\n["</parameter></function>',
        "<function=f>\n<parameter=a>\n1\n</parameter>\n<parameter=s>\nv</parameter>\n",
        "<function=f>\n<parameter=a>\n1\n</parameter>\n<parameter=s>\nv</parameter></function>",
    ):
        yield "qwen3_coder", before + XML
        yield "qwen3_coder", f"{before}{XML}\n</parameter>\n</function>\n</tool_call>"
        yield "qwen3_coder", f'{before}{json.dumps(XML)[1:-1]}"]\n</parameter>\n</function>\n</tool_call>'
    yield "qwen3_coder", XML.replace("<parameter=a>", "<parameter=a>\n1\n</parameter>\n<parameter=a>")
    quoted = json.dumps(JSON)
    for arguments in ('{"a": "<tool_call>"}', '{"name": "f"}', f'{{"x": {quoted}}}', '{"a": 1, "a": 2}'):
        yield "hermes", f'<tool_call>\n{{"name": "g", "arguments": {arguments}}}\n</tool_call>'
    for arguments in ('{"a": 1, "\\u0061": "x"}', '{"a": 1, "a": "x"}', f'{{"a": 1, "b": {quoted}}}'):
        yield "hermes", f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>'
    calls: dict[Format, str] = {"hermes": JSON, "qwen3_coder": XML}
    for form, call in calls.items():
        for space in ("", "\n", "\t \n", "\x1c\x85\u2003", " " * 64, " " * 65):
            yield form, f"{space}<think>{call}</think>"
            yield form, f"{space}<think></think>{call}"
            yield form, f"{space}<think>{call}"


@pytest.mark.parametrize("opened", [None, False, True])
def test_calls_of_strict_tools_cannot_hide(tokenizer: LLTokenizer, opened: bool | None):
    for form, text in hidden():
        if takes(matcher_of(tokenizer, source_of(form, opened)), text):
            check(form, opened, text)


@pytest.mark.parametrize("form", ["hermes", "qwen3_coder"])
def test_reasoning_may_begin_behind_space(tokenizer: LLTokenizer, form: Format):
    call = JSON if form == "hermes" else XML
    source = source_of(form, False)
    blanks = [chr(i) for i in range(0x3100) if chr(i).isspace()]
    for space in ("", *blanks, "\r\n\n", " " * 64):
        assert takes(matcher_of(tokenizer, source), f"{space}<think>{call}</think>"), repr(space)
        assert not takes(matcher_of(tokenizer, source), f"{space}<think></think>{call}")
    for text in (f"{' ' * 65}<think>{call}</think>", f"\u200b<think>{call}</think>"):
        assert not takes(matcher_of(tokenizer, source), text)
    assert takes(matcher_of(tokenizer, source), f"{' ' * 65}<think>")


@pytest.mark.parametrize(
    "inner",
    [
        *("", "\n", "<parameter=q>v</parameter>", "<parameter=new name>\n<function=f>\n</parameter>\n"),
        '<parameter=l>\n["</parameter>", "\\"</parameter>"]\n</parameter>\n',
        '<parameter=l>\nsay "hi\n</parameter>\n<parameter=a>\n"\n</parameter>\n',
        "<parameter=q>\n1\n</parameter>\n<parameter=q>\n2\n</parameter>\n",
        f"<parameter={'é' * 256}>\n</parameter>\n",
    ],
)
def test_others_may_be_called_with_anything_that_can_be_read(tokenizer: LLTokenizer, inner: str):
    text = f"So: <tool_call>\n<function=g>\n{inner}</function>\n</tool_call> "
    assert takes(matcher_of(tokenizer, source_of("qwen3_coder", None)), text)
    assert [call.name for call in check("qwen3_coder", None, text)] == ["g"]


@pytest.mark.parametrize(
    ("name", "text"),
    [("s", '"</parameter">'), ("l", '["</parameter>", "\\\\", "</function>"]'), ("e", '"'), ("e", "5")],
)
def test_strict_values_may_hold_tags(tokenizer: LLTokenizer, name: str, text: str):
    call = (
        f"<function=f>\n<parameter=a>\n1\n</parameter>\n<parameter={name}>\n{text}\n</parameter>\n</function>"
    )
    assert takes(matcher_of(tokenizer, source_of("qwen3_coder", None)), call)
    (read_call,) = check("qwen3_coder", None, call)
    value = text if text[0] == '"' else json.loads(text)
    assert json.loads(read_call.arguments) == {"a": 1, name: value}
