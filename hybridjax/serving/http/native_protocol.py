"""What clients may send to SGLang's native routes. The rules are those of protocol.py."""

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, PlainValidator, model_validator

from hybridjax.errors import RequestError
from hybridjax.serving.api import MAX_TOP_LOGPROBS, SamplingParams
from hybridjax.serving.http.content import Picture
from hybridjax.serving.http.messages import Message, Tools
from hybridjax.serving.http.protocol import (
    INT32_MAX,
    MAX_MESSAGES,
    MAX_PROMPTS,
    MAX_TEMPLATE_KWARGS,
    UNSUPPORTED,
    Conversation,
    SamplingFields,
    Schema,
    SubmitFields,
    TemplateOptions,
    prompt_list,
    seed_of,
)

MAX_RID = 256
MAX_TEXT = 2**20
MAX_TOKENS = 2**20

Rid = Annotated[str, Field(min_length=1, max_length=MAX_RID)]


def _text(value: Any) -> Any:
    if not isinstance(prompt_list(value)[0], str):
        raise ValueError("it must be a string or a list of strings")
    return value


def _input_ids(value: Any) -> Any:
    if isinstance(prompt_list(value)[0], str):
        raise ValueError("it must be a list of token ids or a list of such lists")
    return value


def _as_list(value: Any) -> Any:
    return value if isinstance(value, list) else [value]


def _bounded_text(value: Any) -> Any:
    if sum(map(len, prompt_list(_text(value)))) > MAX_TEXT:
        raise ValueError(f"it may have at most {MAX_TEXT} characters in all")
    return value


def _bounded_ids(value: Any) -> Any:
    if value != [] and sum(map(len, prompt_list(_input_ids(value)))) > MAX_TOKENS:
        raise ValueError(f"it may have at most {MAX_TOKENS} token ids in all")
    return value


Text = str | list[str]
Ids = list[int] | list[list[int]]


