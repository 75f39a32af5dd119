"""Echo, log probabilities of prompts, and fields about how the engine treats a request."""

import json
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest
from http_fakes import BOS, EOS, FakeEngine, RunningServer, alphabet, saying

from hybridjax.serving.http import generation

COMPLETIONS, CHAT, GENERATE = "/v1/completions", "/v1/chat/completions", "/generate"
HELLO: list[Any] = [{"role": "user", "content": "hi"}]


def complete(client: openai.OpenAI, **fields: Any) -> Any:
    fields = {"prompt": "hi", "max_tokens": 2, **fields}
    return client.completions.create(model="fake", **fields)


def test_echo_with_logprobs(client: openai.OpenAI, engine: FakeEngine):
    [choice] = complete(client, echo=True, logprobs=1).choices
    assert choice.text == "hiab"
    assert choice.logprobs.tokens == ["<bos>", "h", "i", "a", "b"]
    assert choice.logprobs.token_logprobs == [None, -1.04, -1.05, -0.5, -0.5]
    assert choice.logprobs.top_logprobs == [
        None,
        {"i": -0.84, "h": -1.04},
        {"j": -0.85, "i": -1.05},
        {"a": -0.5},
        {"b": -0.5},
    ]
    # The token in front is no part of the text.
    assert choice.logprobs.text_offset == [0, 0, 1, 2, 3]
    [(_, params)] = engine.submitted.values()
    assert (params.prompt_logprobs, params.logprobs) == (1, 1)


def test_echo_without_the_most_likely(client: openai.OpenAI):
    [choice] = complete(client, echo=True, logprobs=0, prompt=[104, 105]).choices
    assert choice.logprobs.tokens == ["h", "i", "a", "b"]
    assert choice.logprobs.token_logprobs == [None, -1.05, -0.5, -0.5]
    assert choice.logprobs.top_logprobs == [None, {"i": -1.05}, {"a": -0.5}, {"b": -0.5}]
    assert choice.logprobs.text_offset == [0, 1, 2, 3]


