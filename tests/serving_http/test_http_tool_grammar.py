"""What the grammars let through, as llguidance reads them."""

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from hybridjax.errors import RequestError
from hybridjax.serving.api import Grammar
from hybridjax.serving.http.tool_grammar import behind_reasoning, strict_grammar, tool_grammar
from hybridjax.structured.source import to_llguidance
from hybridjax.text.tool_calls import FORMATS, Format, ToolCallParser

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"$ref": "#/$defs/count"},
        "unit": {"enum": ["C", "F"], "type": "string", "x-shown": True},
    },
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"count": {"type": "integer"}},
}
TOOLS: dict[str, dict[str, Any]] = {"weather": WEATHER, "now": {}}


@pytest.fixture(scope="module")
def tokenizer() -> LLTokenizer:
    return LLTokenizer("byte")


def takes(tokenizer: LLTokenizer, grammar: Grammar, text: str) -> bool:
    """Whether this is a whole text of the grammar."""
    matcher = LLMatcher(tokenizer, to_llguidance(grammar.kind, grammar.source, 2**16))
    assert not matcher.get_error()
    tokens = list(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def hermes(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def plain(name: str, arguments: str) -> str:
    return f'{{"name": "{name}", "parameters": {arguments}}}'


def xml(name: str, arguments: str) -> str:
    inner = "".join(
        f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in json.loads(arguments).items()
    )
    return f"<tool_call>\n<function={name}>\n{inner}</function>\n</tool_call>"


WRITERS = {"hermes": hermes, "json": plain, "qwen3_coder": xml}
PARIS = '{"city": "Paris\\n </p>", "days": 2}'


@pytest.mark.parametrize("form", FORMATS)
def test_calls_and_nothing_else(tokenizer: LLTokenizer, form: Format):
    write = WRITERS[form]
    one = tool_grammar(form, TOOLS, many=False, opened=None)
    for good in (write("weather", PARIS), write("weather", '{"city": "", "unit": "F"}'), write("now", "{}")):
        assert takes(tokenizer, one, good)
        # What the grammar lets through the parser understands.
        parser = ToolCallParser(form, TOOLS, incremental=False)
        delta = parser.push(good)
        delta.add(parser.flush())
        assert delta.content == "" and len(delta.calls) == 1
        assert isinstance(json.loads(delta.calls[0].arguments), dict)
    for bad in (
        "no",
        "",
        write("other", "{}"),
        write("weather", '{"days": 2}'),
        write("weather", '{"city": "", "days": "two"}'),
        write("weather", '{"city": "", "unit": "K"}'),
        write("now", "{}") + "!",
        write("now", "{}") + "\n" + write("now", "{}"),
    ):
        assert not takes(tokenizer, one, bad)


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("hermes", hermes("now", "{}") + "\n" + hermes("weather", PARIS)),
        ("qwen3_coder", xml("now", "{}") + "\n" + xml("weather", PARIS)),
        ("json", f"[{plain('now', '{}')}, {plain('weather', PARIS)}]"),
    ],
)
def test_several_calls(tokenizer: LLTokenizer, form: Format, text: str):
    assert takes(tokenizer, tool_grammar(form, TOOLS, many=True, opened=None), text)
    parser = ToolCallParser(form, TOOLS)
    assert [call.name for call in parser.push(text).calls] == ["now", "weather"]


def test_reasoning_comes_first(tokenizer: LLTokenizer):
    call = hermes("now", "{}")
    opened = tool_grammar("hermes", TOOLS, many=False, opened=True)
    assert takes(tokenizer, opened, f"any <tool_call> thing\n</think>\n\n{call}")
    assert not takes(tokenizer, opened, call)
    closed = tool_grammar("hermes", TOOLS, many=False, opened=False)
    assert takes(tokenizer, closed, call)
    assert takes(tokenizer, closed, f"<think>\nso\n</think>\n\n{call}")
    assert not takes(tokenizer, closed, f"so\n</think>\n\n{call}")


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        (Grammar("json_schema", '{"type": "integer"}', "f"), "5", '"5"'),
        (Grammar("json_schema", "true", "f"), '["any"]', "any"),
        (Grammar("json_object", field="f"), '{"a": [1]}', "[1]"),
        (
            Grammar("json_schema", '{"const": 1, "x-guidance": {"whitespace_flexible": false}}', "f"),
            "1",
            " 1",
        ),
        (Grammar("ebnf", 'root ::= "(" root? ")"', "f"), "(())", "(()"),
        (Grammar("lark", 'start: x | GAP\nx: "a" | "{" x "}"\nGAP: "z"', "f"), "{{a}}", "\n\n\n"),
        (Grammar("regex", "a/\\/b|[/c]", "f"), "a//b", "a"),
    ],
)
def test_answers_behind_reasoning(tokenizer: LLTokenizer, grammar: Grammar, good: str, bad: str):
    opened = behind_reasoning(grammar, True)
    assert opened.field == "f"
    assert takes(tokenizer, opened, f"why\n</think>\n\n{good}")
    assert not takes(tokenizer, opened, f"why\n</think>\n\n{bad}") and not takes(tokenizer, opened, good)
    closed = behind_reasoning(grammar, False)
    assert takes(tokenizer, closed, good) and takes(tokenizer, closed, f"<think>why</think>{good}")
    assert not takes(tokenizer, closed, bad)
    assert behind_reasoning(grammar, None) is grammar


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        *(
            ("json_schema", source)
            for source in (
                *("{", "false", "[]", "[" * 10**5, '{"a":' * 70 + "1" + "}" * 70),
                '{"minimum": 5.00000000000000000001}',
            )
        ),
        *(("ebnf", source) for source in ("", "x ::= y", "root ::= " + "(" * 10**5)),
        ("lark", "start: x" * 10**5),
    ],
    ids=range(10),
)
def test_what_is_wrong_anyway_is_for_the_compiler_to_refuse(kind: Any, source: str):
    broken = Grammar(kind, source, "f")
    assert behind_reasoning(broken, True) == broken
    with pytest.raises(ValueError, match="."):
        to_llguidance(kind, source, 2**16)


