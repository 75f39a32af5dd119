"""Numbers in JSON schemas that llguidance would round, clamp or choke on, so that what it holds to is another
schema than the client's."""

import decimal
import json
import math
from collections.abc import Iterator
from typing import Any

# Beyond these, integers are not all doubles, which llguidance calculates with.
MAX_NUMBER = 2**53 - 1
MIN_FRACTION = 1e-50
MAX_COUNT = 2**32 - 1

_NUMBERS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
_COUNTS = {
    f"{bound}{what}" for bound in ("min", "max") for what in ("Length", "Items", "Properties", "Contains")
}
_VALUES = {"const", "enum"}
_REMARKS = {"default", "examples", "x-guidance"}
_SCHEMAS_BY_NAME = {"properties", "patternProperties", "dependentSchemas", "$defs", "definitions"}


def loads_exactly(source: str) -> Any:
    """JSON with ``decimal.Decimal`` for fractions; raises ValueError, or RecursionError."""
    try:
        return json.loads(source, parse_float=decimal.Decimal)
    except decimal.InvalidOperation as error:
        raise ValueError("a number's exponent is out of range") from error


def check_numbers(schema: Any) -> None:
    """Checks a schema as ``loads_exactly`` or ``json.loads`` gives it.

    Raises:
      ValueError: naming a keyword and the number in it that cannot be kept to.
    """
    for keyword, number in _numbers(schema):
        if keyword in _COUNTS:
            if not (isinstance(number, int) and 0 <= number <= MAX_COUNT):
                raise ValueError(
                    f"{keyword} is {_shown(number)}; it must be a whole number between 0 and {MAX_COUNT}"
                )
        elif not abs(number) <= MAX_NUMBER:
            raise ValueError(
                f"{keyword} is {_shown(number)}; numbers must be between -{MAX_NUMBER} and {MAX_NUMBER}"
            )
        elif number and abs(float(number)) < MIN_FRACTION:
            raise ValueError(
                f"{keyword} is {_shown(number)}; numbers other than 0 must be at least {MIN_FRACTION} away "
                "from it"
            )
        elif decimal.Decimal(repr(float(number))) != decimal.Decimal(str(number)):
            raise ValueError(f"{keyword} is {_shown(number)}; it has more digits than a double holds")


def _numbers(schema: Any) -> Iterator[tuple[str, Any]]:
    """The numbers that a schema holds values to, with their keywords."""
    waiting: list[tuple[Any, str]] = [(schema, "")]  # values with the keyword they stand in, "": schemas
    while waiting:
        value, keyword = waiting.pop()
        if isinstance(value, int | float | decimal.Decimal) and not isinstance(value, bool):
            if keyword:
                yield keyword, value
        elif isinstance(value, list):
            waiting += [(item, keyword) for item in value]
        elif isinstance(value, dict) and keyword:
            waiting += [(item, keyword) for item in value.values()]
        elif isinstance(value, dict):
            for key, item in value.items():
                if key in _SCHEMAS_BY_NAME and isinstance(item, dict):
                    waiting += [(each, "") for each in item.values()]
                elif key in _NUMBERS | _COUNTS:
                    # Something else than a number is for llguidance to refuse.
                    waiting += [(item, key)] if not isinstance(item, dict | list) else []
                elif key not in _REMARKS:
                    waiting.append((item, key if key in _VALUES else ""))


def _shown(number: Any) -> str:
    if isinstance(number, int) and number.bit_length() > 256:
        return f"about {'-' if number < 0 else ''}1e{int(math.log10(2) * number.bit_length())}"
    text = str(number)
    return text if len(text) <= 80 else text[:77] + "..."