class NativeSampling(SamplingFields):
    """``sampling_params`` of POST /generate."""

    # SGLang's clients send these neutral values with every request.
    unsupported = UNSUPPORTED | {"spaces_between_special_tokens": (True,), "stop_regex": ([], "")}

    max_new_tokens: int = Field(128, ge=1, le=INT32_MAX)
    min_new_tokens: int = Field(0, ge=0, le=INT32_MAX)
    sampling_seed: int | None = Field(None, ge=-(2**63), le=2**63 - 1, description="choice i adds i")

    @model_validator(mode="before")
    @classmethod
    def _supported(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            raise ValueError("it must be an object, or a list with one per prompt")
        given = {name: field for name, field in value.items() if field is not None}
        for name, neutral in cls.unsupported.items():
            if name in given and given[name] not in neutral:
                raise ValueError(f"{name} is not supported; leave it out")
        return given

    def sampling_params(
        self,
        choice: int,
        defaults: Mapping[str, float],
        logprobs: int | None,
        prompt_logprobs: int | None,
    ) -> SamplingParams:
        """The parameters of choice 0..n-1 of a prompt; raises RequestError."""
        if self.min_new_tokens > self.max_new_tokens:
            raise RequestError(
                f"min_new_tokens is {self.min_new_tokens}; "
                f"it must be at most max_new_tokens, {self.max_new_tokens}",
                param="sampling_params.min_new_tokens",
            )
        return SamplingParams(
            max_tokens=self.max_new_tokens,
            min_tokens=self.min_new_tokens,
            seed=seed_of(self.sampling_seed, choice),
            include_stop_str_in_output=self.no_stop_trim,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            **self.shared_params(defaults),
        )


class GenerateRequest(SubmitFields):
    """The body of POST /generate: one prompt, or several of a kind."""

    unsupported = {
        **dict.fromkeys(("image_data", "video_data", "audio_data", "input_embeds", "lora_path"), ()),
        **dict.fromkeys(("custom_logit_processor", "session_params", "token_ids_logprob"), ()),
        "return_hidden_states": (False,),
    }

    text: Annotated[Text | None, PlainValidator(_text, json_schema_input_type=Text)] = None
    input_ids: Annotated[Ids | None, PlainValidator(_input_ids, json_schema_input_type=Ids)] = None
    sampling_params: Annotated[list[NativeSampling], BeforeValidator(_as_list)] = Field(
        default_factory=lambda: [NativeSampling.model_validate({})],
        max_length=MAX_PROMPTS,
        description="an object, or a list with one per prompt",
    )
    stream: bool = Field(False, description="answer with server-sent events; each repeats the whole text")
    return_logprob: bool = False
    top_logprobs_num: int = Field(0, ge=0, le=MAX_TOP_LOGPROBS, description="needs return_logprob")
    logprob_start_len: int = Field(
        -1, ge=-1, le=INT32_MAX, description="first prompt token to report logprobs of; -1: of none"
    )
    return_text_in_logprobs: bool = False
    rid: Annotated[list[Rid], BeforeValidator(_as_list)] = Field(
        [], max_length=MAX_PROMPTS, description="a name to abort the request by, or a list of them"
    )

    @property
    def is_batch(self) -> bool:
        given = self.input_ids if self.text is None else self.text
        return isinstance(given, list) and not isinstance(given[0], int)

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        return prompt_list(self.input_ids if self.text is None else self.text)

    @property
    def n(self) -> int:
        return self.sampling_params[0].n

    @property
    def logprobs(self) -> int | None:
        return self.top_logprobs_num if self.return_logprob else None

    @property
    def prompt_logprobs(self) -> int | None:
        return self.top_logprobs_num if self.return_logprob and self.logprob_start_len >= 0 else None

    def check(self) -> None:
        """Raises RequestError if fields contradict each other."""
        if (self.text is None) == (self.input_ids is None):
            raise RequestError("give either text or input_ids", param="text")
        if self.top_logprobs_num and not self.return_logprob:
            raise RequestError("top_logprobs_num needs return_logprob to be true", param="top_logprobs_num")
        if self.logprob_start_len >= 0 and not self.return_logprob:
            raise RequestError("logprob_start_len needs return_logprob to be true", param="logprob_start_len")
        count = len(self.prompts)
        if len(self.sampling_params) not in (1, count):
            raise RequestError(
                f"sampling_params has {len(self.sampling_params)} entries for {count} prompts",
                param="sampling_params",
            )
        if any(params.n != self.n for params in self.sampling_params):
            raise RequestError("sampling_params must all have the same n", param="sampling_params")
        if self.rid and (len(self.rid) != count or len(set(self.rid)) != count):
            raise RequestError(f"rid must be {count} different names, one per prompt", param="rid")


class AbortRequest(Schema):
    """The body of POST /abort_request."""

    rid: str = Field("", max_length=MAX_RID, description="a name given as rid, or an id from an answer")
    abort_all: bool = Field(False, description="needs the admin key, if there is one")


class TokenizeRequest(Schema):
    """The body of POST /tokenize: texts, or a conversation as /v1/chat/completions takes it."""

    model: str = ""
    prompt: Annotated[Text | None, PlainValidator(_bounded_text, json_schema_input_type=Text)] = None
    add_special_tokens: bool = Field(True, description="of prompt; templates write theirs themselves")
    messages: list[Message] = Field([], max_length=MAX_MESSAGES, description="instead of prompt; text only")
    tools: Tools = []
    chat_template_kwargs: TemplateOptions = Field({}, max_length=MAX_TEMPLATE_KWARGS)
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False

    def conversation(self) -> Conversation:
        return Conversation(
            messages=self.messages,
            tools=self.tools,
            options=self.chat_template_kwargs,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
        )

    @model_validator(mode="after")
    def _one_of_them(self) -> "TokenizeRequest":
        if bool(self.messages) == (self.prompt is not None):
            wrong = "given with messages" if self.messages else "missing"
            raise ValueError(f"prompt is {wrong}; give either prompt or messages")
        if any(isinstance(part, Picture) for message in self.messages for part in message.content):
            raise ValueError("messages has images; this route takes text only")
        return self


class DetokenizeRequest(Schema):
    """The body of POST /detokenize."""

    model: str = ""
    tokens: Annotated[Ids, PlainValidator(_bounded_ids, json_schema_input_type=Ids)]
    skip_special_tokens: bool = True