@pytest.mark.parametrize("prompt", ["ü世x", "hi", ["hi", "yo!"]])
def test_streamed_echoes_join_to_the_whole(client: openai.OpenAI, engine: FakeEngine, prompt: Any):
    engine.script = saying("世b")
    fields = {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": 9, "n": 2}
    whole = complete(client, **fields).choices
    parts: dict[int, Any] = {i: {"text": "", "tokens": [], "text_offset": []} for i in range(len(whole))}
    for chunk in complete(client, **fields, stream=True):
        [choice] = chunk.choices
        parts[choice.index]["text"] += choice.text
        if choice.logprobs is not None:
            for name in ("tokens", "text_offset"):
                parts[choice.index][name] += getattr(choice.logprobs, name)
    for choice in whole:
        assert parts[choice.index]["text"] == choice.text
        for name in ("tokens", "text_offset"):
            assert parts[choice.index][name] == getattr(choice.logprobs, name)


def test_the_offsets_point_at_the_tokens(client: openai.OpenAI, engine: FakeEngine):
    engine.script = saying("bc")
    [choice] = complete(client, prompt="ü世x", echo=True, logprobs=0, max_tokens=9).choices
    for token, offset in zip(choice.logprobs.tokens, choice.logprobs.text_offset, strict=True):
        if not token.startswith(("bytes:", "<")):
            assert choice.text.startswith(token, offset)
    assert choice.logprobs.text_offset == [0, 0, 1, 1, 2, 2, 2, 3, 4, 5][: len(choice.logprobs.tokens)]


@pytest.mark.parametrize("logprobs", [None, 1])
@pytest.mark.parametrize("stream", [False, True])
def test_no_tokens_but_the_echo(http: httpx.Client, engine: FakeEngine, logprobs: int | None, stream: bool):
    body = {"prompt": "hi", "max_tokens": 0, "echo": True, "logprobs": logprobs, "stream": stream}
    body |= {"stream_options": {"include_usage": True}} if stream else {}
    reply = http.post(COMPLETIONS, json={**body, "return_token_ids": True})
    assert reply.status_code == 200, reply.text
    if stream:
        events = [json.loads(part.removeprefix("data: ")) for part in reply.text.split("\n\n")[:-2]]
        usage, choices = events[-1]["usage"], [c for event in events for c in event["choices"]]
    else:
        usage, choices = reply.json()["usage"], reply.json()["choices"]
    assert "".join(choice["text"] for choice in choices) == "hi"
    assert (choices[-1]["finish_reason"], choices[-1]["stop_reason"]) == ("length", None)
    assert all(choice.get("token_ids", []) == [] for choice in choices)
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (3, 0)
    seen = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    assert [part["tokens"] for part in seen] == ([["<bos>", "h", "i"]] if logprobs else [])
    # The engine has no less than one token to generate.
    assert [params.max_tokens for _, params in engine.submitted.values()] == [1]


EXPECTED: list[Any] = [
    None,
    {
        "104": {"logprob": -1.04, "rank": None, "decoded_token": "h"},
        "105": {"logprob": -0.84, "rank": 1, "decoded_token": "i"},
    },
    {
        "105": {"logprob": -1.05, "rank": None, "decoded_token": "i"},
        "106": {"logprob": -0.85, "rank": 1, "decoded_token": "j"},
    },
]


def test_vllms_prompt_logprobs(client: openai.OpenAI, engine: FakeEngine):
    [choice] = complete(client, extra_body={"prompt_logprobs": 1}).choices
    assert choice.model_extra["prompt_logprobs"] == EXPECTED
    assert choice.logprobs is None
    # Together with echo, the larger of both counts reaches the engine, and each gets its own.
    both = complete(client, echo=True, logprobs=3, extra_body={"prompt_logprobs": 1}).choices[0]
    assert both.model_extra["prompt_logprobs"] == EXPECTED
    assert [len(top) for top in both.logprobs.top_logprobs[1:3]] == [4, 4]
    less = complete(client, echo=True, logprobs=1, extra_body={"prompt_logprobs": 3}).choices[0]
    assert [len(top) for top in less.logprobs.top_logprobs[1:3]] == [2, 2]
    assert [len(known) for known in less.model_extra["prompt_logprobs"][1:]] == [4, 4]
    assert [params.prompt_logprobs for _, params in engine.submitted.values()] == [1, 3, 3]


def test_prompt_logprobs_of_a_chat(client: openai.OpenAI):
    done = client.chat.completions.create(
        model="fake", messages=HELLO, max_tokens=1, extra_body={"prompt_logprobs": 0}
    )
    assert done.model_extra is not None
    entries = done.model_extra["prompt_logprobs"]
    prompt = b"[user]hi\n[assistant]"
    assert entries[0] is None and len(entries) == len(prompt)
    assert [list(entry) for entry in entries[1:]] == [[str(byte)] for byte in prompt[1:]]


def test_their_number_is_bounded(http: httpx.Client, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(generation, "MAX_PROMPT_LOGPROBS", 8)
    for path, body in (
        (COMPLETIONS, {"prompt": "hi", "echo": True, "logprobs": 1, "n": 2}),
        (COMPLETIONS, {"prompt": ["hi", "hi"], "prompt_logprobs": 1}),
        (CHAT, {"messages": HELLO, "prompt_logprobs": 0}),
        (GENERATE, {"text": "hi", "return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2}),
    ):
        reply = http.post(path, json=body)
        assert reply.status_code == 400 and "at most 8 log probabilities" in reply.text
    assert engine.submitted == {}
    body = {"prompt": "hi", "echo": True, "logprobs": 1}
    assert http.post(COMPLETIONS, json=body).status_code == 200


def generate(http: httpx.Client, **fields: Any) -> dict[str, Any]:
    body = {"sampling_params": {"max_new_tokens": 2}, "return_logprob": True, **fields}
    reply = http.post(GENERATE, json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_sglangs_input_logprobs(http: httpx.Client, engine: FakeEngine):
    meta = generate(http, text="hi", logprob_start_len=0)["meta_info"]
    assert meta["input_token_logprobs"] == [[None, BOS, None], [-1.04, 104, None], [-1.05, 105, None]]
    assert meta["output_token_logprobs"] == [[-0.5, 97, None], [-0.5, 98, None]]
    assert "input_top_logprobs" not in meta
    fields = {"logprob_start_len": 2, "top_logprobs_num": 1, "return_text_in_logprobs": True}
    meta = generate(http, text="hi", **fields)["meta_info"]
    assert meta["input_token_logprobs"] == [[-1.05, 105, "i"]]
    assert meta["input_top_logprobs"] == [[[-0.85, 106, "j"]]]
    meta = generate(http, text="hi", logprob_start_len=0, top_logprobs_num=1)["meta_info"]
    assert meta["input_top_logprobs"][0] is None
    assert generate(http, text="hi", logprob_start_len=3)["meta_info"]["input_token_logprobs"] == []
    assert generate(http, text="hi")["meta_info"]["input_token_logprobs"] == []
    wanted = [params.prompt_logprobs for _, params in engine.submitted.values()]
    assert wanted == [0, 1, 1, 0, None]


def test_only_the_last_event_of_a_stream_repeats_them(http: httpx.Client):
    body = {"text": "hi", "return_logprob": True, "logprob_start_len": 0, "stream": True}
    reply = http.post(GENERATE, json={**body, "sampling_params": {"max_new_tokens": 3}})
    events = [json.loads(part.removeprefix("data: ")) for part in reply.text.split("\n\n")[:-2]]
    counts = [len(event["meta_info"]["input_token_logprobs"]) for event in events]
    assert counts == [0] * (len(events) - 1) + [3]


def test_a_batch_has_logprobs_of_each_prompt(http: httpx.Client):
    body = {"text": ["hi", "yo"], "sampling_params": {"max_new_tokens": 1, "n": 2}, "logprob_start_len": 1}
    replies: Any = generate(http, **body)
    tokens = [[token for _, token, _ in r["meta_info"]["input_token_logprobs"]] for r in replies]
    assert tokens == [[104, 105]] * 2 + [[121, 111]] * 2


@pytest.mark.parametrize(
    ("path", "body"), [(COMPLETIONS, {"prompt": "x"}), (CHAT, {"messages": HELLO}), (GENERATE, {"text": "x"})]
)
def test_the_engine_is_told(http: httpx.Client, engine: FakeEngine, path: str, body: dict[str, Any]):
    told = {"priority": -3, "cache_salt": "tenant", "timeout": 0.5}
    limit = {"sampling_params": {"max_new_tokens": 1}} if path == GENERATE else {"max_tokens": 1}
    assert http.post(path, json={**body, **limit, **told}).status_code == 200
    assert http.post(path, json={**body, **limit}).status_code == 200
    nothing = {"priority": 0, "cache_salt": None, "timeout": None}
    assert list(engine.options.values()) == [told, nothing]


@pytest.mark.parametrize(
    ("path", "body"), [(COMPLETIONS, {"prompt": "x"}), (CHAT, {"messages": HELLO}), (GENERATE, {"text": "x"})]
)
def test_nothing_in_time_is_a_504(http: httpx.Client, engine: FakeEngine, path: str, body: dict[str, Any]):
    engine.script = lambda prompt, params: iter(["timeout"])
    reply = http.post(path, json={**body, "timeout": 1})
    assert (reply.status_code, reply.json()["error"]["code"]) == (504, "timeout")
    assert "timeout passed" in reply.json()["error"]["message"]


def test_what_came_in_time_is_kept(client: openai.OpenAI, http: httpx.Client, engine: FakeEngine):
    engine.script = lambda prompt, params: iter([97, 98, "timeout"])
    [choice] = complete(client, max_tokens=9).choices
    assert (choice.text, choice.finish_reason) == ("ab", "abort")
    assert choice.model_extra == {"stop_reason": "timeout"}
    done = client.chat.completions.create(model="fake", messages=HELLO)
    assert (done.choices[0].message.content, done.choices[0].finish_reason) == ("ab", "abort")
    meta = generate(http, text="x", sampling_params={})["meta_info"]
    assert meta["finish_reason"] == {"type": "abort", "message": "the request's timeout passed"}
    # One choice in time is an answer.
    scripts = iter([["timeout"], [97, EOS]])
    engine.script = lambda prompt, params: iter(next(scripts))
    first, second = complete(client, n=2, max_tokens=9).choices
    assert [(c.text, c.finish_reason) for c in (first, second)] == [("", "abort"), ("a", "stop")]
    engine.script = alphabet


def test_a_stream_ends_at_the_timeout(client: openai.OpenAI, engine: FakeEngine):
    engine.script = lambda prompt, params: iter(["timeout"])
    chunks = list(complete(client, stream=True))
    assert [(c.choices[0].text, c.choices[0].finish_reason) for c in chunks] == [("", "abort")]


def test_conversations_are_tokenized(http: httpx.Client):
    body = {"messages": HELLO, "chat_template_kwargs": {"enable_thinking": False}}
    reply = http.post("/tokenize", json=body).json()
    assert bytes(reply["tokens"]) == b"[user]hi\n[assistant]<no_think>"
    assert reply["count"] == len(reply["tokens"])
    reply = http.post("/tokenize", json={"messages": HELLO, "add_generation_prompt": False}).json()
    assert bytes(reply["tokens"]) == b"[user]hi\n"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"messages": HELLO, "prompt": "x"}, "give either prompt or messages"),
        ({"messages": []}, "prompt is missing"),
        ({"messages": [{"role": "x"}]}, "messages[0].role"),
        ({"messages": HELLO, "tools": [{"type": "function", "function": {"name": "f"}}]}, "knows no tools"),
        ({"messages": HELLO, "continue_final_message": True}, "the assistant's"),
    ],
)
def test_bad_conversations_are_not_tokenized(http: httpx.Client, body: dict[str, Any], message: str):
    reply = http.post("/tokenize", json=body)
    assert reply.status_code == 400 and message in reply.text


def test_images_are_not_tokenized(http: httpx.Client):
    content = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}]
    reply = http.post("/tokenize", json={"messages": [{"role": "user", "content": content}]})
    assert reply.status_code == 400 and "text only" in reply.text


def test_without_a_chat_template_there_are_no_conversations(
    serve: Callable[..., RunningServer], engine: FakeEngine
):
    assert engine.tokenizer is not None
    engine.tokenizer.has_chat_template = False
    reply = httpx.post(serve().url + "/tokenize", json={"messages": HELLO})
    assert reply.status_code == 400 and "no chat template" in reply.text
