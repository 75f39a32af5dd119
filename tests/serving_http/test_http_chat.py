import httpx
import openai
import pytest
from http_fakes import FakeEngine, saying

from hybridjax.serving.api import SamplingParams

HELLO = [{"role": "user", "content": "hello"}]


def test_completes_a_chat(client: openai.OpenAI, engine: FakeEngine):
    engine.cached_tokens = 3
    engine.script = saying("Hi!")
    done = client.chat.completions.create(model="fake", messages=HELLO)
    [choice] = done.choices
    assert (choice.message.role, choice.message.content) == ("assistant", "Hi!")
    assert choice.finish_reason == "stop"
    assert choice.logprobs is None
    assert (done.object, done.model) == ("chat.completion", "fake")
    assert done.id.startswith("chatcmpl-")
    assert done.usage is not None and done.usage.prompt_tokens_details is not None
    prompt = list(b"[user]hello\n[assistant]")
    assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (len(prompt), 4)
    assert done.usage.prompt_tokens_details.cached_tokens == 3
    # Rendered chats bring their own special tokens, and no limit means the rest of the context.
    assert list(engine.submitted.values()) == [(prompt, SamplingParams(max_tokens=None))]


def test_the_roles_and_text_parts_are_rendered(client: openai.OpenAI, engine: FakeEngine):
    messages = [
        {"role": "developer", "content": "be kind"},
        {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
        {"role": "assistant", "content": "three", "refusal": None, "tool_calls": None},
        {"role": "tool", "content": "four", "tool_call_id": "7"},
    ]
    client.chat.completions.create(model="fake", messages=messages, max_tokens=1)  # pyright: ignore
    [(prompt, _)] = engine.submitted.values()
    assert bytes(prompt) == b"[system]be kind\n[user]one\ntwo\n[assistant]three\n[tool]four\n[assistant]"


def test_template_options_reach_the_template(client: openai.OpenAI, engine: FakeEngine):
    extra = {"chat_template_kwargs": {"enable_thinking": False}}
    client.chat.completions.create(model="fake", messages=HELLO, max_tokens=1, extra_body=extra)
    [(prompt, _)] = engine.submitted.values()
    assert bytes(prompt).endswith(b"[assistant]<no_think>")


@pytest.mark.parametrize("limit", [{"max_tokens": 4}, {"max_completion_tokens": 4}])
def test_both_names_of_the_limit_work(client: openai.OpenAI, limit: dict):
    done = client.chat.completions.create(model="fake", messages=HELLO, **limit)
    assert done.choices[0].message.content == "abcd"


def test_n_choices_have_streams_of_their_own(client: openai.OpenAI, engine: FakeEngine):
    done = client.chat.completions.create(model="fake", messages=HELLO, n=3, seed=0, max_tokens=3)
    assert [choice.message.content for choice in done.choices] == ["abc", "bcd", "cde"]
    assert [choice.index for choice in done.choices] == [0, 1, 2]
    assert len(engine.submitted) == 3


def test_streams_role_first_then_text_then_usage(client: openai.OpenAI):
    stream = client.chat.completions.create(
        model="fake", messages=HELLO, max_tokens=5, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    first = chunks[0].choices[0]
    assert (first.delta.role, first.delta.content, first.finish_reason) == ("assistant", "", None)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == "abcde"
    assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:-1])
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert (chunks[-1].usage.prompt_tokens, chunks[-1].usage.completion_tokens) == (23, 5)


def test_every_streamed_choice_has_its_role(client: openai.OpenAI):
    stream = client.chat.completions.create(
        model="fake", messages=HELLO, n=2, seed=0, max_tokens=3, stream=True
    )
    texts = {0: [], 1: []}
    roles = []
    for chunk in stream:
        [choice] = chunk.choices
        texts[choice.index].append(choice.delta.content or "")
        if choice.delta.role:
            roles.append(choice.index)
    assert {index: "".join(parts) for index, parts in texts.items()} == {0: "abc", 1: "bcd"}
    assert roles == [0, 1]


def test_logprobs_of_a_chat(client: openai.OpenAI, engine: FakeEngine):
    engine.script = saying("a世")
    done = client.chat.completions.create(
        model="fake", messages=HELLO, max_tokens=3, logprobs=True, top_logprobs=2
    )
    assert done.choices[0].logprobs is not None and done.choices[0].logprobs.content is not None
    first, second, _ = done.choices[0].logprobs.content
    assert (first.token, first.logprob, first.bytes) == ("a", -0.5, [97])
    assert [(t.token, t.logprob, t.bytes) for t in first.top_logprobs] == [
        ("a", -0.5, [97]),
        ("b", -1.5, [98]),
    ]
    assert (second.token, second.bytes) == ("bytes:\\xe4", [0xE4])


def test_logprobs_without_top_logprobs(client: openai.OpenAI):
    done = client.chat.completions.create(model="fake", messages=HELLO, max_tokens=2, logprobs=True)
    assert done.choices[0].logprobs is not None and done.choices[0].logprobs.content is not None
    assert [(t.token, t.top_logprobs) for t in done.choices[0].logprobs.content] == [("a", []), ("b", [])]


def test_streamed_logprobs_come_with_their_tokens(client: openai.OpenAI):
    stream = client.chat.completions.create(
        model="fake", messages=HELLO, max_tokens=4, logprobs=True, top_logprobs=1, stream=True
    )
    tokens = []
    for chunk in stream:
        if (logprobs := chunk.choices[0].logprobs) is not None:
            tokens += [token.token for token in logprobs.content or []]
    assert tokens == ["a", "b", "c", "d"]


def test_the_stop_string_is_named(http: httpx.Client):
    body = {"messages": HELLO, "stop": ["yy", "de"], "max_tokens": 9}
    [choice] = http.post("/v1/chat/completions", json=body).json()["choices"]
    assert choice["message"] == {"role": "assistant", "content": "abc", "refusal": None}
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", "de")


def test_without_a_tokenizer_there_is_no_chat(serve):
    server = serve(tokenizer=None)
    reply = httpx.post(server.url + "/v1/chat/completions", json={"messages": HELLO})
    assert reply.status_code == 400
    assert reply.json()["error"]["message"] == "this server has no tokenizer; use /v1/completions"
    for body, param in (
        ({"prompt": "text"}, "prompt"),
        ({"prompt": [1], "echo": True}, "echo"),
        ({"prompt": [1], "stop": "x"}, "stop"),
    ):
        reply = httpx.post(server.url + "/v1/completions", json=body)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)


def test_without_a_chat_template_there_is_no_chat(serve, engine: FakeEngine):
    assert engine.tokenizer is not None
    engine.tokenizer.has_chat_template = False
    server = serve()
    reply = httpx.post(server.url + "/v1/chat/completions", json={"messages": HELLO})
    assert reply.status_code == 400
    assert reply.json()["error"]["message"] == "this server has no chat template; use /v1/completions"
