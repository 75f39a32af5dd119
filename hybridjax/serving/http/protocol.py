"""What clients may send: OpenAI's request schemas, bounded, with SGLang's and vLLM's extensions.

A field that is null counts as left out. Fields nobody here knows are ignored, as OpenAI's clients send
bookkeeping of their own; fields that are known to change the answer but are not supported are refused.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PlainValidator,
    WithJsonSchema,
)

from hybridjax.errors import RequestError
from hybridjax.serving.api import (
    MAX_CACHE_SALT,
    MAX_LOGIT_BIAS,
    MAX_PRIORITY,
    MAX_REPETITION_PENALTY,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKENS,
    MAX_TOP_LOGPROBS,
    MIN_REPETITION_PENALTY,
    SamplingParams,
)
from hybridjax.serving.http.content import Picture
from hybridjax.serving.http.grammars import GrammarFields
from hybridjax.serving.http.messages import Message, NamedTool, Strict, Tool, ToolChoice, Tools

MAX_N = 8
MAX_PROMPTS = 256
MAX_MESSAGES = 4096
MAX_TEMPLATE_KWARGS = 16
MAX_TIMEOUT = 24 * 3600
INT32_MAX = 2**31 - 1

NO_DEFAULTS: Mapping[str, float] = MappingProxyType({})

# Names that would collide with the parameters of render_chat itself.
_RENDER_PARAMETERS = {"self", "messages", "tools", "add_generation_prompt"}


def prompt_list(value: Any) -> list[str] | list[list[int]]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if _is_token_ids(value):
            return [value]
        if set(map(type, value)) == {str} or all(map(_is_token_ids, value)):
            if len(value) > MAX_PROMPTS:
                raise ValueError(f"it may hold at most {MAX_PROMPTS} prompts, not {len(value)}")
            return value
    raise ValueError(
        f"it must be a string, a list of token ids, or a list of 1 to {MAX_PROMPTS} strings or token id lists"
    )


def _is_token_ids(value: Any) -> bool:
    if not isinstance(value, list) or set(map(type, value)) != {int}:
        return False
    return min(value) >= 0 and max(value) <= INT32_MAX


def _stop_strings(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _logit_bias(value: Any) -> Any:
    if not isinstance(value, dict):
        raise ValueError("it must map token ids to numbers in -100..100")
    if len(value) > MAX_LOGIT_BIAS:
        raise ValueError(f"it may hold at most {MAX_LOGIT_BIAS} entries, not {len(value)}")
    for key in value:
        if not re.fullmatch(r"[0-9]{1,10}", key):
            raise ValueError(f"its keys must be token ids, not {key[:40]!r}")
    return {int(key): bias for key, bias in value.items()}


def _template_kwargs(value: dict[str, Any]) -> dict[str, Any]:
    for name, kwarg in value.items():
        if not re.fullmatch(r"[a-z][a-z0-9_]{0,63}", name) or name in _RENDER_PARAMETERS:
            raise ValueError(f"{name[:40]!r} is not allowed")
        if not isinstance(kwarg, str | int | float | None):
            raise ValueError(f"the value of {name!r} must be a string, a number, true, false or null")
    return value


Prompts = Annotated[
    list[str] | list[list[int]],
    PlainValidator(prompt_list),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": MAX_PROMPTS},
                {"type": "array", "items": {"type": "integer"}, "minItems": 1},
                {
                    "type": "array",
                    "items": {"type": "array", "items": {"type": "integer"}, "minItems": 1},
                    "minItems": 1,
                    "maxItems": MAX_PROMPTS,
                },
            ]
        }
    ),
]
TemplateOptions = Annotated[dict[str, Any], AfterValidator(_template_kwargs)]
StopString = Annotated[str, Field(min_length=1, max_length=1024)]
TokenId = Annotated[int, Field(ge=0, le=INT32_MAX)]
Bias = Annotated[float, Field(ge=-100, le=100)]


# Field -> values that change nothing; anything else is refused rather than silently dropped.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        ("structural_tag", "stop_regex", "custom_logit_processor", "logits_processors", "custom_params"), ()
    ),
    **dict.fromkeys(("prompt_embeds", "input_embeds", "lora_path"), ()),
    **dict.fromkeys(("truncate_prompt_tokens", "bad_words", "allowed_token_ids"), ([],)),
    "use_beam_search": (False,),
    "length_penalty": (1,),
}


class Schema(Strict):
    """A body, or a part of one."""

    unsupported: ClassVar[dict[str, tuple[Any, ...]]] = {}


class SubmitFields(Schema):
    """How the engine treats a request, whatever it says."""

    priority: int = Field(
        0, ge=-MAX_PRIORITY, le=MAX_PRIORITY, description="higher first, if the server ranks"
    )
    cache_salt: str | None = Field(
        None,
        min_length=1,
        max_length=MAX_CACHE_SALT,
        description="cached prefixes are shared only among requests with the same salt",
    )
    timeout: float | None = Field(
        None, gt=0, le=MAX_TIMEOUT, description="seconds after which the request ends with what it has"
    )

    def submit_options(self) -> dict[str, Any]:
        """Keyword arguments of FrontDoor.submit."""
        return {"priority": self.priority, "cache_salt": self.cache_salt, "timeout": self.timeout}


class StreamOptions(Schema):
    include_usage: bool = Field(False, description="send a last chunk with the token counts")


class SamplingFields(Schema, GrammarFields):
    """What every way to ask for a completion spells the same."""

    n: int = Field(1, ge=1, le=MAX_N, description="completions per prompt; each has its own random stream")
    temperature: float = Field(1.0, ge=0, le=100, description="0 is greedy")
    top_p: float = Field(1.0, ge=0, le=1)
    top_k: int = Field(0, ge=-1, le=INT32_MAX, description="0 or -1: all tokens")
    min_p: float = Field(0.0, ge=0, le=1)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    repetition_penalty: float = Field(1.0, ge=MIN_REPETITION_PENALTY, le=MAX_REPETITION_PENALTY)
    logit_bias: Annotated[dict[int, Bias], BeforeValidator(_logit_bias)] = Field({})
    stop: Annotated[list[StopString], BeforeValidator(_stop_strings)] = Field(
        [], max_length=MAX_STOP_STRINGS, description="a string or a list of strings that end the completion"
    )
    stop_token_ids: list[TokenId] = Field([], max_length=MAX_STOP_TOKENS)
    no_stop_trim: bool = Field(False, description="SGLang's name of include_stop_str_in_output")
    ignore_eos: bool = False
    skip_special_tokens: bool = True

    def shared_params(self, defaults: Mapping[str, float]) -> dict[str, Any]:
        """Fields of SamplingParams; ``defaults`` for those that the request leaves out."""
        same = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty")
        same += ("repetition_penalty", "logit_bias", "ignore_eos", "skip_special_tokens")
        fields = {name: getattr(self, name) for name in same}
        fields |= {name: value for name, value in defaults.items() if name not in self.model_fields_set}
        stops = {"stop": tuple(self.stop), "stop_token_ids": tuple(self.stop_token_ids)}
        return fields | stops | {"grammar": self.grammar()}


def seed_of(seed: int | None, choice: int) -> int | None:
    """The seed of choice 0..n-1: the request's own, moved within its range."""
    return None if seed is None else (seed + choice + 2**63) % 2**64 - 2**63


