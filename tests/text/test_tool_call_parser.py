import json
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridjax.text.tool_calls import FORMATS, CallDelta, Delta, Format, ToolCallParser, detect

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "deep": {"type": "object", "properties": {}},
        "unit": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "exact": {"type": "boolean"},
        "any": {},
    },
}
TOOLS: dict[str, dict[str, Any]] = {"weather": WEATHER, "now": {}}


def parse(form: Format, text: str, cuts: Iterable[int] = (), **options: Any) -> Delta:
    parser, delta, start = ToolCallParser(form, TOOLS, **options), Delta(), 0
    for cut in [*cuts, len(text)]:
        delta.add(parser.push(text[start : start + cut]))
        start += cut
    delta.add(parser.flush())
    assert parser.calls == len(delta.calls)
    return delta


def both(form: Format, text: str, **options: Any) -> Delta:
    """As it is reported whole; in pieces it must be the same."""
    whole = parse(form, text, incremental=False, **options)
    assert parse(form, text, [1] * len(text), **options) == whole
    return whole


def call(index: int, name: str, arguments: str) -> CallDelta:
    return CallDelta(index, name, arguments)


PARIS = '{"city": "Paris", "days": 2}'


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (f'<tool_call>\n{{"name": "weather", "arguments": {PARIS}}}\n</tool_call>', "", [PARIS]),
        (f'Let me see.\n\n<tool_call>{{"name":"weather","arguments":{PARIS}}}', "Let me see.", [PARIS]),
        (f'<tool_call>{{"arguments": {PARIS}, "name": "weather"}}</tool_call>\n', "", [PARIS]),
        ('<tool_call>{"name": "weather", "id": [1], "parameters": {}}</tool_call>', "", ["{}"]),
        ('<tool_call>{"name": "weather"}</tool_call> \n Done. ', "Done. ", ["{}"]),
        ('a <tool_call>{"name": "weather"}</tool_call> b', "a b", ["{}"]),
        ('<tool_call>{"name": "\\u0077eather"}</tool_call>', "", ["{}"]),
        (
            '<tool_call>{"name": "weather", "arguments": {"city": "</tool_call>}\\""}}</tool_call>',
            "",
            ['{"city": "</tool_call>}\\""}'],
        ),
        (
            f'<tool_call>\n{{"name": "weather", "arguments": {PARIS}}}\n</tool_call>\n'
            '<tool_call>\n{"name": "weather", "arguments": {}}\n</tool_call>',
            "",
            [PARIS, "{}"],
        ),
    ],
)
def test_hermes(text: str, content: str, calls: list[str]):
    delta = both("hermes", text)
    assert delta == Delta(content=content, calls=[call(i, "weather", c) for i, c in enumerate(calls)])


@pytest.mark.parametrize(
    "text",
    [
        "plain\n text \n",
        "<tool_call>",
        "<tool_call>\n",
        "<tool_call>nothing</tool_call>",
        '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
        '<tool_call>{"arguments": {}}</tool_call>',
        "<tool_call>{}</tool_call>",
        '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "weather", "name": "weather"}</tool_call>',
        '<tool_call>{"name": "weather", "arguments": "{}"}</tool_call>',
        '<tool_call>{"name": "weather", "arguments": []}</tool_call>',
        '<tool_call>{"name": "weather", }</tool_call>',
        '<tool_call>{"name": "weather"',
        "</tool_call> < <tool <tool_calls>",
        "  \n ",
    ],
)
@pytest.mark.parametrize("form", FORMATS)
def test_what_is_no_call_stays_text(text: str, form: Format):
    assert both(form, text) == Delta(content=text)


def test_a_call_behind_a_malformed_one_is_found():
    good = '<tool_call>{"name": "weather"}</tool_call>'
    for bad in ("<tool_call>", "<tool_call>oops ", '<tool_call>{"name": "oops"}</tool_call>'):
        assert both("hermes", bad + good) == Delta(content=bad.rstrip(), calls=[call(0, "weather", "{}")])


def test_arguments_that_break_off():
    text = 'a <tool_call>{"name": "weather", "arguments": {"days": 1x}}</tool_call> b'
    assert parse("hermes", text, incremental=False) == Delta(content=text)
    # Reported while they came: what is reported stays, and the rest is text.
    expected = Delta(content="ax}}</tool_call> b", calls=[call(0, "weather", '{"days": 1')])
    assert parse("hermes", text) == parse("hermes", text, [1] * len(text)) == expected
    cut_off = '<tool_call>{"name": "weather", "arguments": {"city": "Par'
    assert parse("hermes", cut_off, incremental=False) == Delta(content=cut_off)
    assert parse("hermes", cut_off) == Delta(calls=[call(0, "weather", '{"city": "Par')])


