"""Grammars (llguidance's Lark) that make a model call a tool, and that let it think before it obeys one."""

import json
from collections.abc import Collection, Mapping
from typing import Any

from hybridjax.errors import RequestError
from hybridjax.serving.api import Grammar
from hybridjax.serving.http.messages import depth_of
from hybridjax.text import reasoning, tool_calls
from hybridjax.text.parameters import Parameters, Values, as_text
from hybridjax.text.tool_readers import MAX_NAME, PARAMETER_END, Tools, is_written_as_json

# Unbounded, a model can pad JSON to the token limit.
_BOUNDED = {"whitespace_pattern": r"[ \n\r\t]{1,64}"}
MAX_SOURCE = 2**16
MAX_JSON_DEPTH = 64
_FUNCTION_END = "</function>"
_ANY_TEXT, _SOME_TEXT = "/(?s:.*)/", "/(?s:.+)/"
_BLANK = r"\s\x1c-\x1f"  # what Python strips
_NO_END = "/(?s:.*)<\\/parameter>(?s:.*)/"
# A parameter's text, with the tag that ends it.
_LINES = f'LINES: ({_ANY_TEXT} & ~{_NO_END}) "\\n{PARAMETER_END}"'
# The parameters of a call that is free, read as ``XmlReader`` reads them.
_FREE_XML = [
    rf"NAME: /[^>{_BLANK}]([^>\n]{{0,{MAX_NAME - 2}}}[^>{_BLANK}])?/",
    r"SPACE: /[ \n\r\t]{1,64}/",
    f'FREE_TEXT: ({_ANY_TEXT} & ~{_NO_END}) "{PARAMETER_END}"',
    rf'OUTSIDE: /[^"]*/ & ~{_NO_END}',
    r'STRING: /"([^"\\\x00-\x1f]|\\[^\x00-\x1f])*/',
    # A line break ends a string that JSON could not go on with.
    r'FREE_JSON: (OUTSIDE STRING "\"")* OUTSIDE (STRING /\\?[\x00-\x1f]/ '
    f'({_ANY_TEXT} & ~{_NO_END}))? "{PARAMETER_END}"',
]


def tool_grammar(form: tool_calls.Format, tools: Tools, *, many: bool, opened: bool | None) -> Grammar:
    """One call or more, and nothing else.

    Args:
      form: how calls look.
      tools: that may be called, and the JSON schemas of their parameters.
      many: allow more than one call.
      opened: whether the reply begins within the reasoning, which then comes first; None: there is none.

    Raises:
      RequestError: a parameter's name cannot be written in this form, or a number in a schema not be kept to.
    """
    _check_numbers(tools)
    build = {"hermes": _hermes, "qwen3_coder": _qwen3_coder, "json": _json}[form]
    rules: list[str] = []
    names = " | ".join(build(i, name, schema, rules) for i, (name, schema) in enumerate(tools.items()))
    rules.append(f"call: {names}")
    if form == "json":
        rules.append('calls: "[" call (", " call)* "]"' if many else "calls: call")
    else:
        rules.append('calls: call ("\\n" call)*' if many else "calls: call")
    return _lark("calls", opened, rules, "tool_choice")


