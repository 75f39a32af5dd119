"""Turns of a conversation, the tools that the model may call, and its calls; bounded."""

import json
import re
from typing import Annotated, Any, Literal, TypedDict

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PlainValidator, model_validator

from hybridjax.errors import RequestError
from hybridjax.serving.http.content import Content, for_template

MAX_TOOLS = 128
MAX_TOOL_BYTES = 2**19  # of all tools of a request, as JSON
MAX_TOOL_DEPTH = 32
MAX_CALLS = 128  # of a message
MAX_ID = 256
TOOL_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")


class Strict(BaseModel):
    """No conversions (a string is never a number), no NaN, unknown fields ignored."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


def _tool_name(value: str) -> str:
    if not TOOL_NAME.fullmatch(value):
        raise ValueError("it must be 1 to 64 letters, digits, underscores, dashes or dots")
    return value


def _arguments(value: Any) -> dict[str, Any]:
    """OpenAI's JSON text; templates want the object."""
    try:
        value = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict) or depth_of(value) > MAX_TOOL_DEPTH:
        raise ValueError(f"it must be a JSON object, as text, nested at most {MAX_TOOL_DEPTH} deep")
    return value


def _parameters(value: Any) -> dict[str, Any] | None:
    if value is None:
        return None
    if not isinstance(value, dict) or value.get("type", "object") != "object":
        raise ValueError("it must be a JSON schema of an object")
    if not isinstance(value.get("properties", {}), dict):
        raise ValueError("its properties must be an object")
    return value


def depth_of(value: Any) -> int:
    """How deep lists and objects are nested; 0 for neither."""
    depth, level = 0, [value]
    while level := [item for item in level if isinstance(item, dict | list)]:
        depth += 1
        level = [child for item in level for child in (item.values() if isinstance(item, dict) else item)]
    return depth


Name = Annotated[str, AfterValidator(_tool_name)]


class FunctionCall(Strict):
    """``arguments`` is the text of a JSON object."""

    name: Name
    arguments: Annotated[dict[str, Any], PlainValidator(_arguments, json_schema_input_type=str)]


class ToolCall(Strict):
    """A call that the model made in an earlier turn."""

    id: str = Field("", max_length=MAX_ID)
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Strict):
    """One turn of a conversation. ``developer`` is rendered as ``system``."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content = Field(
        description="a string or a list of parts; images only as data URLs, and only if the model takes "
        "them; beside tool_calls it may be null or left out"
    )
    name: str | None = Field(None, max_length=256)
    tool_calls: list[ToolCall] | None = Field(None, max_length=MAX_CALLS, description="of the assistant")
    tool_call_id: str | None = Field(None, max_length=MAX_ID, description="which call a tool's turn answers")
    reasoning_content: str | None = Field(None, description="of the assistant, for templates that read it")

    @model_validator(mode="before")
    @classmethod
    def _content_may_lack(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        if value.get("function_call"):
            raise ValueError("function_call is not supported; use tool_calls")
        has_else = value.get("tool_calls") or value.get("reasoning_content")
        if value.get("content") is None and value.get("role") == "assistant" and has_else:
            return {**value, "content": ""}
        return value

    @model_validator(mode="after")
    def _calls_are_the_assistants(self) -> "Message":
        if self.tool_calls and self.role != "assistant":
            raise ValueError(f"only the assistant has tool_calls, not the role {self.role!r}")
        return self

    def for_template(self) -> dict[str, Any]:
        role = "system" if self.role == "developer" else self.role
        turn: dict[str, Any] = {"role": role, "content": for_template(self.content)}
        if self.tool_calls:
            turn["tool_calls"] = [call.model_dump() for call in self.tool_calls]
        others = ("name", "tool_call_id", "reasoning_content")
        return turn | {name: getattr(self, name) for name in others if getattr(self, name)}


class Function(Strict):
    """A function that the model may call."""

    name: Name
    description: str | None = None
    parameters: Annotated[
        dict[str, Any] | None, PlainValidator(_parameters, json_schema_input_type=dict[str, Any])
    ] = Field(None, description="JSON schema of an object; left out: no parameters")
    strict: bool | None = Field(
        None, description="calls keep to the schema also if tool_choice is 'auto'; forced ones always do"
    )

    @property
    def schema_of_arguments(self) -> dict[str, Any]:
        return {"additionalProperties": False} if self.parameters is None else self.parameters


class Tool(Strict):
    """A tool that the model may call."""

    type: Literal["function"]
    function: Function

    def for_template(self) -> dict[str, Any]:
        return {
            "type": self.type,
            "function": self.function.model_dump(exclude_none=True, exclude={"strict"}),
        }


def _tools(value: list[Tool]) -> list[Tool]:
    names = [tool.function.name for tool in value]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the name {twice!r} is there twice")
    written = [tool.for_template() for tool in value]
    if max(map(depth_of, written), default=0) > MAX_TOOL_DEPTH:
        raise ValueError(f"schemas may be nested at most {MAX_TOOL_DEPTH} deep")
    if len(json.dumps(written)) > MAX_TOOL_BYTES:
        raise ValueError(f"all tools together may have at most {MAX_TOOL_BYTES} bytes of JSON")
    return value


Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS), AfterValidator(_tools)]


class _Named(TypedDict):
    name: str


class NamedTool(TypedDict):
    """Calls that one function."""

    type: Literal["function"]
    function: _Named


def _tool_choice(value: Any) -> Any:
    if value in ("none", "auto", "required"):
        return value
    function = value.get("function") if isinstance(value, dict) and value.get("type") == "function" else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError(
            "it must be 'none', 'auto', 'required' or {'type': 'function', 'function': {'name': ...}}"
        )
    return {"type": "function", "function": {"name": function["name"]}}


ToolChoice = Annotated[
    Literal["none", "auto", "required"] | NamedTool,
    PlainValidator(_tool_choice, json_schema_input_type=Literal["none", "auto", "required"] | NamedTool),
]


def callable_tools(tools: list[Tool], choice: str | NamedTool | None) -> list[Tool]:
    """Those that a request lets the model call; raises RequestError if its choice asks for others."""
    if choice == "none":
        return []
    if choice in (None, "auto"):
        return tools
    if not tools:
        raise RequestError("tool_choice needs tools", param="tool_choice")
    if isinstance(choice, str):
        return tools
    wanted = choice["function"]["name"] if choice else ""
    named = [tool for tool in tools if tool.function.name == wanted]
    if not named:
        raise RequestError(f"tool_choice names {wanted[:64]!r}, which is not in tools", param="tool_choice")
    return named
