"""A request on the host: its token ids, its settings, what it holds, and how far it has got."""

import dataclasses
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from hybridjax.errors import RequestError
from hybridjax.ops.sampling import MAX_DEVICE_STOP_TOKENS
from hybridjax.serving.api import MAX_CACHE_SALT, MAX_PRIORITY, FinishReason, SamplingParams
from hybridjax.serving.prompt_images import PromptImages

MAX_PROMPT_LOGPROBS = 2**19


@dataclasses.dataclass(eq=False)
class Request:
    """One accepted request. Written by the scheduler and the engine's thread, read by the runner.

    Where it stands follows from ordered lengths, all in tokens of prompt + completion:

        0 <= cached <= computed <= scheduled <= limit

    It waits while it has no slot, is in prefill while ``scheduled < prompt_length``, and may decode
    from then on, even before its first token has been read, until ``scheduled == limit``.

    Preempted, it waits again with all lengths 0 but keeps ``output``. Its prompt is then prefilled anew
    and the tokens that are known are fed through the decode steps that follow (see DecodeRow.forced): the
    same programs see the same tokens, so every state comes back.

    Attributes:
      prompt_ids: int32[prompt_length], read-only.
      max_tokens: tokens to generate at most, resolved against the context.
      seed: 64-bit seed of the request's random stream, resolved.
      eos_tokens: the model's end tokens that end this request; with ignore_eos only if it has a grammar.
      images: the prompt's images; features: what the vision tower made of them, [tokens, hidden], while
        the prompt is being computed.
      stop_tokens: every token id that ends it, eos_tokens first, without repetitions.
      arrival: when it was accepted, on the engine's clock.
      deadline: when it ends unfinished, on the same clock; None: never.
      priority: higher goes first, where the scheduler looks at it.
      cache_salt: cached prefixes are shared among equal ones only.
      waited_for: length of ``output`` for whose next mask the scheduler has waited; -1 for none.
      matcher: the state of its grammar (hybridjax/structured), None for none.
      output: generated tokens that have been read.
      epoch: how often it has been preempted; steps launched in an earlier epoch do not count.
      admitted: when it first got a slot, on the engine's clock; None while it never had one.
      cached_tokens: tokens that were taken from the prefix cache at the first admission.
      cached: likewise at the last one; what the request starts from.
      computed: tokens in the caches according to results that have been read.
      scheduled: tokens in the caches once every launched step has run.
      pages: page ids in order of position: for the prompt and as far as decode steps were launched.
      slot: state slot, 0 for none.
      restore_slot: slot with the state after the cached tokens, read by the first prefill step; 0 for none.
      snapshots: positions after which the state shall be kept, ascending, still to be passed.
      pending_snapshots: slots that launched steps write, by position; the request's until confirmed.
      finish_reason: None until its last event.
    """

    request_id: str
    prompt_ids: np.ndarray
    params: SamplingParams
    max_tokens: int
    seed: int
    eos_tokens: tuple[int, ...] = ()
    arrival: float = 0.0
    images: PromptImages | None = None
    features: np.ndarray | None = None
    deadline: float | None = None
    priority: int = 0
    cache_salt: bytes = b""
    matcher: Any = None
    output: list[int] = dataclasses.field(default_factory=list)
    waited_for: int = -1
    epoch: int = 0
    admitted: float | None = None
    cached_tokens: int = 0
    stop_tokens: tuple[int, ...] = dataclasses.field(init=False)
    cached: int = 0
    computed: int = 0
    scheduled: int = 0
    pages: list[int] = dataclasses.field(default_factory=list)
    slot: int = 0
    restore_slot: int = 0
    snapshots: list[int] = dataclasses.field(default_factory=list)
    pending_snapshots: dict[int, int] = dataclasses.field(default_factory=dict)
    finish_reason: FinishReason | None = None

    def __post_init__(self):
        self.stop_tokens = tuple(dict.fromkeys((*self.eos_tokens, *self.params.stop_token_ids)))
        self.prompt_ids.flags.writeable = False

    @property
    def prompt_length(self) -> int:
        return len(self.prompt_ids)

    @property
    def queue_seconds(self) -> float | None:
        """How long it waited for its first slot; None while it does."""
        return None if self.admitted is None else self.admitted - self.arrival

    @property
    def cache_ids(self) -> np.ndarray:
        """What the prefix cache knows the prompt by: int[prompt_length]."""
        return self.prompt_ids if self.images is None else self.images.cache_ids

    @property
    def rope_delta(self) -> int:
        """What the rotary position of a generated token exceeds its position by."""
        return 0 if self.images is None else self.images.rope_delta

    @property
    def limit(self) -> int:
        """Tokens that are ever in the caches: the last generated token is never fed."""
        return self.prompt_length + self.max_tokens - 1

    @property
    def min_position(self) -> int:
        """Stop tokens are not sampled for positions below this one; with a grammar its masks see to that."""
        return 0 if self.params.grammar is not None else self.prompt_length + self.params.min_tokens

    @property
    def device_stop_tokens(self) -> tuple[int, ...]:
        """The stop tokens that the device looks for; the host looks for all of them."""
        return self.stop_tokens[:MAX_DEVICE_STOP_TOKENS]

    @property
    def needs_sampler_reset(self) -> bool:
        """Whether sampling reads penalty counts or a bias, which must be prepared at admission."""
        p = self.params
        penalties = (p.repetition_penalty, p.presence_penalty, p.frequency_penalty)
        return penalties != (1, 0, 0) or bool(p.logit_bias)

    @property
    def wants_top_logprobs(self) -> bool:
        return bool(self.params.logprobs)

    def pages_needed(self, page_size: int) -> int:
        """Pages for the whole prompt and the whole completion."""
        return -(-(self.prompt_length + self.max_tokens) // page_size)

    @property
    def known_length(self) -> int:
        """Tokens of prompt and completion that are known."""
        return self.prompt_length + len(self.output)

    def known_tokens(self, position: int, steps: int) -> tuple[int, ...]:
        """What ``steps`` decode steps from ``position`` on are known to generate, as far as it is known."""
        first = position + 1 - self.prompt_length
        return tuple(self.output[first : first + steps])


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a request is checked against.

    Attributes:
      context_length: longest prompt + completion that any request can have.
      eos_tokens: the model's end tokens.
    """

    context_length: int
    vocab_size: int
    eos_tokens: tuple[int, ...] = ()


def make_request(
    request_id: str,
    prompt_ids: Sequence[int] | np.ndarray,
    params: SamplingParams,
    limits: Limits,
    *,
    seed: int,
    arrival: float = 0.0,
    images: PromptImages | None = None,
    deadline: float | None = None,
    priority: int = 0,
    cache_salt: str | None = None,
) -> Request:
    """Checks a prompt and its settings and resolves what they leave open.

    Raises:
      RequestError: naming the parameter at fault.
    """
    ids = _checked_prompt(prompt_ids, limits)
    room = limits.context_length - len(ids)
    if room < 1:
        raise RequestError(
            f"the prompt has {len(ids)} tokens; the context of {limits.context_length} tokens must also "
            "hold at least one generated token",
            param="prompt",
            code="context_length_exceeded",
        )
    max_tokens = room if params.max_tokens is None else params.max_tokens
    if max_tokens > room:
        raise RequestError(
            f"the prompt has {len(ids)} tokens and max_tokens is {max_tokens}, {len(ids) + max_tokens} "
            f"together; the context holds {limits.context_length} tokens",
            param="max_tokens",
            code="context_length_exceeded",
        )
    if params.min_tokens > max_tokens:
        raise RequestError(
            f"min_tokens is {params.min_tokens}; at most max_tokens, {max_tokens} here, can be generated",
            param="min_tokens",
        )
    if params.prompt_logprobs is not None and len(ids) * (1 + params.prompt_logprobs) > MAX_PROMPT_LOGPROBS:
        raise RequestError(
            f"prompt_logprobs is {params.prompt_logprobs} for a prompt of {len(ids)} tokens; at most "
            f"{MAX_PROMPT_LOGPROBS} log probabilities are given, the tokens' own included",
            param="prompt_logprobs",
        )
    _check_in_vocabulary(params.logit_bias, "logit_bias", limits.vocab_size)
    _check_in_vocabulary(params.stop_token_ids, "stop_token_ids", limits.vocab_size)
    request = Request(
        request_id=request_id,
        prompt_ids=ids,
        params=params,
        max_tokens=max_tokens,
        seed=seed if params.seed is None else params.seed,
        # A grammar that is complete ends the request whatever it wants to ignore.
        eos_tokens=() if params.ignore_eos and params.grammar is None else limits.eos_tokens,
        arrival=arrival,
        images=images,
        deadline=deadline,
        priority=_checked_priority(priority),
        cache_salt=_checked_salt(cache_salt),
    )
    if params.min_tokens > 0 and params.grammar is None and len(request.stop_tokens) > MAX_DEVICE_STOP_TOKENS:
        raise RequestError(
            f"min_tokens is {params.min_tokens} with {len(request.stop_tokens)} stop tokens (the model's "
            f"and stop_token_ids); with min_tokens at most {MAX_DEVICE_STOP_TOKENS} are possible",
            param="min_tokens",
        )
    return request


def _checked_prompt(prompt_ids: Sequence[int] | np.ndarray, limits: Limits) -> np.ndarray:
    try:
        ids = np.asarray(prompt_ids)
    except ValueError:  # nested lists of different lengths
        ids = np.zeros((0, 0))
    if ids.size == 0 and ids.ndim == 1:
        raise RequestError("the prompt is empty; it must have at least one token", param="prompt")
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise RequestError("the prompt must be a string or a flat list of token ids", param="prompt")
    outside = (ids < 0) | (ids >= limits.vocab_size)
    if outside.any():
        where = int(np.argmax(outside))
        raise RequestError(
            f"prompt token {where} is {int(ids[where])}; token ids are 0..{limits.vocab_size - 1}",
            param="prompt",
        )
    return np.array(ids, np.int32)


def _checked_priority(priority: int) -> int:
    if type(priority) is not int or not -MAX_PRIORITY <= priority <= MAX_PRIORITY:
        raise RequestError(
            f"priority is {priority!r}; it must be a whole number between {-MAX_PRIORITY} and {MAX_PRIORITY}",
            param="priority",
        )
    return priority


def _checked_salt(salt: str | None) -> bytes:
    if salt is None:
        return b""
    if not isinstance(salt, str) or not 0 < len(salt) <= MAX_CACHE_SALT:
        raise RequestError(
            f"cache_salt must be a string of 1 to {MAX_CACHE_SALT} characters", param="cache_salt"
        )
    return salt.encode("utf-8", "surrogatepass")


def _check_in_vocabulary(tokens: Collection[int], name: str, vocab_size: int) -> None:
    for token in tokens:
        if token >= vocab_size:
            raise RequestError(f"{name} has token {token}; token ids are 0..{vocab_size - 1}", param=name)
