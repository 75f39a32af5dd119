"""The JSON that goes out: OpenAI's completion and chat objects."""

import dataclasses
import time
import uuid
from collections.abc import Iterable, Sequence
from typing import Any

from hybridjax.serving.api import RequestOutput, TokenLogprob
from hybridjax.serving.http.protocol import ChatCompletionRequest, CompletionRequest
from hybridjax.serving.http.replies import Reply, ReplyPlan
from hybridjax.serving.http.tokens import Piece, TokenTexts
from hybridjax.text.tool_calls import CallDelta, Delta

# JSON has no -inf; OpenAI's own servers use this number for "impossible".
LOWEST_LOGPROB = -9999.0


def usage(
    prompts: Sequence[Sequence[int]],
    n: int,
    last: dict[int, RequestOutput],
    reasoning_tokens: int | None = None,
) -> dict[str, Any]:
    """Token counts; a prompt counts once, however many choices continue it.

    Images make a prompt longer than it was sent; the engine knows by how much.
    """
    counted = {index // n: output.prompt_tokens for index, output in last.items()}
    prompt_tokens = sum(max(len(prompt), counted.get(i, 0)) for i, prompt in enumerate(prompts))
    completion_tokens = sum(output.completion_tokens for output in last.values())
    cached = sum(output.cached_tokens for index, output in last.items() if index % n == 0)
    details = {} if reasoning_tokens is None else {"reasoning_tokens": reasoning_tokens}
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached},
    } | ({"completion_tokens_details": details} if details else {})


