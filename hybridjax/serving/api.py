"""The engine's front door: what goes in and what comes out. Everything above knows only this."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

import numpy as np

from hybridjax.errors import RequestError

MAX_TOP_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_TOKENS = 64
MAX_LOGIT_BIAS = 300
MAX_PRIORITY = 1000
MAX_CACHE_SALT = 256
MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY = 0.01, 100

FinishReason = Literal["stop", "length", "abort", "timeout", "error"]
GrammarKind = Literal["json_schema", "json_object", "regex", "ebnf", "lark"]


@dataclasses.dataclass(frozen=True)
class Grammar:
    """What a completion must look like, checked and compiled before the request is accepted.

    Attributes:
      kind: the language of ``source``: a JSON schema, nothing (any JSON object), a regular expression, a
        grammar in EBNF (XGrammar's and SGLang's GBNF), or one in llguidance's Lark.
      source: text in that language.
      field: the request field that it came in, for errors.
    """

    kind: GrammarKind
    source: str = ""
    field: str = "grammar"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to continue one prompt.

    Attributes:
      max_tokens: tokens to generate at most; None: as many as the context has room for.
      temperature: 0 is greedy; otherwise logits are divided by it.
      top_k: sample among the k most likely tokens; 0 or -1: all.
      top_p: smallest set of tokens with at least this probability.
      min_p: drop tokens less likely than this times the most likely one.
      seed: the request's own random stream, the same whatever else runs; None: drawn by the engine.
      repetition_penalty: > 1 lowers logits of tokens in prompt or completion (CTRL, arXiv 1909.05858).
      presence_penalty, frequency_penalty: subtracted from logits of tokens in the completion, once or
        per occurrence (OpenAI's definition).
      logit_bias: token id -> number added to its logit.
      stop: strings that end the completion; not part of the text unless include_stop_str_in_output.
      stop_token_ids: further token ids that end it, beside the model's own.
      ignore_eos: go on after the model's end-of-sequence tokens.
      min_tokens: no stop token is sampled before this many tokens.
      logprobs: report the sampled token's log probability (of the model's own distribution, before
        temperature and penalties) and those of this many most likely tokens; None: none.
      skip_special_tokens: leave special tokens out of the text.
      prompt_logprobs: like logprobs, for the tokens of the prompt; such a prompt is computed whole, without
        cached prefixes.
      grammar: what the completion must look like.
    """

    max_tokens: int | None = 16
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = dataclasses.field(default_factory=dict)
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    logprobs: int | None = None
    skip_special_tokens: bool = True
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None

    def __post_init__(self):
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        if self.top_k == -1:
            object.__setattr__(self, "top_k", 0)
        for name, low, high in _RANGES:
            _check_number(name, getattr(self, name), low, high)
        _check_list("stop", self.stop, MAX_STOP_STRINGS, _is_stop_string, "strings of 1 to 1024 characters")
        _check_list("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKENS, _is_token, "token ids")
        allowed = f"a map of at most {MAX_LOGIT_BIAS} token ids to numbers in -100..100"
        bias = self.logit_bias
        if not isinstance(bias, Mapping) or len(bias) > MAX_LOGIT_BIAS:
            raise RequestError(f"logit_bias must be {allowed}", param="logit_bias")
        for token, value in bias.items():
            if not (_is_token(token) and type(value) in (int, float) and -100 <= value <= 100):
                raise RequestError(
                    f"logit_bias maps {token!r} to {value!r}; it must be {allowed}", param="logit_bias"
                )


def _check_number(name: str, value: Any, low: float, high: float) -> None:
    if value is None and name in _OPTIONAL:
        return
    whole = name in _WHOLE
    kinds = (int,) if whole else (int, float)
    if value is None or type(value) not in kinds or not low <= value <= high:  # a NaN is in no range
        kind = "a whole number" if whole else "a number"
        raise RequestError(f"{name} is {value!r}; it must be {kind} between {low} and {high}", param=name)


def _check_list(name: str, value: Any, most: int, is_item: Callable[[Any], bool], items: str) -> None:
    if not isinstance(value, Sequence) or len(value) > most or not all(map(is_item, value)):
        raise RequestError(f"{name} must be a list of at most {most} {items}", param=name)


def _is_stop_string(value: Any) -> bool:
    return isinstance(value, str) and 1 <= len(value) <= 1024


def _is_token(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**31


_WHOLE = ("max_tokens", "top_k", "seed", "min_tokens", "logprobs", "prompt_logprobs")
_OPTIONAL = ("max_tokens", "seed", "logprobs", "prompt_logprobs")
_RANGES = (
    ("max_tokens", 1, 2**31 - 1),
    ("temperature", 0, 100),
    ("top_k", 0, 2**31 - 1),
    ("top_p", 0, 1),
    ("min_p", 0, 1),
    ("seed", -(2**63), 2**63 - 1),
    ("repetition_penalty", MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY),
    ("presence_penalty", -2, 2),
    ("frequency_penalty", -2, 2),
    ("min_tokens", 0, 2**31 - 1),
    ("logprobs", 0, MAX_TOP_LOGPROBS),
    ("prompt_logprobs", 0, MAX_TOP_LOGPROBS),
)


@dataclasses.dataclass(frozen=True)
class TokenLogprob:
    """Log probability of a generated token and of the most likely ones, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class RequestOutput:
    """One event of a request: what is new since the last event.

    A request yields any number of events with ``finish_reason`` None and then exactly one with a
    reason, which is the last. Tokens may come without text (a stop string or a character may be
    forming) and text without tokens (held text that turned out not to be a stop string).

    Attributes:
      token_ids: new tokens, the stop token included.
      text: new text; never shows any part of a matched stop string.
      stop_reason: the stop string or stop token id that matched, None for the model's own end token.
      logprobs: one entry per new token if asked for.
      prompt_logprobs: in the first event with tokens, if asked for: one entry per prompt token, None for the
        first, which nothing predicts.
      queue_seconds: from being accepted to first getting memory; None while it has not got any.
      error: for finish_reason "error", what went wrong.
      is_requests_fault: whether that lies in the request, as with a grammar that goes beyond a limit.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    text: str = ""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    queue_seconds: float | None = None
    error: str | None = None
    is_requests_fault: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerationResult:
    """A finished request of the offline ``Engine.generate``."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    stop_reason: int | str | None
    logprobs: tuple[TokenLogprob, ...] | None
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None


@dataclasses.dataclass(frozen=True)
class ImageSupport:
    """What images a prompt may have.

    Attributes:
      max_image_bytes: of an encoded file.
      max_image_pixels: width * height before resizing, of all images together.
      max_images: per prompt.
    """

    max_image_bytes: int
    max_image_pixels: int
    max_images: int


@dataclasses.dataclass(frozen=True)
class EngineInfo:
    """What a front needs to know about the engine (all of it may be shown to clients).

    Attributes:
      sampling_defaults: values that the checkpoint recommends for fields of SamplingParams.
      images: None if the model takes none.
      bytes_per_token, bytes_per_request: device memory per token in the K/V pages, and per running request
        or kept snapshot besides; 0: unknown.
    """

    model_name: str
    model_path: str
    context_length: int
    vocab_size: int
    max_running_requests: int
    max_total_tokens: int
    sampling_defaults: Mapping[str, float] = dataclasses.field(default_factory=dict)
    images: ImageSupport | None = None
    bytes_per_token: float = 0.0
    bytes_per_request: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineStats:
    """How busy the engine is, as of its last step.

    Attributes:
      running: requests that hold memory, in prefill or decoding.
      waiting: requests that do not yet.
      used_pages, total_pages: K/V pages that requests hold, and that there are.
      used_slots, total_slots: recurrent states, likewise.
      preempted: how often a request had to give its memory back, in all.
    """

    running: int = 0
    waiting: int = 0
    used_pages: int = 0
    total_pages: int = 0
    used_slots: int = 0
    total_slots: int = 0
    preempted: int = 0


Prompt = str | Sequence[int]
OnOutput = Callable[[RequestOutput], None]


class FrontDoor(Protocol):
    """What a server may call. Thread-safe."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def is_healthy(self) -> bool: ...

    @property
    def stats(self) -> EngineStats:
        """A snapshot; costs the engine's thread nothing."""
        ...

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams,
        on_output: OnOutput,
        *,
        request_id: str | None = None,
        images: Sequence[np.ndarray] = (),
        priority: int = 0,
        cache_salt: str | None = None,
        timeout: float | None = None,
    ) -> str:
        """Queues a request and returns its id; tokenises and prepares images in the calling thread.

        Args:
          prompt: text or token ids, with one placeholder per image.
          params: how to continue it.
          on_output: called from the engine's thread; must neither block nor raise.
          request_id: None: made up.
          images: uint8[H, W, 3], RGB, in the order of their placeholders. Not changed, and not kept as they
            are, so that requests may share them.
          priority: only with EngineConfig.enable_priority_scheduling: higher first.
          cache_salt: cached prefixes are shared only among requests with the same salt.
          timeout: seconds from now after which the request ends with reason "timeout".

        Raises:
          RequestError: the prompt is empty, too long for the context with max_tokens, or has ids
            outside the vocabulary; not as many placeholders as images, or images that the model does
            not take; a duplicate request_id.
          QueueFullError: max_queued_requests are waiting.
          EngineDeadError: the engine has stopped.
        """
        ...

    def flush_cache(self) -> None:
        """Forgets every cached prefix, between two steps; running requests are untouched."""
        ...

    def abort(self, request_id: str) -> None:
        """Ends a request soon; its last event says "abort". An unknown or finished id is ignored."""
        ...
