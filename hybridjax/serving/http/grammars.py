"""What a completion must look like, in the words of OpenAI, SGLang and vLLM: at most one of them."""

import json
from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator

from hybridjax.errors import RequestError
from hybridjax.serving.api import Grammar
from hybridjax.serving.http.messages import Strict

MAX_CHOICES = 1024
_SGLANG_ANY = "$$ANY$$"


def _schema(value: Any) -> Any:
    if not isinstance(value, dict | bool | None):
        raise ValueError("it must be a JSON schema: an object, true or false")
    return value


def _schema_or_text(value: Any) -> Any:
    if not isinstance(value, str | dict | bool | None):
        raise ValueError("it must be a JSON schema: an object, true or false, or such as text")
    return value


# Pydantic would name each type of a union in its errors.
_Object = dict[str, Any] | bool | None
Schema = Annotated[Any, PlainValidator(_schema, json_schema_input_type=_Object)]
SchemaOrText = Annotated[Any, PlainValidator(_schema_or_text, json_schema_input_type=str | _Object)]


class JsonSchema(Strict):
    """OpenAI's wrapper of a schema; it holds whatever ``strict`` says."""

    name: str | None = Field(None, max_length=256)
    description: str | None = None
    schema_: Schema = Field(None, alias="schema", description="none: any JSON object")
    strict: bool | None = None


class ResponseFormat(Strict):
    """OpenAI's ``response_format``."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    def grammar(self) -> Grammar | None:
        match self.type:
            case "text":
                return None
            case "json_object":
                return Grammar("json_object", field="response_format")
        if self.json_schema is None:
            raise RequestError(
                "response_format has no json_schema, which its type asks for", param="response_format"
            )
        if self.json_schema.schema_ is None:
            return Grammar("json_object", field="response_format")
        return _json(self.json_schema.schema_, "response_format")


class StructuredOutputs(Strict):
    """vLLM's ``structured_outputs``."""

    json_: SchemaOrText = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = Field(None, min_length=1, max_length=MAX_CHOICES)
    grammar: str | None = Field(None, description="EBNF or llguidance's Lark")
    structural_tag: Any = Field(None, description="not supported")

    def grammars(self) -> list[Grammar]:
        field = "structured_outputs"
        if self.structural_tag is not None:
            raise RequestError(f"{field}.structural_tag is not supported", param=field, code="unsupported")
        found = _all(field, (self.json_, _json), (self.regex, _regex), (self.choice, _choice))
        found += _all(field, (self.grammar, _grammar))
        return found + ([Grammar("json_object", field=field)] if self.json_object else [])


class GrammarFields(Strict):
    """Fields that hold a completion to a form."""

    response_format: ResponseFormat | None = Field(None, description="OpenAI's: text, or some JSON")
    json_schema: SchemaOrText = Field(None, description="SGLang's: a JSON schema, also as text")
    regex: str | None = Field(None, description="SGLang's: a regular expression for the whole completion")
    ebnf: str | None = Field(None, description="SGLang's: a grammar in EBNF, beginning at root")
    structured_outputs: StructuredOutputs | None = Field(None, description="vLLM's")
    guided_json: SchemaOrText = Field(None, description="vLLM's older name of json_schema")
    guided_regex: str | None = Field(None, description="vLLM's older name of regex")
    guided_choice: list[str] | None = Field(
        None, min_length=1, max_length=MAX_CHOICES, description="vLLM's: the completion is one of these"
    )
    guided_grammar: str | None = Field(None, description="vLLM's: EBNF, or llguidance's Lark")

    def grammar(self) -> Grammar | None:
        """What the completion must look like, None for anything.

        Raises:
          RequestError: several fields ask for something.
        """
        found: list[Grammar] = []
        if self.response_format is not None and (wanted := self.response_format.grammar()) is not None:
            found.append(wanted)
        found += _all("json_schema", (self.json_schema, _json)) + _all("regex", (self.regex, _regex))
        found += _all("ebnf", (self.ebnf, lambda source, field: Grammar("ebnf", source, field)))
        if self.structured_outputs is not None:
            found += self.structured_outputs.grammars()
        found += _all("guided_json", (self.guided_json, _json))
        found += _all("guided_regex", (self.guided_regex, _regex))
        found += _all("guided_choice", (self.guided_choice, _choice))
        found += _all("guided_grammar", (self.guided_grammar, _grammar))
        if len(found) > 1:
            raise RequestError(
                f"{found[0].field} and {found[1].field} both say what the completion looks like; give one",
                param=found[1].field,
            )
        return found[0] if found else None


def _all(field: str, *given: tuple[Any, Callable[[Any, str], Grammar]]) -> list[Grammar]:
    return [make(value, field) for value, make in given if value is not None]


def _json(schema: str | dict[str, Any] | bool, field: str) -> Grammar:
    if schema == _SGLANG_ANY:
        return Grammar("json_object", field=field)
    if isinstance(schema, str):
        return Grammar("json_schema", schema, field)
    try:
        return Grammar("json_schema", json.dumps(schema, ensure_ascii=False), field)
    except RecursionError as error:
        raise RequestError(f"{field} is nested too deep", param=field) from error


def _regex(source: str, field: str) -> Grammar:
    return Grammar("regex", source, field)


def _choice(choices: list[str], field: str) -> Grammar:
    texts = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)
    return Grammar("lark", f"start: CHOICE\nCHOICE: {texts}\n", field)


def _grammar(source: str, field: str) -> Grammar:
    return Grammar("ebnf" if "::=" in source else "lark", source, field)