def test_names_come_first_and_arguments_as_they_are_written():
    parser = ToolCallParser("hermes", TOOLS)
    text = f'Hm. <tool_call>{{"name": "weather", "arguments": {PARIS}}}</tool_call>'
    deltas = [delta for delta in map(parser.push, text) if delta]
    assert "".join(delta.content for delta in deltas) == "Hm."
    calls = [delta.calls[0] for delta in deltas if delta.calls]
    assert calls[0] == call(0, "weather", "{")
    assert all(part.name is None and part.index == 0 for part in calls[1:])
    assert [part.arguments for part in calls] == list(PARIS)
    assert not parser.flush()


XML = """Sure.
<tool_call>
<function=weather>
<parameter=city>
 Paris "on"
the </parameter
</parameter>
<parameter=days>
2
</parameter>
<parameter=deep>{"a": [1, true]}</parameter>
<parameter=unit>null</parameter>
<parameter=exact>True</parameter>
<parameter=other>5</parameter>
</function>
</tool_call>
<tool_call><function=now></function></tool_call>
"""
XML_ARGUMENTS = {
    "city": ' Paris "on"\nthe </parameter',
    "days": 2,
    "deep": {"a": [1, True]},
    "unit": None,
    "exact": True,
    "other": "5",
}


def test_qwen3_coder():
    delta = both("qwen3_coder", XML)
    assert delta.content == "Sure."
    assert [(c.index, c.name) for c in delta.calls] == [(0, "weather"), (1, "now")]
    assert [json.loads(c.arguments) for c in delta.calls] == [XML_ARGUMENTS, {}]
    # The outer tag may be missing.
    bare = XML.replace("<tool_call>", "").replace("</tool_call>", "")
    assert [json.loads(c.arguments) for c in both("qwen3_coder", bare).calls] == [XML_ARGUMENTS, {}]


def test_a_long_text_parameter_comes_as_it_is_written():
    parser = ToolCallParser("qwen3_coder", TOOLS)
    parser.push("<function=weather><parameter=city>\n")
    assert [parser.push("abc").calls[0].arguments for _ in range(3)] == ["abc"] * 3


@pytest.mark.parametrize(
    "text",
    [
        "<function=oops></function>",
        "<function=weather",
        "<function=" + "w" * 300 + ">",
        "<tool_call><function=weather</tool_call>",
        "<tool_call> weather",
    ],
)
def test_xml_that_is_no_call_stays_text(text: str):
    assert both("qwen3_coder", text) == Delta(content=text)


@pytest.mark.parametrize(
    "text",
    [
        "<function=weather>oops</function>",
        "<function=weather><parameter=city>a</parameter>oops</function>",
        "<function=weather><parameter=city>a",
    ],
)
def test_xml_that_breaks_off_stays_text_if_reported_whole(text: str):
    assert parse("qwen3_coder", text, incremental=False) == Delta(content=text)
    pieces = parse("qwen3_coder", text, [1] * len(text))
    assert pieces == parse("qwen3_coder", text) and pieces.calls[0].name == "weather"


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("deep", '{"a": "</parameter>", "b\\"</function>": 1}', {"a": "</parameter>", 'b"</function>': 1}),
        ("deep", '{"a": "</parameter>"}\n', {"a": "</parameter>"}),
        ("days", '"', '"'),
        ("days", '5 "\\', '5 "\\'),
        ("days", '"a\n b"\n', '"a\n b"\n'),
    ],
)
def test_a_tag_within_a_json_string_ends_no_parameter(name: str, text: str, value: Any):
    tail = "<parameter=exact>true</parameter>"
    xml = f"<function=weather><parameter={name}>\n{text}\n</parameter>{tail}</function>"
    assert json.loads(both("qwen3_coder", xml).calls[0].arguments) == {name: value, "exact": True}


def test_of_a_repeated_parameter_the_first_value_holds():
    names = {"city": ("a", "b"), "days": ("1", "2"), "new": ("", "</function>")}
    values = (f"<parameter={name}>{pair[i]}</parameter>" for i in (0, 1) for name, pair in names.items())
    delta = both("qwen3_coder", f"<function=weather>{''.join(values)}</function>")
    assert json.loads(delta.calls[0].arguments) == {"city": "a", "days": 1, "new": ""} and not delta.content


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ('{"name": "weather", "parameters": {"days": 1}}', ['{"days": 1}']),
        (' \n{"name": "weather", "arguments": {}}\n', ["{}"]),
        ('[{"name": "weather", "arguments": {}}, {"name": "weather"}]', ["{}", "{}"]),
        ('{"name": "weather"}; {"name": "weather"}', ["{}", "{}"]),
    ],
)
def test_plain_json(text: str, calls: list[str]):
    assert both("json", text) == Delta(calls=[call(i, "weather", c) for i, c in enumerate(calls)])


