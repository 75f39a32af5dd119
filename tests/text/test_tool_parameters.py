"""What schemas say about the parameters of tools, and how text becomes their values."""

from typing import Any

import pytest

from hybridjax.text.parameters import Parameters, Values, as_json

DEFINITIONS = {
    "color": {"enum": ["red", "blue"], "type": "string"},
    "count": {"type": "integer"},
    "list": {"prefixItems": [{}, {"type": "integer"}]},
    "a/b~": {"type": "string"},
    "loop": {"anyOf": [{"$ref": "#/$defs/loop"}, {"type": "string"}]},
}


def values_of(schema: Any) -> Values:
    properties = {"value": schema, "other": {"type": "number"}}
    return Parameters({"properties": properties, "$defs": DEFINITIONS}).values("value")


@pytest.mark.parametrize(
    ("text", "schema", "expected"),
    [
        ("5", {"type": "integer"}, "5"),
        (" 5 ", {"type": "number"}, "5"),
        ("five", {"type": "integer"}, '"five"'),
        ("5", {"type": "string"}, '"5"'),
        ("5", None, '"5"'),
        ("5", {}, '"5"'),
        ("null", {"type": ["string", "null"]}, "null"),
        ("null", {"type": "string"}, '"null"'),
        ("None", {"type": ["integer", "null"]}, "null"),
        ("TRUE", {"type": "boolean"}, "true"),
        ("[1, 2", {"type": "array"}, '"[1, 2"'),
        ("[1, 2]", {"type": "array"}, "[1, 2]"),
        ('{"a": NaN}', {"type": "object"}, '"{\\"a\\": NaN}"'),
        ("{'a': 1}", {"properties": {}}, "\"{'a': 1}\""),
        ("__import__('os')", {"type": "object"}, "\"__import__('os')\""),
        ("1e999", {"type": "number"}, "1e999"),
        ("", {"type": "integer"}, '""'),
        ("x", {"anyOf": 5, "type": 7}, '"x"'),
        ("3", {"enum": [3, 4]}, "3"),
        ("3", {"enum": ["3", "4"]}, '"3"'),
        ("3", {"oneOf": [{"type": "integer"}, {"type": "string"}]}, "3"),
        ("red", {"$ref": "#/$defs/color"}, '"red"'),
        ('"red"', {"$ref": "#/$defs/color"}, '"\\"red\\""'),
        ("5", {"$ref": "#/$defs/count"}, "5"),
        ("5", {"allOf": [{"$ref": "#/$defs/color"}], "default": "red"}, '"5"'),
        ("5", {"$ref": "#/properties/other"}, "5"),
        ("5", {"$ref": "#/$defs/list/prefixItems/1"}, "5"),
        ("5", {"$ref": "#/$defs/a~1b~0"}, '"5"'),
        ('"x"', {"$ref": "https://elsewhere"}, '"x"'),
        ("5", {"$ref": "#/$defs/loop"}, '"5"'),
        ("null", {"anyOf": [{"enum": ["a", "b"]}, {"type": "null"}]}, "null"),
        ("1", {"enum": ["a", 1]}, "1"),
        ("a", {"enum": ["a", 1]}, '"a"'),
        ("1", {"enum": ["1", 1]}, '"1"'),
        (" 1", {"enum": [" 1", 1]}, '" 1"'),
        ("1", {"const": 1}, "1"),
        ("1", {"const": "1"}, '"1"'),
        ("12", {"type": ["string", "boolean"]}, '"12"'),
        ("1.5", {"type": ["string", "integer"]}, '"1.5"'),
        ("1", {"type": ["string", "number"]}, "1"),
        ("[1]", {"type": ["string", "object"]}, '"[1]"'),
    ],
)
def test_a_parameter_is_what_its_schema_says(text: str, schema: Any, expected: str):
    assert as_json(text, values_of(schema)) == expected


@pytest.mark.parametrize(
    ("schema", "listed", "types"),
    [
        ({"$ref": "#/$defs/color"}, ["red", "blue"], set()),
        ({"$ref": "#/$defs/color", "enum": ["blue", "green"]}, ["blue"], set()),
        ({"allOf": [{"$ref": "#/$defs/color"}, {"not": {}}]}, ["red", "blue"], set()),
        ({"anyOf": [{"$ref": "#/$defs/color"}, {"type": "null"}]}, ["red", "blue", None], set()),
        ({"type": ["string", "null"], "enum": ["a", None, 5]}, ["a", None], set()),
        ({"type": "number", "enum": ["a", 5, True, 1.5]}, [5, 1.5], set()),
        ({"type": "integer", "enum": [5, 1.5, 2.0]}, [5, 2.0], set()),
        ({"oneOf": [{"const": "a"}, {"const": 1}, {"$ref": "#/$defs/count"}]}, ["a", 1], {"integer"}),
        ({"oneOf": [{"const": "a"}, {"description": "anything"}]}, ["a"], {"string"}),
        ({"type": "boolean"}, [True, False], set()),
        ({"allOf": [{"type": ["integer", "string"]}, {"type": ["number", "null"]}]}, [], {"integer"}),
        ({"type": "integer", "enum": ["a"]}, [], set()),
        ({"$ref": "#/$defs/loop"}, [], {"string"}),
        ({"items": {}}, [], {"array"}),
        ({"pattern": "a"}, [], {"string"}),
        (True, [], {"string"}),
    ],
    ids=str,
)
def test_values_and_types(schema: Any, listed: list[Any], types: set[str]):
    values = values_of(schema)
    assert sorted(map(repr, values.listed)) == sorted(map(repr, listed)) and values.types == types


def test_parameters_may_be_spread_over_references_and_parts():
    parameters = Parameters(
        {
            "$ref": "#/$defs/base",
            "allOf": [{"properties": {"b": {"type": "integer"}, "a": {"enum": ["x"]}}, "required": ["b"]}],
            "properties": {"c": {"type": "array"}},
            "$defs": {"base": {"properties": {"a": {"type": "string"}}, "required": ["a", 5], "$ref": "#"}},
        }
    )
    assert list(parameters.schemas) == ["c", "a", "b"] and parameters.required == {"a", "b"}
    assert parameters.values("a") == Values(("x",))
    assert parameters.values("nowhere") == Values(types=frozenset({"string"}))


def test_schemas_that_multiply_come_to_an_end():
    """Each definition refers to the next many times: followed one by one there are 50^30 ways."""
    chain: dict[str, Any] = {
        f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"} for _ in range(50)]} for i in range(30)
    }
    chain["d30"] = {"enum": ["x"]}
    schema = {
        "properties": {"deep": {"$ref": "#/$defs/d20"}, "deepest": {"$ref": "#/$defs/d0"}},
        "$defs": chain,
    }
    parameters = Parameters(schema)
    assert parameters.values("deep") == Values(("x",))
    assert parameters.values("deepest").listed in ((), ("x",))