@pytest.mark.parametrize("name", ["a>b", "a\nb", "", " a"])
def test_names_that_xml_cannot_say_are_refused(name: str):
    tools = {"f": {"properties": {name: {}}}}
    with pytest.raises(RequestError, match="XML calls cannot name"):
        tool_grammar("qwen3_coder", tools, many=False, opened=None)
    assert json.dumps(name) in tool_grammar("hermes", tools, many=False, opened=None).source


DEFINITIONS = {
    "color": {"enum": ["red", "blue"], "type": "string"},
    "count": {"type": "integer", "minimum": 3},
    "anything": {},
}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"$ref": "#/$defs/color"}, {"red": "red", "blue": "blue"}, ['"red"', "green", ""]),
        ({"allOf": [{"$ref": "#/$defs/color"}]}, {"red": "red"}, ['"red"', "green"]),
        ({"const": "x"}, {"x": "x"}, ["y", '"x"']),
        ({"const": 5}, {"5": 5}, ["6", '"5"']),
        ({"anyOf": [{"enum": ["a", "b"]}, {"type": "null"}]}, {"a": "a", "null": None}, ["c", '"a"', "None"]),
        ({"type": ["string", "null"], "enum": ["a", None]}, {"a": "a", "null": None}, ["b", ""]),
        ({"enum": ["a", 1, [2], None, True]}, {"a": "a", "1": 1, "[2]": [2], "true": True}, ["2", '"a"']),
        (
            {"anyOf": [{"$ref": "#/$defs/color"}, {"$ref": "#/$defs/count"}, {"type": "null"}]},
            {"red": "red", "4": 4, "null": None},
            ["2", "x", '"red"'],
        ),
        ({"enum": ["", "b\n", " c ", "\n", "\x7f"]}, {t: t for t in ("", "b\n", " c ", "\n", "\x7f")}, ["b"]),
        ({"enum": ["a</parameter>", "b"]}, {"b": "b"}, ["a</parameter>"]),
        ({"type": ["string", "boolean"]}, {"12": "12", "true": True}, []),
        ({"$ref": "#/$defs/anything"}, {"5": 5, '"x"': "x", "null": None}, ["x"]),
        ({"$ref": "#/properties/other"}, {"free": "free"}, []),
    ],
    ids=str,
)
def test_xml_values_keep_to_the_schema(
    tokenizer: LLTokenizer, schema: Any, good: dict[str, Any], bad: list[str]
):
    properties = {"value": schema, "other": {"type": "string"}}
    tools = {"f": {"properties": properties, "required": ["value"], "$defs": DEFINITIONS}}
    grammar = tool_grammar("qwen3_coder", tools, many=False, opened=None)
    for text, value in good.items():
        call = xml("f", json.dumps({"value": text}))
        assert takes(tokenizer, grammar, call)
        delta = ToolCallParser("qwen3_coder", tools, incremental=False).push(call)
        assert json.loads(delta.calls[0].arguments) == {"value": value}
    for text in bad:
        assert not takes(tokenizer, grammar, xml("f", json.dumps({"value": text})))


def test_values_that_xml_cannot_say_are_refused():
    tools = {"f": {"properties": {"value": {"const": "a</parameter>"}}}}
    with pytest.raises(RequestError, match="XML calls cannot write"):
        tool_grammar("qwen3_coder", tools, many=False, opened=None)


@pytest.mark.parametrize("form", FORMATS)
def test_numbers_that_cannot_be_kept_to_are_refused(form: Format):
    tools = {"f": {"properties": {"value": {"type": "integer", "maximum": 2**63}}}}
    with pytest.raises(RequestError, match="tools: f: maximum is 9223372036854775808;") as error:
        tool_grammar(form, tools, many=False, opened=None)
    assert error.value.param == "tools"


