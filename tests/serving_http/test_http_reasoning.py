from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest
from chat_fakes import EFFORT, OPENED, THINKING, TOOLS, TemplateTokenizer
from http_fakes import FakeEngine, RunningServer, saying

from hybridjax.serving.api import RequestOutput
from hybridjax.serving.http.replies import Reply, ReplyForms, ReplyPlan

USER: list[Any] = [{"role": "user", "content": "Why?"}]
THOUGHT = "<think>\nBecause.\n</think>\n\nSo."

Ask = Callable[..., Any]


@pytest.fixture
def ask(serve: Callable[..., RunningServer], engine: FakeEngine) -> Ask:
    """The first choice and the usage of an answer, whole and then streamed; both must say the same."""
    servers: dict[Any, RunningServer] = {}

    def asked(source: str, said: str, *, config: dict[str, Any] | None = None, **fields: Any) -> Any:
        key = source, str(config)
        if key not in servers:
            engine.tokenizer = TemplateTokenizer(source)
            servers[key] = serve(**(config or {}))
        engine.script = saying(said)
        body = {"messages": USER, **fields}
        with openai.OpenAI(base_url=servers[key].url + "/v1", api_key="none", max_retries=0) as client:
            create: Any = client.chat.completions.create
            extra = {name: body.pop(name) for name in list(body) if name in EXTRA}
            whole = create(model="fake", **body, extra_body=extra)
            usage = {"include_usage": True}
            stream = list(create(model="fake", **body, extra_body=extra, stream=True, stream_options=usage))
        message = whole.choices[0].message
        deltas = [chunk.choices[0].delta for chunk in stream[:-1]]
        thoughts = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
        content = "".join(delta.content or "" for delta in deltas)
        assert (thoughts, content) == (getattr(message, "reasoning_content", ""), message.content or "")
        assert stream[-1].usage == whole.usage
        details = whole.usage.completion_tokens_details
        return thoughts, message.content, details and details.reasoning_tokens

    return asked


EXTRA = ("chat_template_kwargs", "separate_reasoning", "continue_final_message", "add_generation_prompt")


def prompt(engine: FakeEngine) -> str:
    return bytes(list(engine.submitted.values())[-1][0]).decode()


def test_reasoning_goes_apart(ask: Ask):
    tokens = len(THOUGHT[: THOUGHT.index("</think>")]) + len("</think>")
    assert ask(THINKING, THOUGHT) == ("Because.", "So.", tokens)
    assert ask(THINKING, "So.") == ("", "So.", 0)
    # Nothing but reasoning: the content is null, and all tokens are the reasoning's.
    assert ask(THINKING, "<think>\nBecause") == ("Because", None, len("<think>\nBecause") + 1)


def test_a_prompt_may_open_the_reasoning(ask: Ask, engine: FakeEngine):
    said = THOUGHT.removeprefix("<think>\n")
    assert ask(OPENED, said)[:2] == ("Because.", "So.")
    assert prompt(engine).endswith("[assistant]<think>\n")
    off = {"enable_thinking": False}
    assert ask(OPENED, "So.", chat_template_kwargs=off) == ("", "So.", 0)
    assert prompt(engine).endswith("[assistant]<think>\n\n</think>\n\n")


def test_reasoning_may_stay(ask: Ask):
    assert ask(THINKING, THOUGHT, separate_reasoning=False)[:2] == ("", THOUGHT)
    said = THOUGHT.removeprefix("<think>\n")
    assert ask(OPENED, said, separate_reasoning=False)[:2] == ("", said)


def test_a_template_that_knows_no_reasoning_gets_no_parser(ask: Ask):
    assert ask(TOOLS, THOUGHT) == ("", THOUGHT, None)


