"""From the bytes of a body to a checked request."""

import reprlib
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails, from_json
from starlette.requests import Request

from hybridjax.errors import RequestError
from hybridjax.serving.http.errors import UnsupportedMediaTypeError
from hybridjax.serving.http.protocol import Schema, refuse_unsupported

SHOWN = 100


class _Repr(reprlib.Repr):
    def repr_str(self, x: str, level: int) -> str:
        # An image is nobody's business but the model's.
        if x[:SHOWN].lstrip()[:5].lower() == "data:":
            x = x.lstrip()[:5] + "..."
        return super().repr_str(x, level)


_repr = _Repr(maxstring=SHOWN, maxother=SHOWN, maxlist=8, maxdict=8, maxlevel=3, maxlong=SHOWN)


async def json_body(request: Request) -> bytes:
    """The body of a request that says it is JSON; raises UnsupportedMediaTypeError."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    # Browsers let any page post forms and plain text to a local port; JSON they ask about first.
    if media_type != "application/json":
        raise UnsupportedMediaTypeError(f"content-type is {show(media_type)}; it must be application/json")
    # Not request.body(), which would keep it, images and all, until the answer is complete.
    return b"".join([chunk async for chunk in request.stream()])


def parse[R: Schema](body: bytes, schema: type[R]) -> R:
    """Reads a JSON body; raises RequestError naming the field, its value and what is allowed."""
    try:
        # Its nesting limit and its refusal of NaN and lone surrogates are why this is not json.loads.
        raw = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise RequestError(f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(raw, dict):
        raise RequestError(f"the body is {show(raw)}; it must be a JSON object", code="invalid_type")
    given = {name: value for name, value in raw.items() if value is not None}
    refuse_unsupported(given, schema)
    try:
        return schema.model_validate(given)
    except ValidationError as error:
        raise _readable(error.errors(include_url=False)[0], schema) from None


def show(value: Any) -> str:
    text = _repr.repr(value)
    return text if len(text) <= SHOWN else text[: SHOWN - 3] + "..."


def _readable(error: ErrorDetails, schema: type[Schema]) -> RequestError:
    field = ""
    for step in error["loc"]:
        field += f"[{step}]" if isinstance(step, int) else f".{step}" if field else str(step)
    if error["type"] == "missing":
        return RequestError(f"{field} is missing", param=field, code="missing_required_parameter")
    if error["type"] == "value_error":
        allowed = str(error.get("ctx", {})["error"])
    else:
        allowed = error["msg"].replace("Input should", "it must", 1)
    if not field:
        # What is wrong with several fields together begins with the name of one.
        name = allowed.partition(" ")[0]
        return RequestError(
            allowed, param=name if name in schema.model_fields else None, code="invalid_value"
        )
    # Whole messages are long and may be private.
    hidden = field.startswith("messages[") and isinstance(error["input"], dict | list)
    shown = "" if hidden else f" is {show(error['input'])}"
    return RequestError(
        f"{field}{shown}: {allowed[:1].lower()}{allowed[1:]}",
        param=field,
        code="invalid_value",
    )
