"""From a grammar as clients write it to llguidance's own, checked as far as the text shows."""

from typing import Any

from llguidance import LLMatcher

from hybridjax.structured.ebnf import ebnf_to_lark
from hybridjax.structured.schema_names import escapes_of
from hybridjax.structured.schema_numbers import check_numbers, loads_exactly

MAX_JSON_DEPTH = 64
# Unbounded, a model can pad its answer to the token limit.
_JSON_OPTIONS: Any = {"whitespace_pattern": r"[ \n\r\t]{1,32}"}
_WHITESPACE = {"whitespace_pattern", "whitespace_flexible"}
_ANY_OBJECT = '{"type": "object"}'


def to_llguidance(kind: str, source: str, max_bytes: int) -> str:
    """A grammar in llguidance's own JSON.

    Args:
      kind, source: see ``hybridjax.serving.api.Grammar``.
      max_bytes: of the source in UTF-8.

    Raises:
      ValueError: the source is not in that language or too large.
    """
    try:
        size = len(source.encode())
    except UnicodeEncodeError as error:
        raise ValueError("it is not valid Unicode: it holds a lone surrogate") from error
    if size > max_bytes:
        raise ValueError(f"it has {size} bytes; at most {max_bytes} are allowed")
    if kind == "json_schema":
        schema = _checked_schema(source)
        own = schema.get("x-guidance")
        spaced = isinstance(own, dict) and not own.keys().isdisjoint(_WHITESPACE)
        # The source as it was written: parsing it would lose repeated keys and the exactness of numbers.
        source = source if schema else "{}"
        defaults: Any = ({} if spaced else _JSON_OPTIONS) | escapes_of(schema)
        return LLMatcher.grammar_from_json_schema(source, defaults=defaults or None)
    if kind == "json_object":
        return LLMatcher.grammar_from_json_schema(_ANY_OBJECT, defaults=_JSON_OPTIONS)
    if not source.strip():
        raise ValueError("it is empty")
    if kind == "regex":
        return LLMatcher.grammar_from_regex(source)
    if kind == "ebnf":
        return LLMatcher.grammar_from_lark(_readable(ebnf_to_lark(source)))
    if kind == "lark":
        return LLMatcher.grammar_from_lark(_readable(source))
    raise ValueError(f"unknown kind of grammar {kind!r}")


def _readable(lark: str) -> str:
    """Lark without the one character that llguidance's literals may not hold; in them, in regular
    expressions and in JSON its escape is the same."""
    return lark.replace("\x7f", "\\u007f")


def _checked_schema(source: str) -> dict[str, Any]:
    """The schema as an object, which true is not."""
    try:
        schema = loads_exactly(source)
    except RecursionError as error:
        raise ValueError(f"it is more than {MAX_JSON_DEPTH} levels deep") from error
    except ValueError as error:
        raise ValueError(f"it is not JSON: {error}") from error
    if schema is False:
        raise ValueError("nothing can match false")
    if schema is True:
        return {}
    if not isinstance(schema, dict):
        raise ValueError("a JSON schema is an object, true or false")
    level: list[Any] = [schema]
    for _ in range(MAX_JSON_DEPTH):
        level = [
            child
            for value in level
            if isinstance(value, dict | list)
            for child in (value.values() if isinstance(value, dict) else value)
        ]
        if not level:
            check_numbers(schema)
            return schema
    raise ValueError(f"it is more than {MAX_JSON_DEPTH} levels deep")
