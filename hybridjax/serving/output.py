"""From sampled tokens to the events that a client sees: stop conditions, text, log probabilities."""

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from hybridjax.errors import HybridJaxError
from hybridjax.serving.api import FinishReason, GenerationResult, RequestOutput, TokenLogprob
from hybridjax.serving.plan import PromptScores, StepResult
from hybridjax.serving.request import Request


class TextSource(Protocol):
    """What the processor needs of ``hybridjax.text.Detokenizer``."""

    def push(self, ids: Sequence[int], /) -> str:
        """The text that has become certain with these tokens."""
        ...

    def flush(self) -> str:
        """The text that was still uncertain, as it stands at the end."""
        ...


class StopMatcher:
    """Finds stop strings in a stream of text (Knuth-Morris-Pratt, a few operations per character).

    The match that ends first wins, of those the longest; so the result does not depend on how the text
    was cut into pieces. What is held back is the longest suffix that could begin a stop string.
    """

    def __init__(self, stops: Sequence[str], *, include_match: bool = False):
        self._stops = [(stop, _failure_table(stop)) for stop in stops]
        self._matched = [0] * len(stops)
        self._held = ""
        self._include = include_match

    def push(self, text: str, *, armed: bool = True) -> tuple[str, str | None]:
        """Takes more text; returns the text that can be shown, and the stop string once one is complete.

        Modifies the matcher. After a match it must not be used any more. ``armed=False`` lets strings
        that are completed by this text pass.
        """
        if not self._stops:
            return text, None
        buffer = self._held + text
        for end in range(len(self._held) + 1, len(buffer) + 1):
            found = self._advance(buffer[end - 1], armed)
            if found is not None:
                self._held = ""
                return buffer[: end if self._include else end - len(found)], found
        shown = len(buffer) - max(self._matched)
        self._held = buffer[shown:]
        return buffer[:shown], None

    def flush(self) -> str:
        """Hands out the held text, which no more text follows. Modifies the matcher."""
        held, self._held = self._held, ""
        self._matched = [0] * len(self._stops)
        return held

    def _advance(self, character: str, armed: bool) -> str | None:
        found = None
        for i, (stop, failure) in enumerate(self._stops):
            matched = self._matched[i]
            while matched and stop[matched] != character:
                matched = failure[matched - 1]
            matched += stop[matched] == character
            if matched == len(stop):
                if armed and (found is None or len(stop) > len(found)):
                    found = stop
                matched = failure[matched - 1]
            self._matched[i] = matched
        return found