def strict_grammar(
    form: tool_calls.Format, tools: Tools, strict: Collection[str], *, opened: bool | None
) -> Grammar | None:
    """Any text and any calls, but what begins as a call is one, and those of strict tools keep to the schema.

    Args:
      form: how calls look. None is returned for "json", where nothing says whether an object is a call.
      tools: that may be called, and the JSON schemas of their parameters.
      strict: names of strict tools.
      opened: see ``tool_grammar``. In the reasoning, nothing is a call.

    Raises:
      RequestError: as ``tool_grammar``, for strict tools.
    """
    if form == "json" or not strict:
        return None
    _check_numbers({name: tools[name] for name in strict})
    rules: list[str] = []
    begun = [tool_calls.OPEN] if form == "hermes" else [tool_calls.OPEN, tool_calls.FUNCTION]
    calls: list[list[str]] = [[] for _ in begun]
    for i, (name, schema) in enumerate(tools.items()):
        if form == "hermes":
            calls[0].append(_hermes(i, name, schema if name in strict else {}, rules, tool_calls.OPEN))
            continue
        inner = f"inner{i}"
        if name in strict:
            rules.append(f"{inner}: {_parameters(i, schema, rules)} {_text(_FUNCTION_END)}")
        else:
            rules.append(f"{inner}: {_free_parameters(i, schema, rules)} {_text(_FUNCTION_END)}")
        end = _text("\n" + tool_calls.CLOSE)
        calls[0].append(f"{_text(f'{chr(10)}{tool_calls.FUNCTION}{name}>{chr(10)}')} {inner} {end}")
        calls[1].append(f"{_text(f'{name}>{chr(10)}')} {inner} {end}?")
    rules += [f"begun{k}: {' | '.join(each)}" for k, each in enumerate(calls)]
    anywhere = "|".join(begun)
    rules.append(f"TEXT: {_SOME_TEXT} & ~/(?s:.*)({anywhere})(?s:.*)/")
    rules += [f"UPTO{k}: TEXT? {_text(opener)}" for k, opener in enumerate(begun)]
    rules.append(f"free: ({' | '.join(f'UPTO{k} begun{k}' for k in range(len(begun)))})* TEXT?")
    if opened is False:
        # What begins with the reasoning's tag is reasoning, not text.
        opening = f"[{_BLANK}]{{0,{reasoning.MAX_SPACE}}}{reasoning.OPEN}"
        rules.append(f"FIRST: TEXT & ~/{opening}(?s:.*)/")
        rules += [f"FIRST_UPTO{k}: FIRST? {_text(opener)}" for k, opener in enumerate(begun)]
        first = " | ".join(f"FIRST_UPTO{k} begun{k} free" for k in range(len(begun)))
        start, *reasoned = _start("free", True)
        rules += [f"start: OPEN {start.removeprefix('start: ')} | {first} | FIRST?", *reasoned]
        rules.append(f"OPEN: /{opening}/")
    else:
        rules += _start("free", opened)
    return Grammar("lark", "\n".join(rules) + "\n", "tools")


def _check_numbers(tools: Tools) -> None:
    from hybridjax.structured.schema_numbers import check_numbers

    for name, schema in tools.items():
        try:
            check_numbers(schema)
        except ValueError as error:
            raise RequestError(f"tools: {name}: {error}", param="tools") from error


def behind_reasoning(grammar: Grammar, opened: bool | None) -> Grammar:
    """What holds for the answer, with the reasoning before it free. A wrong grammar stays as it is: whoever
    compiles it says what is wrong."""
    if opened is None or len(grammar.source) > MAX_SOURCE:
        return grammar
    try:
        body = _body(grammar)
    except (ValueError, RecursionError):
        return grammar
    return _lark("answer", opened, [f"answer: {body}"], grammar.field)


def _body(grammar: Grammar) -> str:
    """A grammar within another; raises ValueError for a wrong one."""
    from hybridjax.structured.ebnf import ebnf_to_lark
    from hybridjax.structured.schema_numbers import check_numbers, loads_exactly

    match grammar.kind:
        case "json_schema" | "json_object":
            schema = json.loads(grammar.source or '{"type": "object"}')
            schema = {} if schema is True else schema
            if not isinstance(schema, dict) or depth_of(schema) > MAX_JSON_DEPTH:
                raise ValueError("no schema")
            check_numbers(loads_exactly(grammar.source or "{}"))
            return _json_rule(schema)
        case "regex":
            return f"/{_slashes_escaped(grammar.source)}/"
        case "ebnf":
            return f"%lark {{\n{ebnf_to_lark(grammar.source)}\n}}"
        case "lark":
            return f"%lark {{\n{grammar.source}\n}}"


def _lark(body: str, opened: bool | None, rules: list[str], field: str) -> Grammar:
    return Grammar("lark", "\n".join([*_start(body, opened), *rules]) + "\n", field)


def _start(body: str, opened: bool | None) -> list[str]:
    if opened is None:
        return [f"start: {body}"]
    rules = [
        f"start: reasoning GAP {body}" if opened else f"start: (OPEN reasoning GAP)? {body}",
        f"reasoning[suffix={_text(reasoning.CLOSE)}]: {_ANY_TEXT}",
        "GAP: /\\n{0,2}/",
    ]
    return rules if opened else [*rules, f"OPEN: {_text(reasoning.OPEN)}"]


def _hermes(index: int, name: str, schema: Mapping[str, Any], rules: list[str], written: str = "") -> str:
    """A call, of which ``written`` is there already."""
    head = f'{tool_calls.OPEN}\n{{"name": {json.dumps(name)}, "arguments": '.removeprefix(written)
    rules.append(f"args{index}: {_schema({**schema, 'type': 'object'})}")
    rules.append(f"call{index}: {_text(head)} args{index} {_text('}' + chr(10) + tool_calls.CLOSE)}")
    return f"call{index}"


def _json(index: int, name: str, schema: Mapping[str, Any], rules: list[str]) -> str:
    heads = [_text(f'{{"name": {json.dumps(name)}, "{key}": ') for key in ("arguments", "parameters")]
    rules.append(f"args{index}: {_schema({**schema, 'type': 'object'})}")
    rules.append(f'call{index}: ({" | ".join(heads)}) args{index} "}}"')
    return f"call{index}"


