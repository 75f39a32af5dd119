"""How each kind of server is asked, and what its answers say. No network in here."""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Any

from hybridjax.benchmarking.datasets import Item
from hybridjax.errors import HybridJaxError

PATHS = {
    "hybridjax": "/v1/completions",
    "openai": "/v1/completions",
    "openai-chat": "/v1/chat/completions",
    "sglang": "/generate",
}
# What SGLang's and vLLM's benchmarks call them.
ALIASES = {
    "sglang-native": "sglang",
    **dict.fromkeys(("sglang-oai", "vllm", "lmdeploy"), "openai"),
    **dict.fromkeys(("sglang-oai-chat", "vllm-chat", "lmdeploy-chat"), "openai-chat"),
}
MAX_MESSAGE = 300


class AnswerError(HybridJaxError):
    """A server's answer says that the request failed, or cannot be understood."""


def request_body(
    backend: str, model: str, item: Item, *, stream: bool, ignore_eos: bool, extra: Mapping[str, Any]
) -> dict[str, Any]:
    """The JSON that asks for a greedy completion of exactly ``item.output_len`` tokens.

    ``extra`` replaces or adds top-level fields; for sglang, a mapping under ``sampling_params`` is
    merged into the one made here.
    """
    if backend == "sglang":
        prompt = {"text": item.prompt} if isinstance(item.prompt, str) else {"input_ids": list(item.prompt)}
        sampling = {"temperature": 0.0, "max_new_tokens": item.output_len, "ignore_eos": ignore_eos}
        extra = dict(extra)
        sampling |= extra.pop("sampling_params", {})
        return prompt | {"sampling_params": sampling, "stream": stream} | extra
    body: dict[str, Any] = {"model": model, "max_tokens": item.output_len, "temperature": 0.0}
    if backend == "openai-chat":
        body["messages"] = [{"role": "user", "content": item.prompt}]
    else:
        body["prompt"] = item.prompt if isinstance(item.prompt, str) else list(item.prompt)
    if ignore_eos:
        body["ignore_eos"] = True
    if backend == "hybridjax":
        # Tells how many tokens a chunk carries; text alone does not.
        body["return_token_ids"] = True
    body["stream"] = stream
    if stream:
        body["stream_options"] = {"include_usage": True}
    return body | dict(extra)


def logprob_fields(backend: str, top: int) -> dict[str, Any]:
    """The fields that ask for the log probabilities of generated tokens and of the ``top`` best ones."""
    match backend:
        case "sglang":
            return {"return_logprob": True, "top_logprobs_num": top}
        case "openai-chat":
            return {"logprobs": True, "top_logprobs": top}
        case _:
            return {"logprobs": top}


class EventParser:
    """Server-sent events from bytes, however they are cut; only ``data`` matters here."""

    def __init__(self):
        self._rest = b""

    def feed(self, data: bytes) -> Iterator[str]:
        """Takes bytes and yields the data of each line that is now complete."""
        # Lines are cut as bytes: str.splitlines would also cut at U+2028, which JSON strings may hold.
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[5:].strip().decode("utf-8", "replace")


@dataclasses.dataclass
class Answer:
    """What the events of one request have said so far.

    Attributes:
      text: the completion.
      tokens: generated tokens as reported with the text, None if the server does not say.
      prompt_tokens, output_tokens: from the server's usage.
      finished: a finish reason or the end marker was seen.
    """

    backend: str
    text: str = ""
    tokens: int | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    finished: bool = False

    def event(self, data: str) -> int:
        """Takes one event.

        Returns:
          How many tokens it brought; 1 for text whose tokens nobody counted.

        Raises:
          AnswerError: the event reports an error or is not what this kind of server sends.
        """
        if data == "[DONE]":
            self.finished = True
            return 0
        return self.take(parse_object(data))

    def take(self, body: dict[str, Any]) -> int:
        """Takes a whole answer or the object of one event; see ``event``."""
        if body.get("error"):
            raise AnswerError(error_message(body))
        try:
            return self._take_native(body) if self.backend == "sglang" else self._take_openai(body)
        except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
            raise AnswerError(f"unexpected answer ({error!r}): {json.dumps(body)[:MAX_MESSAGE]}") from error

    def _take_openai(self, body: dict[str, Any]) -> int:
        usage = body.get("usage")
        if usage:
            self.prompt_tokens = int(usage["prompt_tokens"])
            self.output_tokens = int(usage["completion_tokens"])
        if not body["choices"]:
            return 0
        choice = body["choices"][0]
        message = choice.get("delta") or choice.get("message") or choice
        text = message.get("text") or message.get("content") or ""
        text += message.get("reasoning_content") or ""
        self.text += text
        self.finished |= choice.get("finish_reason") is not None
        ids = choice.get("token_ids")
        if ids is None:
            return 1 if text else 0
        self.tokens = (self.tokens or 0) + len(ids)
        return len(ids)

    def _take_native(self, body: dict[str, Any]) -> int:
        meta = body["meta_info"]
        reason = meta.get("finish_reason")
        if isinstance(reason, dict) and reason.get("type") == "abort":
            raise AnswerError(f"aborted: {reason.get('message', 'no reason given')}")
        self.finished |= reason is not None
        before = self.tokens or 0
        # Text and counts are those since the start, not since the last event.
        self.text = body.get("text") or self.text
        self.tokens = self.output_tokens = int(meta["completion_tokens"])
        self.prompt_tokens = meta.get("prompt_tokens", self.prompt_tokens)
        return max(0, self.tokens - before)


def parse_object(text: str) -> dict[str, Any]:
    """A JSON object; raises AnswerError for anything else."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise AnswerError(f"not a JSON object: {text[:MAX_MESSAGE]!r}")
    return value


def error_message(body: Mapping[str, Any]) -> str:
    """The message of an error object in OpenAI's shape or any other."""
    error = body.get("error", body)
    message = error.get("message") if isinstance(error, Mapping) else error
    return " ".join(str(message or dict(body)).split())[:MAX_MESSAGE]