@pytest.mark.parametrize(
    ("parser", "said", "expected"),
    [
        ("off", THOUGHT, ("", THOUGHT)),
        ("qwen3", THOUGHT, ("Because.", "So.")),
        ("qwen3", "Because.</think>So.", ("", "Because.</think>So.")),
        ("deepseek-r1", "Because.</think>So.", ("Because.", "So.")),
        ("deepseek-r1", THOUGHT, ("Because.", "So.")),
    ],
)
def test_the_operator_may_name_the_parser(ask: Ask, parser: str, said: str, expected: tuple[str, str]):
    assert ask(TOOLS, said, config={"reasoning_parser": parser})[:2] == expected


def test_earlier_reasoning_reaches_the_template(ask: Ask, engine: FakeEngine):
    turn = {"role": "assistant", "content": "So.", "reasoning_content": "Because."}
    ask(THINKING, "x", messages=[*USER, turn, *USER])
    assert prompt(engine) == f"[user]Why?\n[assistant]{THOUGHT}\n[user]Why?\n[assistant]"


def test_effort_reaches_templates_that_read_it(ask: Ask, engine: FakeEngine):
    ask(EFFORT, "x", reasoning_effort="high")
    assert prompt(engine) == "highWhy?"
    ask(EFFORT, "x", reasoning_effort="high", chat_template_kwargs={"reasoning_effort": "low"})
    assert prompt(engine) == "lowWhy?"
    ask(THINKING, "x", reasoning_effort="none")
    assert prompt(engine) == "[user]Why?\n[assistant]"


def test_the_last_message_is_continued(ask: Ask, engine: FakeEngine):
    begun = [*USER, {"role": "assistant", "content": "Because the "}]
    assert ask(THINKING, "sky", messages=begun, continue_final_message=True)[:2] == ("", "sky")
    assert prompt(engine) == "[user]Why?\n[assistant]Because the"
    thinking = [*USER, {"role": "assistant", "content": "<think>\nBecause"}]
    answer = ask(THINKING, " so</think>\n\nYes", messages=thinking, continue_final_message=True)
    assert answer[:2] == (" so", "Yes")
    ask(THINKING, "x", add_generation_prompt=False)
    assert prompt(engine) == "[user]Why?\n"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"messages": USER}, "the assistant's"),
        ({"messages": [*USER, {"role": "assistant", "content": " "}]}, "the assistant's"),
        ({"messages": USER, "add_generation_prompt": True}, "add_generation_prompt to be false"),
    ],
)
def test_only_an_assistants_text_is_continued(http: httpx.Client, fields: dict[str, Any], message: str):
    reply = http.post("/v1/chat/completions", json={"continue_final_message": True, **fields})
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, "continue_final_message")
    assert message in error["message"]


class SpecialTokenizer(TemplateTokenizer):
    """The tags of reasoning are special tokens, which decoding leaves out."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [256] if text in ("<think>", "</think>") else super().encode(text, add_special_tokens)


def test_special_tokens_are_kept_in_the_text_to_find_the_tags(
    serve: Callable[..., RunningServer], engine: FakeEngine
):
    engine.tokenizer = SpecialTokenizer(THINKING)
    server = serve()
    httpx.post(server.url + "/v1/chat/completions", json={"messages": USER, "max_tokens": 1})
    assert [params.skip_special_tokens for _, params in engine.submitted.values()] == [False]


@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize(("closing", "expected"), [((7,), 3), ((7, 8), 4), ((8, 7, 8), 6), ((9,), None)])
def test_tokens_of_the_reasoning_are_counted(size: int, closing: tuple[int, ...], expected: int | None):
    ids = [1, 8, 7, 8, 7, 8, 2] if closing == (8, 7, 8) else [1, 2, 7, 8, 3, 7, 8]
    expected = 4 if closing == (8, 7, 8) else expected
    reply = Reply(ReplyPlan(forms=ReplyForms(closing=closing), opened=True))
    assert reply.reasoning_tokens == 0
    for at in range(0, len(ids), size):
        part = tuple(ids[at : at + size])
        reply.push(RequestOutput(request_id="r", token_ids=part, text="</think>" if at + size >= 7 else "a"))
    assert reply.reasoning_tokens == expected
