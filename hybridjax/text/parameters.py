"""What the JSON schema of a tool's parameters says about values that XML calls write as bare text.

Of a schema only what decides how a value is written is read: its types and the values it lists, through
``$ref`` within the schema, ``allOf``, ``anyOf`` and ``oneOf``. Schemas are clients': nothing here raises, and
what one costs is bounded.
"""

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hybridjax.text.json_scanner import JsonScanner

MAX_DEPTH = 32
MAX_PARTS = 20_000  # schemas and listed values that are looked at for one parameter

_UNIONS = ("anyOf", "oneOf")
_ALL_TYPES = frozenset({"string", "number", "integer", "boolean", "array", "object", "null"})
_BY_KEYWORD = {
    "object": ("properties", "additionalProperties", "patternProperties", "required"),
    "array": ("items", "prefixItems"),
}


@dataclasses.dataclass(frozen=True)
class Values:
    """What a value may be: one of some, or any of some types.

    Attributes:
      listed: JSON values, each once, in the schema's order.
      types: JSON types of which any value will do, as far as is known.
    """

    listed: tuple[Any, ...] = ()
    types: frozenset[str] = frozenset()

    @property
    def is_text(self) -> bool:
        """Whether it can only be a string."""
        return self.types <= {"string"} and all(isinstance(value, str) for value in self.listed)

    @property
    def all_types(self) -> frozenset[str]:
        return self.types | {_type_of(value) for value in self.listed}


STRING = Values(types=frozenset({"string"}))


class Parameters:
    """The parameters of one tool.

    Args:
      schema: JSON schema of the arguments.

    Attributes:
      schemas: of each parameter, by name, in order.
      required: names of those that may not be left out.
    """

    def __init__(self, schema: Any):
        self._root = schema
        self.schemas: dict[str, Any] = {}
        self.required: set[str] = set()
        self._values: dict[str, Values] = {}
        self._collect(schema, 0, set())

    def values(self, name: str) -> Values:
        """What a parameter may be; one without a schema, or whose schema names no type, is a string.
        Neither values nor types: nothing fits the schema."""
        if name not in self._values:
            found = _Reading(self._root).values(self.schemas.get(name), 0)
            self._values[name] = STRING if found is None else found
        return self._values[name]

    def _collect(self, schema: Any, depth: int, seen: set[int]) -> None:
        if not isinstance(schema, Mapping) or depth > MAX_DEPTH or id(schema) in seen:
            return
        seen.add(id(schema))
        properties, required, parts = (schema.get(key) for key in ("properties", "required", "allOf"))
        for name, value in properties.items() if isinstance(properties, Mapping) else ():
            known = name in self.schemas
            self.schemas[name] = {"allOf": [self.schemas[name], value]} if known else value
        if isinstance(required, list):
            self.required |= {name for name in required if isinstance(name, str)}
        self._collect(_target(self._root, schema.get("$ref")), depth + 1, seen)
        for part in parts if isinstance(parts, list) else ():
            self._collect(part, depth + 1, seen)


def as_json(text: str, values: Values) -> str:
    """A value that was written as text, as JSON: what its schema says it is if it reads like that, else a
    string."""
    if values.is_text:
        return _dumps(text)
    word = text.strip()
    for wanted in (text, word):
        for value in values.listed:
            if as_text(value) == wanted:
                return _dumps(value)
    types = values.all_types
    if "null" in types and word in ("null", "None"):
        return "null"
    if "boolean" in types and word.lower() in ("true", "false"):
        return word.lower()
    scanner = JsonScanner()
    # The blank ends a number.
    end = scanner.feed(word + " ")
    if not scanner.done or end != len(word):
        return _dumps(text)
    # What begins with a quote is text with a quote wherever it may be text.
    return word if "string" not in types or _reads_as(word, types) else _dumps(text)


def as_text(value: Any) -> str:
    """A JSON value as XML calls write it."""
    return value if isinstance(value, str) else _dumps(value)