class CompletionBodies:
    """Bodies of /v1/completions."""

    prefix = "cmpl-"
    whole_object = chunk_object = "text_completion"

    def __init__(
        self,
        request: CompletionRequest,
        texts: TokenTexts,
        prompts: Sequence[Sequence[int]],
        echoes: Sequence[str],
    ):
        """``echoes``: per prompt, the text to begin each of its completions with."""
        self._request = request
        self._texts = texts
        self._prompts = prompts
        self._echoes = echoes
        # Of each choice, where in its text the next token begins.
        self._offsets: dict[int, int] = {}
        self._echoed: set[int] = set()

    def shown(self, output: RequestOutput) -> RequestOutput:
        """The output without the token that the engine makes although none is wanted."""
        if self._request.max_tokens != 0:
            return output
        reason = "length" if output.finish_reason == "stop" else output.finish_reason
        nothing = {"token_ids": (), "text": "", "logprobs": None, "completion_tokens": 0}
        return dataclasses.replace(output, **nothing, finish_reason=reason, stop_reason=None)

    def opening(self, index: int) -> dict[str, Any] | None:
        """The first chunk of a choice, before anything is generated."""
        if self._request.echoes_logprobs:
            return None  # They come with the first token.
        echo = self._echo(index)
        return self._choice(index, echo, None, None) if echo else None

    def delta(self, index: int, output: RequestOutput, always: bool) -> dict[str, Any] | None:
        """The choice of a chunk; None if there is nothing to show, unless always wanted."""
        echo = ""
        if self._request.echoes_logprobs and index not in self._echoed and output.prompt_logprobs:
            echo = self._echo(index)
        logprobs = self._logprobs(index, output)
        # Tokens whose text is held back give a chunk only if something else of them is asked for.
        if not (always or echo or output.text or output.finish_reason or logprobs):
            return None
        return self._choice(index, echo + output.text, logprobs, output)

    def whole(self, index: int, output: RequestOutput) -> dict[str, Any]:
        text = self._echo(index) + output.text
        choice = self._choice(index, text, self._logprobs(index, output), output)
        if self._request.prompt_logprobs is not None:
            top = self._request.prompt_logprobs
            choice["prompt_logprobs"] = prompt_logprobs(output, self._texts, top)
        return choice

    def beside(self, output: RequestOutput) -> dict[str, Any]:
        """What the whole answer has beside its choices."""
        return {}

    def reasoning_tokens(self) -> int | None:
        """Of all choices; None if that is not known."""
        return None

    def _echo(self, index: int) -> str:
        return self._echoes[index // self._request.n] if self._request.echo else ""

    def _choice(self, index: int, text: str, logprobs: Any, output: RequestOutput | None) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": logprobs} | _ending(output)

    def _logprobs(self, index: int, output: RequestOutput) -> dict[str, Any] | None:
        wanted = self._request.logprobs
        if wanted is None:
            return None
        prompt = ()
        if self._request.echo and index not in self._echoed and output.prompt_logprobs:
            self._echoed.add(index)
            prompt = output.prompt_logprobs
        offsets, tokens = self._prompt_offsets(index, prompt)
        end = self._offsets.get(index, 0)
        entries = output.logprobs or ()
        for piece in map(self._piece, entries):
            tokens.append(piece.text)
            offsets.append(end)
            end += piece.characters
        self._offsets[index] = end
        if not tokens:
            return None
        every = (*prompt, *entries)
        # Nothing predicts the first token of a prompt.
        return {
            "tokens": tokens,
            "token_logprobs": [None if entry is None else finite(entry.logprob) for entry in every],
            "top_logprobs": [None if entry is None else self._top(entry, wanted) for entry in every],
            "text_offset": offsets,
        }

    def _prompt_offsets(
        self, index: int, prompt: Sequence[TokenLogprob | None]
    ) -> tuple[list[int], list[str]]:
        """Where each token of the prompt begins in the echo, and its text."""
        offsets: list[int] = []
        tokens: list[str] = []
        echo, at = self._echo(index), 0
        first = self._prompts[index // self._request.n][0]
        for entry in prompt:
            piece = self._texts.piece(first) if entry is None else self._piece(entry)
            tokens.append(piece.text)
            offsets.append(at)
            at += _advance(echo, at, piece)
        if prompt:
            self._offsets[index] = len(echo)
        return offsets, tokens

    def _piece(self, entry: TokenLogprob) -> Piece:
        return self._texts.piece(entry.token_id)

    def _top(self, entry: TokenLogprob, count: int) -> dict[str, float]:
        best: dict[str, float] = {}
        # Different tokens may read the same; the likelier one keeps the key.
        for token_id, logprob in (*entry.top[:count], (entry.token_id, entry.logprob)):
            best.setdefault(self._texts.piece(token_id).text, finite(logprob))
        return best


class ChatBodies:
    """Bodies of /v1/chat/completions."""

    prefix = "chatcmpl-"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, request: ChatCompletionRequest, texts: TokenTexts, plan: ReplyPlan):
        self._request = request
        self._texts = texts
        self._replies = [Reply(plan) for _ in range(request.n)]

    def shown(self, output: RequestOutput) -> RequestOutput:
        """The output as it is."""
        return output

    def opening(self, index: int) -> dict[str, Any] | None:
        """The first chunk of a choice, before anything is generated."""
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None} | _ending(None)

    def delta(self, index: int, output: RequestOutput, always: bool) -> dict[str, Any] | None:
        """The choice of a chunk; None if there is nothing to show, unless always wanted."""
        news = self._replies[index].push(output)
        logprobs = self._logprobs(output.logprobs)
        if not (always or news or output.finish_reason or logprobs):
            return None
        delta: dict[str, Any] = {"content": news.content} if news.content or (logprobs and not news) else {}
        delta |= _reasoning(news)
        if news.calls:
            delta["tool_calls"] = [_call(call) | {"index": call.index} for call in news.calls]
        return {"index": index, "delta": delta, "logprobs": logprobs} | self._ending(index, output)

    def whole(self, index: int, output: RequestOutput) -> dict[str, Any]:
        reply = self._replies[index].push(output)
        nothing_else = not (reply.reasoning or reply.calls)
        content = reply.content if reply.content or nothing_else else None
        message = {"role": "assistant", "content": content, "refusal": None} | _reasoning(reply)
        if reply.calls:
            message["tool_calls"] = [_call(call) for call in reply.calls]
        logprobs = self._logprobs(output.logprobs)
        return {"index": index, "message": message, "logprobs": logprobs} | self._ending(index, output)

    def beside(self, output: RequestOutput) -> dict[str, Any]:
        """What the whole answer has beside its choices."""
        top = self._request.prompt_logprobs
        return {} if top is None else {"prompt_logprobs": prompt_logprobs(output, self._texts, top)}

    def reasoning_tokens(self) -> int | None:
        """Of all choices; None if that is not known."""
        counts = [reply.reasoning_tokens for reply in self._replies]
        known = [count for count in counts if count is not None]
        return sum(known) if len(known) == len(counts) else None

    def _ending(self, index: int, output: RequestOutput) -> dict[str, Any]:
        ending = _ending(output)
        if output.finish_reason == "stop" and self._replies[index].has_calls:
            ending["finish_reason"] = "tool_calls"
        return ending

    def _logprobs(self, entries: tuple[TokenLogprob, ...] | None) -> dict[str, Any] | None:
        if not self._request.logprobs or not entries:
            return None
        content = []
        for entry in entries:
            top = [self._token(token_id, logprob) for token_id, logprob in entry.top]
            content.append(self._token(entry.token_id, entry.logprob) | {"top_logprobs": top})
        return {"content": content}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        text, encoded, _ = self._texts.piece(token_id)
        return {
            "token": text,
            "logprob": finite(logprob),
            "bytes": None if encoded is None else list(encoded),
        }