def _qwen3_coder(index: int, name: str, schema: Mapping[str, Any], rules: list[str]) -> str:
    head = _text(f"{tool_calls.OPEN}\n{tool_calls.FUNCTION}{name}>\n")
    end = _text(f"{_FUNCTION_END}\n{tool_calls.CLOSE}")
    rules.append(f"call{index}: {head} {_parameters(index, schema, rules)} {end}")
    return f"call{index}"


def _parameters(index: int, schema: Mapping[str, Any], rules: list[str]) -> str:
    """The parameters in the schema's order, those not required may be left out."""
    parts: list[str] = []
    known = Parameters(schema)
    definitions = _definitions(schema)
    for place, (key, value) in enumerate(known.schemas.items()):
        if not _can_be_named(key):
            raise RequestError(
                f"tools has a parameter {key[:64]!r}, which XML calls cannot name", param="tools"
            )
        rule = f"p{index}_{place}"
        head, values = _text(f"<parameter={key}>\n"), known.values(key)
        if "string" in values.types:
            _once(rules, _LINES)
            rules.append(f'{rule}: {head} LINES "\\n"')
        else:
            whole = {**definitions, **value} if isinstance(value, Mapping) else {}
            rules.append(f"{rule}_value: {_one_of(key, values, whole)}")
            rules.append(f"{rule}: {head} {rule}_value {_text(f'{chr(10)}{PARAMETER_END}{chr(10)}')}")
        parts.append(rule if key in known.required else f"{rule}?")
    return " ".join(parts)


def _free_parameters(index: int, schema: Mapping[str, Any], rules: list[str]) -> str:
    """Any parameters, in any order, any of them again."""
    _once(rules, *_FREE_XML)
    known = Parameters(schema)
    names = [key for key in known.schemas if _can_be_named(key) and is_written_as_json(known.values(key))]
    if names:
        listed = " | ".join(map(_text, names))
        rules.append(f'JSON{index}: "<parameter=" ({listed}) ">"')
        rules.append(f'TEXT{index}: "<parameter=" (NAME & ~({listed})) ">"')
        rules.append(f"free{index}: JSON{index} FREE_JSON | TEXT{index} FREE_TEXT")
    else:
        _once(rules, 'NAMED: "<parameter=" NAME ">"')
        rules.append(f"free{index}: NAMED FREE_TEXT")
    return f"SPACE? (free{index} SPACE?)*"


def _can_be_named(key: str) -> bool:
    return 0 < len(key) <= MAX_NAME and key == key.strip() and ">" not in key and "\n" not in key


def _once(rules: list[str], *shared: str) -> None:
    rules += [rule for rule in shared if rule not in rules]


def _one_of(name: str, values: Values, schema: Mapping[str, Any]) -> str:
    """A value that is listed, as text, or one of another type than string, as JSON."""
    words = [as_text(value) for value in values.listed]
    if values.types or not words:
        words = [value for value in values.listed if isinstance(value, str)]
    usable = [word for word in words if PARAMETER_END not in word]
    if words and not (usable or values.types):
        raise RequestError(
            f"tools has a parameter {name[:64]!r} whose values all contain {PARAMETER_END}, which XML calls "
            "cannot write",
            param="tools",
        )
    if not words:
        return _schema(schema)
    options = [_text(word) for word in dict.fromkeys(usable)]
    if values.types:
        others = sorted(values.all_types - {"string"})
        options.append(_schema({"allOf": [schema, {"type": others}], **_definitions(schema)}))
    return " | ".join(options)


def _definitions(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {key: schema[key] for key in ("$defs", "definitions") if key in schema}


def _json_rule(schema: Mapping[str, Any], **options: Any) -> str:
    own = schema.get("x-guidance")
    options = {**_BOUNDED, **options, **(own if isinstance(own, dict) else {})}
    return f"%json {json.dumps({**schema, 'x-guidance': options})}"


def _schema(schema: Mapping[str, Any]) -> str:
    """Keywords that llguidance does not know are let through instead of refused."""
    from hybridjax.structured.schema_names import escapes_of

    return _json_rule(schema, lenient=True, **escapes_of(schema))


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _slashes_escaped(pattern: str) -> str:
    """A slash would end the expression; one that is escaped already stays."""
    escaped, out = False, []
    for character in pattern:
        out.append("\\/" if character == "/" and not escaped else "\\n" if character == "\n" else character)
        escaped = character == "\\" and not escaped
    return "".join(out)