@pytest.mark.parametrize(
    "text", ['{"name": "Anna", "age": 5}', '[1, {"name": "weather"}]', 'so {"name": "weather"}', "[]", "5"]
)
def test_json_that_is_no_call_stays_text(text: str):
    assert both("json", text) == Delta(content=text)


def test_text_behind_json_calls_stays():
    delta = both("json", '{"name": "weather"} and, {"name": "weather"}')
    assert delta == Delta(content='and, {"name": "weather"}', calls=[call(0, "weather", "{}")])


def test_calls_beyond_the_limit_are_dropped():
    text = 'a<tool_call>{"name": "weather"}</tool_call>\n<tool_call>{"name": "now"}</tool_call>b'
    assert both("hermes", text, max_calls=1) == Delta(content="ab", calls=[call(0, "weather", "{}")])


PIECES = {
    "hermes": ["<tool_call>", "</tool_call>", "<tool_", '{"name": "weather"', ', "arguments": ', "{", "}"],
    "qwen3_coder": [
        *("<tool_call>", "</tool_call>", "<function=", "weather", ">", "</function>", "\n"),
        *("<parameter=", "city", "days", "</parameter>", "</para"),
    ],
    "json": ["[", "]", '{"name": "weather"', ', "parameters": {"days": ', "}", ";"],
}
COMMON = ["\n", " ", "a", "5", '"', "\\", ",", '{"name": "weather", "arguments": {"days": [1]}}']
CUTS = st.lists(st.integers(1, 9), max_size=60)


@pytest.mark.parametrize("form", FORMATS)
@settings(max_examples=300, deadline=None)
@given(data=st.data(), cuts=CUTS, incremental=st.booleans())
def test_any_cutting_gives_the_same(form: Format, data: st.DataObject, cuts: list[int], incremental: bool):
    pieces = st.sampled_from(PIECES[form] + COMMON) | st.text(max_size=3)
    text = data.draw(st.lists(pieces, max_size=14).map("".join))
    whole = parse(form, text, incremental=incremental)
    assert parse(form, text, cuts, incremental=incremental) == whole
    for made in whole.calls:
        assert made.name in TOOLS
        if not incremental:
            assert isinstance(json.loads(made.arguments), dict)
    if not whole.calls:
        assert whole.content == text


VALUES = st.recursive(st.none() | st.integers() | st.text(), st.lists, max_leaves=5)
ARGUMENTS = st.dictionaries(st.text(max_size=5), VALUES, max_size=3)


@settings(deadline=None)
@given(st.lists(ARGUMENTS, min_size=1, max_size=3), CUTS, st.text(alphabet="ab \n<", max_size=5))
def test_calls_come_out_as_they_went_in(calls: list[dict[str, Any]], cuts: list[int], before: str):
    wanted = [json.dumps(arguments, ensure_ascii=False) for arguments in calls]
    text = before + "\n".join(
        f'<tool_call>\n{{"name": "weather", "arguments": {arguments}}}\n</tool_call>' for arguments in wanted
    )
    for incremental in (True, False):
        delta = parse("hermes", text, cuts, incremental=incremental)
        assert [made.arguments for made in delta.calls] == wanted
        assert delta.content == before.rstrip()


UNITS = [
    "<tool_call>",
    "<function=weather><parameter=city>",
    '<function=weather><parameter=days>"\\',
    '<tool_call>{"',
    "<function=weather>",
    "\n{",
    "[",
]


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("unit", [*UNITS, " "])
def test_long_texts_take_linear_time(form: Format, unit: str):
    """With time that grew with the square of the length, this would not end."""
    text = unit * (2**18 // len(unit))
    assert parse(form, text, incremental=False) == Delta(content=text)
    text = unit * (2**16 // len(unit))
    assert parse(form, text, [1] * len(text), incremental=False) == Delta(content=text)


@pytest.mark.parametrize(
    ("sample", "form"),
    [
        ('<tool_call>\n{"name": "Probe", "arguments": {}}\n</tool_call>', "hermes"),
        ("<tool_call>\n<function=Probe>\n<parameter=a>\n1\n</parameter>", "qwen3_coder"),
        ('{"name": "Probe", "parameters": {}}', "json"),
        ('{"name":"Probe","arguments":{"a": 1}}', "json"),
        ('{"name": "Probe", "description": "", "parameters": {}}', None),
        ("<|tool|>Probe", None),
        ("", None),
    ],
)
def test_the_format_is_found_in_what_a_template_writes(sample: str, form: Format | None):
    assert detect(sample, "Probe") == form