class OutputProcessor:
    """Turns one request's tokens into its events. Modified by every call; used by the engine's thread.

    Args:
      request: read only, except by the scheduler.
      text_source: None yields no text and finds no stop strings.
    """

    def __init__(self, request: Request, text_source: TextSource | None = None):
        self._request = request
        self._text_source = text_source
        params = request.params
        self._stops = StopMatcher(params.stop, include_match=params.include_stop_str_in_output)
        self._stop_tokens = frozenset(request.stop_tokens)
        self._count = 0
        self._prompt_scores: list[PromptScores] = []
        self._prompt_taken = False

    @property
    def completion_tokens(self) -> int:
        return self._count

    def push_prompt(self, scores: PromptScores) -> None:
        """Takes the log probabilities of a chunk of the prompt; chunks come in order, or again from 0 on."""
        if scores.start == 0:
            self._prompt_scores.clear()
        self._prompt_scores.append(scores)

    def push(self, result: StepResult, column: int, steps: int, first: int = 0) -> RequestOutput:
        """Processes the sampled tokens of steps ``first`` .. ``steps`` - 1 in a column of a result.

        Tokens after a stop are dropped; the others are added to the request's ``output``. The returned
        event's ``finish_reason`` says whether the request has ended.

        Raises:
          HybridJaxError: the device sampled from logits that are not finite, or left the row early.
          Exception: whatever the detokenizer or the request's matcher raises.
        """
        tokens: list[int] = []
        logprobs: list[TokenLogprob] = []
        pieces: list[str] = []
        reason: FinishReason | None = None
        stop_reason: int | str | None = None
        for step in range(first, steps):
            token = int(result.tokens[step, column])
            self._check_sampled(token, float(result.logprobs[step, column]))
            tokens.append(token)
            self._request.output.append(token)
            if self._request.params.logprobs is not None:
                logprobs.append(_token_logprob(result, step, column, self._request.params.logprobs))
            text, reason, stop_reason = self._accept(token)
            pieces.append(text)
            if reason is not None:
                break
        return self._event(tokens, "".join(pieces), reason, stop_reason, logprobs)

    def end(self, reason: FinishReason, error: str | None = None) -> RequestOutput:
        """The last event of a request that ends without a token of its own: abort, timeout or error.

        Text that was held back is handed out as at any end, up to a stop string, except after an error.

        Raises:
          Exception: whatever the detokenizer raises; never if ``reason`` is "error".
        """
        text = ""
        if reason != "error":
            text, _ = self._last_text([], self._count > self._request.params.min_tokens)
        return self._event([], text, reason, None, [], error)

    def _accept(self, token: int) -> tuple[str, FinishReason | None, int | str | None]:
        """Counts a token: its text, whether it ends the request, and what matched."""
        self._count += 1
        params = self._request.params
        armed = self._count > params.min_tokens
        matcher = self._request.matcher
        # Under a grammar a stop token comes early only where nothing else can.
        if (armed or matcher is not None) and token in self._stop_tokens:
            shown = [token] if params.include_stop_str_in_output else []
            matched = None if token in self._request.eos_tokens else token
            text, string = self._last_text(shown, armed)
            return text, "stop", matched if string is None else string
        if matcher is not None:
            matcher.accept(token)
            if matcher.is_complete:
                text, string = self._last_text([token], armed)
                return text, "stop", string
        if self._count == self._request.max_tokens:
            text, string = self._last_text([token], armed)
            return text, "length" if string is None else "stop", string
        if self._text_source is None:
            return "", None, None
        text, string = self._stops.push(self._text_source.push([token]), armed=armed)
        return text, None if string is None else "stop", string

    def _last_text(self, tokens: list[int], armed: bool) -> tuple[str, str | None]:
        """All remaining text, up to a stop string if there is one in it."""
        if self._text_source is None:
            return "", None
        text = (self._text_source.push(tokens) if tokens else "") + self._text_source.flush()
        shown, string = self._stops.push(text, armed=armed)
        return (shown, string) if string is not None else (shown + self._stops.flush(), None)

    def _check_sampled(self, token: int, logprob: float) -> None:
        if token < 0:
            raise HybridJaxError("the device left the request before it was finished")
        if not math.isfinite(logprob):
            raise HybridJaxError("the model produced numbers that are not finite")

    def _event(
        self,
        tokens: list[int],
        text: str,
        reason: FinishReason | None,
        stop_reason: int | str | None,
        logprobs: list[TokenLogprob],
        error: str | None = None,
    ) -> RequestOutput:
        return RequestOutput(
            request_id=self._request.request_id,
            token_ids=tuple(tokens),
            text=text,
            finish_reason=reason,
            stop_reason=stop_reason,
            logprobs=None if self._request.params.logprobs is None else tuple(logprobs),
            prompt_logprobs=self._take_prompt_logprobs() if tokens else None,
            prompt_tokens=self._request.prompt_length,
            completion_tokens=self._count,
            cached_tokens=self._request.cached_tokens,
            queue_seconds=self._request.queue_seconds,
            error=error,
        )

    def _take_prompt_logprobs(self) -> tuple[TokenLogprob | None, ...] | None:
        """Those of the whole prompt, once."""
        count, scores = self._request.params.prompt_logprobs, self._prompt_scores
        if count is None or self._count == 0 or self._prompt_taken:
            return None
        self._prompt_taken, self._prompt_scores = True, []
        ids = self._request.prompt_ids[1:].tolist()
        values = [value for part in scores for value in part.logprobs.tolist()]
        tops = [row for part in scores for row in _top_rows(part, count)]
        return None, *(TokenLogprob(*entry) for entry in zip(ids, values, tops, strict=True))


def _top_rows(scores: PromptScores, count: int) -> list[tuple[tuple[int, float], ...]]:
    pairs = zip(scores.top_ids[:, :count].tolist(), scores.top_logprobs[:, :count].tolist())
    return [tuple((t, v) for t, v in zip(*pair) if t >= 0) for pair in pairs]


def _token_logprob(result: StepResult, step: int, column: int, count: int) -> TokenLogprob:
    top: tuple[tuple[int, float], ...] = ()
    if count and result.top_ids is not None and result.top_logprobs is not None:
        ids = np.asarray(result.top_ids)[step, column, :count].tolist()
        values = np.asarray(result.top_logprobs)[step, column, :count].tolist()
        top = tuple((token, value) for token, value in zip(ids, values) if token >= 0)
    token, logprob = int(result.tokens[step, column]), float(result.logprobs[step, column])
    return TokenLogprob(token, logprob, top)


def _failure_table(pattern: str) -> list[int]:
    """table[i]: length of the longest proper prefix of pattern[: i + 1] that is also its suffix."""
    table = [0] * len(pattern)
    matched = 0
    for i in range(1, len(pattern)):
        while matched and pattern[matched] != pattern[i]:
            matched = table[matched - 1]
        matched += pattern[matched] == pattern[i]
        table[i] = matched
    return table


def generation_result(request: Request, events: Sequence[RequestOutput]) -> GenerationResult:
    """All events of a finished request as one result."""
    last = events[-1]
    assert last.finish_reason is not None
    logprobs: tuple[TokenLogprob, ...] | None = None
    if request.params.logprobs is not None:
        logprobs = tuple(item for event in events for item in event.logprobs or ())
    return GenerationResult(
        request_id=request.request_id,
        prompt_token_ids=tuple(request.prompt_ids.tolist()),
        token_ids=tuple(token for event in events for token in event.token_ids),
        text="".join(event.text for event in events),
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        logprobs=logprobs,
        prompt_logprobs=next((e.prompt_logprobs for e in events if e.prompt_logprobs is not None), None),
    )