class GenerationRequest(SamplingFields, SubmitFields):
    """The fields that both endpoints share."""

    model: str = Field("", description="the served model's name; empty: the only one there is")
    max_tokens: int | None = Field(None, ge=1, le=INT32_MAX, description="tokens to generate at most")
    max_completion_tokens: int | None = Field(
        None, ge=1, le=INT32_MAX, description="OpenAI's newer name of max_tokens"
    )
    stream: bool = Field(False, description="answer with server-sent events")
    stream_options: StreamOptions | None = Field(None, description="only together with stream")
    seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1, description="choice i uses seed + i")
    include_stop_str_in_output: bool = False
    min_tokens: int = Field(0, ge=0, le=INT32_MAX)
    return_token_ids: bool = Field(False, description="add the generated token_ids to each choice")
    prompt_logprobs: int | None = Field(
        None, ge=0, le=MAX_TOP_LOGPROBS, description="vLLM's: most likely tokens per token of the prompt"
    )
    user: Any = Field(None, description="ignored")

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling_params(self, choice: int, defaults: Mapping[str, float] = NO_DEFAULTS) -> SamplingParams:
        """The parameters of choice 0..n-1 of a prompt.

        Args:
          choice: moves the seed.
          defaults: the checkpoint's values of fields that the request leaves out.

        Raises:
          RequestError: fields contradict each other.
        """
        limit = self._max_tokens()
        if limit is not None and self.min_tokens > limit:
            raise RequestError(
                f"min_tokens is {self.min_tokens}; it must be at most max_tokens, {limit}", param="min_tokens"
            )
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options needs stream to be true", param="stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise RequestError("prompt_logprobs needs stream to be false", param="prompt_logprobs")
        return SamplingParams(
            max_tokens=limit if limit is None else max(limit, 1),
            min_tokens=self.min_tokens,
            seed=seed_of(self.seed, choice),
            include_stop_str_in_output=self.include_stop_str_in_output or self.no_stop_trim,
            logprobs=self._logprobs(),
            prompt_logprobs=self._prompt_logprobs(),
            **self.shared_params(defaults),
        )

    def _max_tokens(self) -> int | None:
        old, new = self.max_tokens, self.max_completion_tokens
        if old is not None and new is not None and old != new:
            raise RequestError(
                f"max_tokens is {old} but max_completion_tokens is {new}; give one of them",
                param="max_tokens",
            )
        return new if old is None else old

    def _logprobs(self) -> int | None:
        raise NotImplementedError

    def _prompt_logprobs(self) -> int | None:
        return self.prompt_logprobs