def _reasoning(delta: Delta) -> dict[str, Any]:
    return {"reasoning_content": delta.reasoning} if delta.reasoning else {}


def _call(call: CallDelta) -> dict[str, Any]:
    if call.name is None:
        return {"function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}


def _advance(echo: str, at: int, piece: Piece) -> int:
    """How many characters of a prompt from ``at`` on a token is; none if the prompt does not show it."""
    if piece.text.startswith("bytes:") and piece.bytes is not None:
        return piece.characters
    # Decoders drop the space of the first word.
    for text in (piece.text, piece.text.lstrip()):
        if text and echo.startswith(text, at):
            return len(text)
    return 0


def prompt_logprobs(output: RequestOutput, texts: TokenTexts, top: int) -> list[Any] | None:
    """vLLM's form: per token of the prompt, token id -> what is known of it; None for the first."""
    if output.prompt_logprobs is None:
        return None
    entries: list[Any] = []
    for entry in output.prompt_logprobs:
        if entry is None:
            entries.append(None)
            continue
        known: dict[str, Any] = {}
        ranked = [(token, value, rank) for rank, (token, value) in enumerate(entry.top, 1)]
        own = (entry.token_id, entry.logprob, next((r for t, _, r in ranked if t == entry.token_id), None))
        for token, value, rank in (own, *ranked[:top]):
            text = texts.piece(token).text
            known[str(token)] = {"logprob": finite(value), "rank": rank, "decoded_token": text}
        entries.append(known)
    return entries


Bodies = CompletionBodies | ChatBodies


class Envelope:
    """What every body of one response has around its choices."""

    def __init__(self, bodies: Bodies, request_id: str, model: str):
        self.response_id = bodies.prefix + request_id
        self._bodies = bodies
        self._shared = {"created": int(time.time()), "model": model}

    def whole(self, choices: Iterable[dict[str, Any]], counts: dict[str, Any]) -> dict[str, Any]:
        return self._around(self._bodies.whole_object, choices) | {"usage": counts}

    def chunk(self, choices: Iterable[dict[str, Any]], **counts: dict[str, Any] | None) -> dict[str, Any]:
        return self._around(self._bodies.chunk_object, choices) | counts

    def _around(self, kind: str, choices: Iterable[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.response_id, "object": kind, **self._shared, "choices": list(choices)}


def _ending(output: RequestOutput | None) -> dict[str, Any]:
    if output is None:
        return {"finish_reason": None, "stop_reason": None}
    if output.finish_reason == "timeout":
        # No name that OpenAI's clients know.
        return {"finish_reason": "abort", "stop_reason": "timeout"}
    return {"finish_reason": output.finish_reason, "stop_reason": output.stop_reason}


def finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB) if logprob == logprob else LOWEST_LOGPROB