@pytest.mark.parametrize("form", ["hermes", "json"])
@pytest.mark.parametrize("closed", [False, True])
def test_an_escaped_name_is_no_other_property(tokenizer: LLTokenizer, form: Format, closed: bool):
    schema = {"properties": {"a": {"type": "integer"}, "s": {"type": "string"}}}
    tools = {"f": schema | ({"additionalProperties": False} if closed else {})}
    grammar, write = tool_grammar(form, tools, many=False, opened=None), WRITERS[form]
    assert takes(tokenizer, grammar, write("f", '{"a": 1, "s": "\\n\\"\\\\"}'))
    for key in ("\\u0061", "a"):
        assert not takes(tokenizer, grammar, write("f", f'{{"a": 1, "s": "", "{key}": "x"}}'))
    # Where there are no other properties, nothing is wrong with escapes.
    assert takes(tokenizer, grammar, write("f", '{"s": "\\u001b"}')) is closed


def test_xml_names_that_are_too_long_to_be_read_are_refused():
    with pytest.raises(RequestError, match="XML calls cannot name"):
        tool_grammar("qwen3_coder", {"f": {"properties": {"n" * 257: {}}}}, many=False, opened=None)
    tools = {"f": {"properties": {"n" * 256: {}}}}
    text = xml("f", json.dumps({"n" * 256: "v"}))
    assert takes(LLTokenizer("byte"), tool_grammar("qwen3_coder", tools, many=False, opened=None), text)
    assert ToolCallParser("qwen3_coder", tools).push(text).calls[0].name == "f"


def bare(name: str, arguments: str) -> str:
    """Qwen3-Coder's form without the outer tag, which the parser takes, too."""
    return xml(name, arguments).removeprefix("<tool_call>\n").removesuffix("\n</tool_call>")


@pytest.mark.parametrize("write", [hermes, xml, bare])
def test_strict_tools_bind_only_what_begins_as_a_call(tokenizer: LLTokenizer, write):
    form = "hermes" if write is hermes else "qwen3_coder"
    grammar = strict_grammar(form, TOOLS, ["weather"], opened=None)
    assert grammar is not None and grammar.field == "tools"
    call = write("weather", PARIS)
    free = ("", "no call", "a < b <tool", "<tool_cal l>\n", "</tool_call>", '{"name": "weather"}')
    for text in (*free, call, call + call, f"Let me see.\n{call}\n", f"{call}\n{call} and\n<b>{call}"):
        assert takes(tokenizer, grammar, text), text
    for arguments in ('{"days": 2}', '{"city": "", "days": "two"}', '{"city": "", "unit": "K"}'):
        assert not takes(tokenizer, grammar, write("weather", arguments)), arguments
        assert not takes(tokenizer, grammar, f"Well. {call} Again: {write('weather', arguments)}")
    # A tool that is not strict may be called with whatever it likes, one that there is not may not.
    assert takes(tokenizer, grammar, write("now", '{"any": "thing"}') + " then " + call)
    assert not takes(tokenizer, grammar, write("other", "{}"))
    assert not takes(tokenizer, grammar, "the tag <tool_call> alone")
    text = f"One. {call} Two."
    delta = ToolCallParser(form, TOOLS, incremental=False).push(text)
    assert [one.name for one in delta.calls] == ["weather"]


def test_strict_tools_let_the_model_think(tokenizer: LLTokenizer):
    call, bad = hermes("weather", PARIS), hermes("weather", "{}")
    opened = strict_grammar("hermes", TOOLS, ["weather"], opened=True)
    assert opened is not None
    assert takes(tokenizer, opened, f"maybe {bad} or\n</think>\n\nSo: {call}")
    assert takes(tokenizer, opened, "hm\n</think>\n\nNo.")
    assert not takes(tokenizer, opened, f"hm\n</think>\n\n{bad}")
    closed = strict_grammar("hermes", TOOLS, ["weather"], opened=False)
    assert closed is not None
    for text in (
        "",
        "No.",
        call,
        f"So: {call} <think>",
        "<thin",
        f"<think>{bad}</think>\n\n{call}",
        "<think></think>",
    ):
        assert takes(tokenizer, closed, text), text
    for text in (bad, f"a {bad}", f"<think></think>{bad}", f"{call}<think>{bad}</think>"):
        assert not takes(tokenizer, closed, text), text


def test_what_cannot_be_told_from_text_is_not_held_to_be_strict():
    assert strict_grammar("json", TOOLS, ["weather"], opened=None) is None
    assert strict_grammar("hermes", TOOLS, [], opened=None) is None
    tools = {"bad": {"properties": {"a>b": {}}}, "good": {}}
    with pytest.raises(RequestError, match="XML calls cannot name"):
        strict_grammar("qwen3_coder", tools, ["bad"], opened=None)
    assert strict_grammar("qwen3_coder", tools, ["good"], opened=None) is not None