class _Reading:
    """One look at a schema, within ``MAX_PARTS``."""

    def __init__(self, root: Any):
        self._root = root
        self._left = MAX_PARTS
        self._known: dict[int, Values | None] = {}  # by the schema's identity

    def values(self, schema: Any, depth: int) -> Values | None:
        """What a schema allows; None if it says nothing."""
        if not isinstance(schema, Mapping) or depth > MAX_DEPTH or self._left <= 0:
            return None
        if id(schema) not in self._known:
            self._known[id(schema)] = Values()  # a loop adds nothing
            self._known[id(schema)] = self._values(schema, depth)
        return self._known[id(schema)]

    def _values(self, schema: Mapping[str, Any], depth: int) -> Values | None:
        self._left -= 1
        found = _by_type(schema.get("type"))
        listed = schema.get("enum")
        if "const" in schema:
            listed = [schema["const"]]
        if isinstance(listed, list) and listed:
            self._left -= len(listed)
            found = self._both(found, Values(_once(listed)))
        reference, parts = schema.get("$ref"), schema.get("allOf")
        together = [_target(self._root, reference)] if isinstance(reference, str) else []
        together += parts if isinstance(parts, list) else []
        for part in together:
            found = self._both(found, self.values(part, depth + 1))
        for union in _UNIONS:
            options = schema.get(union)
            if isinstance(options, list) and options:
                found = self._both(found, self._either([self.values(part, depth + 1) for part in options]))
        if found is None:
            found = _by_type([name for name, keys in _BY_KEYWORD.items() if schema.keys() & set(keys)])
        # A schema elsewhere may say anything; where none says string, JSON is written.
        return Values(types=_ALL_TYPES - {"string"}) if found is None and together else found

    def _both(self, one: Values | None, other: Values | None) -> Values | None:
        if one is None or other is None:
            return other if one is None else one
        if self._left <= 0:
            return one
        self._left -= len(one.listed) + len(other.listed)
        texts = {_key(value) for value in other.listed}
        listed = [value for value in one.listed if _key(value) in texts or _is_one_of(value, other.types)]
        listed += [value for value in other.listed if _is_one_of(value, one.types)]
        types = {name for name in one.types if _is_in(name, other.types)}
        types |= {name for name in other.types if _is_in(name, one.types)}
        return Values(_once(listed), frozenset(types))

    def _either(self, options: Sequence[Values | None]) -> Values:
        listed: list[Any] = []
        types: set[str] = set()
        for option in options:
            self._left -= 1 + (0 if option is None else len(option.listed))
            if self._left <= 0:
                return Values(types=_ALL_TYPES)
            if option is None:
                types.add("string")
            else:
                types |= option.types
                listed += option.listed
        return Values(_once(listed), frozenset(types))


def _by_type(named: Any) -> Values | None:
    names = [named] if isinstance(named, str) else named if isinstance(named, list) else []
    names = [name for name in names if isinstance(name, str)]
    if not names:
        return None
    # So a list of values beside them stays a list.
    few = {"null": [None], "boolean": [True, False]}
    listed = [value for name in names for value in few.get(name, ())]
    return Values(_once(listed), frozenset(names) - few.keys())


def _target(root: Any, reference: Any) -> Any:
    """What a reference within the schema points to (RFC 6901); None if it points elsewhere."""
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        return None
    for step in reference.split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        if isinstance(root, Mapping):
            root = root.get(step)
        elif isinstance(root, list) and step.isdecimal() and len(step) < 9 and int(step) < len(root):
            root = root[int(step)]
        else:
            return None
    return root


def _type_of(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    if isinstance(value, str):
        return "string"
    if isinstance(value, int | float):
        return "integer" if value == value // 1 else "number"
    return "array" if isinstance(value, list) else "object"


def _is_in(name: str, types: Iterable[str]) -> bool:
    return name in types or (name == "integer" and "number" in types)


def _is_one_of(value: Any, types: Iterable[str]) -> bool:
    return _is_in(_type_of(value), types)


def _reads_as(word: str, types: Iterable[str]) -> bool:
    """Whether JSON text is of one of the types, which strings are not counted among."""
    kinds = {"{": "object", "[": "array", "t": "boolean", "f": "boolean", "n": "null", '"': ""}
    kind = kinds.get(word[0])
    if kind is None:
        kind = "number" if "." in word or "e" in word.lower() else "integer"
    return _is_in(kind, types)


def _once(values: Iterable[Any]) -> tuple[Any, ...]:
    return tuple({_key(value): value for value in values}.values())


def _key(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
