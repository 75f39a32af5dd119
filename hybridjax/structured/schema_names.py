"""Names of properties in JSON schemas."""

from collections.abc import Mapping
from typing import Any


def escapes_of(schema: Mapping[str, Any]) -> dict[str, Any]:
    """llguidance's options for a schema: no \\u escapes where an object may have properties beside the named.

    llguidance compares names as they are written, so an escaped one would pass for another property's.
    """
    return {"json_allowed_escapes": 'nrbtf\\"'} if _takes_other_names(schema) else {}


def _takes_other_names(schema: Any) -> bool:
    """Whether an object may have properties beside those that it names."""
    if isinstance(schema, list):
        return any(map(_takes_other_names, schema))
    if not isinstance(schema, Mapping):
        return False
    named = schema.get("properties"), schema.get("patternProperties")
    if (any(named) and schema.get("additionalProperties") is not False) or named[1]:
        return True
    return any(map(_takes_other_names, schema.values()))