class CompletionRequest(GenerationRequest):
    """The body of POST /v1/completions."""

    unsupported = UNSUPPORTED | {
        "suffix": ("",),
        "top_logprobs": (0,),
        "messages": (),
        "chat_template_kwargs": ({},),
        "add_special_tokens": (True,),
    }

    prompt: Prompts = Field(description="one prompt or several, as text or token ids")
    max_tokens: int | None = Field(
        None, ge=0, le=INT32_MAX, description="tokens to generate at most; 0 only with echo"
    )
    echo: bool = Field(
        False, description="begin the text with the prompt, and logprobs with those of its tokens"
    )
    logprobs: int | None = Field(
        None, ge=0, le=MAX_TOP_LOGPROBS, description="most likely tokens to report per token"
    )
    best_of: int | None = Field(None, description="only n itself is supported")

    @property
    def echoes_logprobs(self) -> bool:
        return self.echo and self.logprobs is not None

    def _max_tokens(self) -> int | None:
        limit = super()._max_tokens()
        if limit == 0 and not self.echo:
            raise RequestError("max_tokens is 0; that needs echo to be true", param="max_tokens")
        return SamplingParams.max_tokens if limit is None else limit

    def _logprobs(self) -> int | None:
        if self.best_of not in (None, self.n):
            raise RequestError(f"best_of is {self.best_of}; only n ({self.n}) is supported", param="best_of")
        return self.logprobs

    def _prompt_logprobs(self) -> int | None:
        wanted = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return max((count for count in wanted if count is not None), default=None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Conversation:
    """What a chat template is given.

    Attributes:
      tools: of the request; empty if it wants no calls.
      options: variables of the template.
      add_generation_prompt: None: unless the last message is continued.
    """

    messages: Sequence[Message]
    tools: Sequence[Tool] = ()
    tool_choice: str | NamedTool | None = None
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False


ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]


class ChatCompletionRequest(GenerationRequest):
    """The body of POST /v1/chat/completions."""

    unsupported = UNSUPPORTED | {
        "functions": ([],),
        "function_call": ("none", "auto"),
        "audio": (),
        "modalities": (["text"],),
        "web_search_options": (),
        "verbosity": (),
        "best_of": (1,),
        "echo": (False,),
        "prompt": (),
        "chat_template": (),
        "documents": ([],),
        "add_special_tokens": (False,),
    }

    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    tools: Tools = Field([], description="functions that the model may call")
    tool_choice: ToolChoice | None = Field(None, description="auto if there are tools")
    parallel_tool_calls: bool = Field(True, description="false: at most one call per answer")
    reasoning_effort: ReasoningEffort | None = Field(None, description="for chat templates that read it")
    separate_reasoning: bool = Field(True, description="false: the reasoning stays in the content")
    add_generation_prompt: bool | None = Field(
        None, description="end the prompt with the opening of the assistant's turn (default: true)"
    )
    continue_final_message: bool = Field(False, description="go on with the last message, the assistant's")
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS, description="needs logprobs")
    chat_template_kwargs: TemplateOptions = Field(
        {}, max_length=MAX_TEMPLATE_KWARGS, description="variables of the chat template, for those it allows"
    )

    def pictures(self) -> list[tuple[str, Picture]]:
        """The images in their order, each with the field it stands in."""
        return [
            (f"messages[{i}].content[{j}]", part)
            for i, message in enumerate(self.messages)
            for j, part in enumerate(message.content)
            if isinstance(part, Picture)
        ]

    def conversation(self) -> Conversation:
        effort = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        return Conversation(
            messages=self.messages,
            tools=self.tools,
            tool_choice=self.tool_choice,
            options=effort | self.chat_template_kwargs,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
        )

    def _logprobs(self) -> int | None:
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs to be true", param="top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None


def refuse_unsupported(raw: dict[str, Any], schema: type[Schema]) -> None:
    """Raises RequestError for a field that would change the answer if it were supported."""
    for name, neutral in schema.unsupported.items():
        if name in raw and raw[name] not in neutral:
            raise RequestError(
                f"{name} is not supported by this endpoint; leave it out", param=name, code="unsupported"
            )
