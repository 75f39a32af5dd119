"""Tools with the official client, over real templates; what is written is scripted."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai
import pydantic
import pytest
from chat_fakes import OPENED, TOOLS, TemplateTokenizer
from http_fakes import EOS, FakeEngine, RunningServer, saying
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hybridjax.serving.http.messages import MAX_TOOL_BYTES, MAX_TOOLS

USER: list[Any] = [{"role": "user", "content": "Weather?"}]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
NOW: Any = {"type": "function", "function": {"name": "now"}}
PARIS = '{"city": "Paris", "days": 2}'
CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {PARIS}}}\n</tool_call>'
TWO = f'Let me see.\n{CALL}\n<tool_call>\n{{"name": "now", "arguments": {{}}}}\n</tool_call>'
NAMED: Any = {"type": "function", "function": {"name": "now"}}

Start = Callable[..., openai.OpenAI]


@pytest.fixture
def start(serve: Callable[..., RunningServer], engine: FakeEngine) -> Iterator[Start]:
    clients: list[openai.OpenAI] = []

    def started(source: str = TOOLS, **config: Any) -> openai.OpenAI:
        engine.tokenizer = TemplateTokenizer(source)
        clients.append(openai.OpenAI(base_url=serve(**config).url + "/v1", api_key="none", max_retries=0))
        return clients[-1]

    yield started
    for client in clients:
        client.close()


def chat(client: openai.OpenAI, **fields: Any) -> Any:
    fields = {"messages": USER, "tools": [WEATHER, NOW], **fields}
    return client.chat.completions.create(model="fake", **fields)


def streamed(client: openai.OpenAI, **fields: Any) -> tuple[str, list[dict[str, Any]], str, list[Any]]:
    """Content, calls and finish reason of a stream, put together as clients do, and the chunks."""
    content, calls, reason, chunks = "", [], None, list(chat(client, stream=True, **fields))
    for chunk in chunks:
        for choice in chunk.choices:
            content += choice.delta.content or ""
            for part in choice.delta.tool_calls or []:
                if part.index == len(calls):
                    assert part.id.startswith("call_") and part.type == "function" and part.function.name
                    calls.append({"id": part.id, "name": part.function.name, "arguments": ""})
                else:
                    assert part.id is None and part.function.name is None
                calls[part.index]["arguments"] += part.function.arguments
            reason = choice.finish_reason or reason
    return content, calls, str(reason), chunks


def refused(client: openai.OpenAI, **fields: Any) -> tuple[str | None, str]:
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, **fields)
    return caught.value.param, caught.value.message


def test_calls_are_found(start: Start, engine: FakeEngine):
    client = start()
    engine.script = saying(TWO)
    [choice] = chat(client).choices
    assert choice.finish_reason == "tool_calls"
    assert (choice.message.role, choice.message.content) == ("assistant", "Let me see.")
    first, second = choice.message.tool_calls
    assert (first.type, first.function.name, first.function.arguments) == ("function", "get_weather", PARIS)
    assert (second.function.name, second.function.arguments) == ("now", "{}")
    assert first.id != second.id and first.id.startswith("call_")


def test_calls_are_streamed(start: Start, engine: FakeEngine):
    client = start()
    engine.script = saying(TWO)
    content, calls, reason, chunks = streamed(client, stream_options={"include_usage": True})
    assert (content, reason) == ("Let me see.", "tool_calls")
    assert [(call["name"], call["arguments"]) for call in calls] == [("get_weather", PARIS), ("now", "{}")]
    assert chunks[-1].usage.completion_tokens == len(TWO.encode()) + 1
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.choices[0].finish_reason is None for chunk in chunks[:-2])


def test_arguments_are_streamed_as_they_are_written(start: Start, engine: FakeEngine):
    client = start()
    engine.script = saying(CALL)
    written = CALL.index("Pa") + 2
    engine.allow(written)
    arguments = ""
    with chat(client, stream=True) as stream:
        for chunk in stream:
            for part in chunk.choices[0].delta.tool_calls or []:
                arguments += part.function.arguments
            if arguments == '{"city": "Pa':
                engine.allow(None)
    assert arguments == PARIS


def test_a_reply_without_calls_is_a_text(start: Start, engine: FakeEngine):
    client = start()
    text = 'No <tool_call>{"name": "other"}</tool_call>\n'
    engine.script = saying(text)
    [choice] = chat(client).choices
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (text, None, "stop")
    assert streamed(client)[:3] == (text, [], "stop")


def test_a_call_cut_off_by_the_limit(start: Start, engine: FakeEngine):
    client = start()
    engine.script = saying(CALL)
    limit = CALL.index("Paris") + 3
    [choice] = chat(client, max_tokens=limit).choices
    assert (choice.message.content, choice.message.tool_calls) == (CALL[:limit], None)
    assert choice.finish_reason == "length"
    content, [call], reason, _ = streamed(client, max_tokens=limit)
    assert (content, call["arguments"], reason) == ("", '{"city": "Par', "length")


def test_the_client_gathers_what_is_streamed(start: Start, engine: FakeEngine):
    client = start()
    engine.script = saying(TWO)
    with client.chat.completions.stream(model="fake", messages=USER, tools=[WEATHER, NOW]) as stream:
        done = stream.get_final_completion()
    [choice] = done.choices
    assert choice.finish_reason == "tool_calls" and choice.message.content == "Let me see."
    assert choice.message.tool_calls is not None
    assert [call.function.arguments for call in choice.message.tool_calls] == [PARIS, "{}"]


class Weather(pydantic.BaseModel):
    city: str
    days: int


def test_the_client_parses_arguments(start: Start, engine: FakeEngine):
    client = start()
    engine.script = saying(CALL)
    tool = openai.pydantic_function_tool(Weather, name="get_weather")
    done = client.chat.completions.parse(model="fake", messages=USER, tools=[tool])
    [call] = done.choices[0].message.tool_calls or []
    assert call.function.parsed_arguments == Weather(city="Paris", days=2)


def test_the_template_sees_tools_calls_and_results(start: Start, engine: FakeEngine):
    client = start()
    engine.script = saying(TWO)
    message = chat(client).choices[0].message
    results: list[Any] = [
        {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny"},
        {
            "role": "tool",
            "tool_call_id": message.tool_calls[1].id,
            "content": [{"type": "text", "text": "9"}],
        },
    ]
    engine.script = saying("Sunny.")
    done = chat(client, messages=[*USER, message, *results])
    assert done.choices[0].message.content == "Sunny."
    prompt = bytes(list(engine.submitted.values())[-1][0]).decode()
    ids = [call.id for call in message.tool_calls]
    assert prompt == (
        f"[tools]{json.dumps(WEATHER)}{json.dumps(NOW)}[user]Weather?\n[assistant]Let me see.{CALL}"
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\n'
        f"[tool]({ids[0]})sunny\n[tool]({ids[1]})9\n[assistant]"
    )


def test_a_message_may_consist_of_calls(start: Start, engine: FakeEngine):
    client = start()
    call = {"id": "1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    for content in ({"content": None}, {}):
        chat(client, messages=[*USER, {"role": "assistant", "tool_calls": [call], **content}], max_tokens=1)
        prompt = bytes(list(engine.submitted.values())[-1][0]).decode()
        assert prompt.endswith(
            '[assistant]<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\n[assistant]'
        )


def test_no_calls_if_none_are_wanted(start: Start, engine: FakeEngine):
    client = start()
    engine.script = saying(CALL)
    [choice] = chat(client, tool_choice="none").choices
    assert (choice.message.content, choice.message.tool_calls) == (CALL, None)
    [(prompt, _)] = engine.submitted.values()
    assert bytes(prompt) == b"[user]Weather?\n[assistant]"


def test_one_call_if_no_more_are_wanted(start: Start, engine: FakeEngine):
    client = start()
    engine.script = saying(TWO)
    message = chat(client, parallel_tool_calls=False).choices[0].message
    assert [call.function.name for call in message.tool_calls] == ["get_weather"]
    assert [call["name"] for call in streamed(client, parallel_tool_calls=False)[1]] == ["get_weather"]


def test_auto_leaves_the_text_free(start: Start, engine: FakeEngine):
    client = start()
    chat(client, tool_choice="auto", max_tokens=1)
    assert [params.grammar for _, params in engine.submitted.values()] == [None]


def strict(tool: Any) -> Any:
    return tool | {"function": tool["function"] | {"strict": True}}


@pytest.mark.parametrize("choice", ["auto", None])
def test_calls_of_strict_tools_are_held_to_a_grammar_once_begun(
    start: Start, engine: FakeEngine, choice: Any
):
    client = start()
    fields: Any = {"max_tokens": 1} | ({} if choice is None else {"tool_choice": choice})
    chat(client, tools=[strict(WEATHER), NOW], **fields)
    [(_, params)] = engine.submitted.values()
    assert params.grammar is not None
    assert (params.grammar.kind, params.grammar.field) == ("lark", "tools")
    assert "days" in params.grammar.source and "now" in params.grammar.source
    # A form that the whole answer has leaves no room for calls.
    chat(client, tools=[strict(WEATHER)], response_format={"type": "json_object"}, **fields)
    *_, (_, params) = engine.submitted.values()
    assert params.grammar is not None and params.grammar.field == "response_format"
    chat(client, tools=[strict(WEATHER)], tool_choice="none", max_tokens=1)
    *_, (_, params) = engine.submitted.values()
    assert params.grammar is None


def test_strict_is_not_enforced_where_calls_cannot_be_told_from_text(start: Start, engine: FakeEngine):
    chat(start(tool_call_parser="json"), tools=[strict(WEATHER)], max_tokens=1)
    assert [params.grammar for _, params in engine.submitted.values()] == [None]


def test_strict_is_not_enforced_where_a_tag_is_a_token_that_no_text_spells(
    start: Start, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
):
    decode = TemplateTokenizer.decode

    def hiding(self: TemplateTokenizer, ids: Any, skip_special_tokens: bool = True) -> str:
        text = decode(self, ids, skip_special_tokens)
        return "" if skip_special_tokens and text == "<tool_call>" else text

    monkeypatch.setattr(TemplateTokenizer, "decode", hiding)
    chat(start(), tools=[strict(WEATHER)], max_tokens=1)
    assert [params.grammar for _, params in engine.submitted.values()] == [None]


@pytest.mark.parametrize(
    ("choice", "said"), [("required", TWO[12:]), (NAMED, TWO[TWO.rindex("<tool_call>") :])]
)
def test_a_forced_call_is_held_to_a_grammar(start: Start, engine: FakeEngine, choice: Any, said: str):
    client = start()
    engine.script = saying(said)
    [done] = chat(client, tool_choice=choice).choices
    assert done.finish_reason == "tool_calls" and done.message.content is None
    [(prompt, params)] = engine.submitted.values()
    assert params.grammar is not None
    assert (params.grammar.kind, params.grammar.field) == ("lark", "tool_choice")
    assert "now" in params.grammar.source and ("get_weather" in params.grammar.source) == (choice != NAMED)
    # The model still sees all tools.
    assert bytes(prompt).startswith(b'[tools]{"type": "function", "function": {"name": "get_weather"')


def test_choices_have_calls_of_their_own(start: Start, engine: FakeEngine):
    client = start()
    texts = iter([CALL, "Text."])
    engine.script = lambda prompt, params: iter([*next(texts).encode(), EOS])
    one, two = chat(client, n=2).choices
    assert [call.function.arguments for call in one.message.tool_calls] == [PARIS]
    assert (two.message.content, two.message.tool_calls) == ("Text.", None)
    assert (one.finish_reason, two.finish_reason) == ("tool_calls", "stop")


def test_logprobs_are_of_all_tokens(start: Start, engine: FakeEngine):
    client = start()
    engine.script = saying(CALL)
    whole = chat(client, logprobs=True).choices[0].logprobs.content
    assert "".join(token.token for token in whole) == CALL + "<eos>"
    parts = [chunk.choices[0] for chunk in streamed(client, logprobs=True)[3]]
    assert [t.token for part in parts if part.logprobs for t in part.logprobs.content] == list(CALL) + [
        "<eos>"
    ]


def test_xml_calls_behind_reasoning(start: Start, engine: FakeEngine):
    client = start(OPENED)
    engine.script = saying(
        "Paris?\n</think>\n\nOne moment.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n"
        "</parameter>\n<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>"
    )
    message = chat(client).choices[0].message
    assert (message.reasoning_content, message.content) == ("Paris?", "One moment.")
    assert [call.function.arguments for call in message.tool_calls] == [PARIS]
    content, [call], reason, chunks = streamed(client)
    assert (content, call["arguments"], reason) == ("One moment.", PARIS, "tool_calls")
    thoughts = [getattr(chunk.choices[0].delta, "reasoning_content", None) or "" for chunk in chunks]
    assert "".join(thoughts) == "Paris?"


@pytest.mark.parametrize(
    ("parser", "said"),
    [
        ("hermes", CALL),
        ("qwen25", CALL),
        ("json", f'{{"name": "get_weather", "parameters": {PARIS}}}'),
        ("llama3", f'[{{"name": "get_weather", "arguments": {PARIS}}}]'),
        (
            "qwen3_coder",
            "<tool_call><function=get_weather><parameter=city>Paris</parameter>"
            "<parameter=days>2</parameter></function></tool_call>",
        ),
    ],
)
def test_the_operator_may_name_the_format(start: Start, engine: FakeEngine, parser: str, said: str):
    client = start(tool_call_parser=parser)
    engine.script = saying(said)
    message = chat(client).choices[0].message
    assert [call.function.arguments for call in message.tool_calls] == [PARIS]
    assert message.content is None


def test_the_operator_may_want_no_parsing(start: Start, engine: FakeEngine):
    client = start(tool_call_parser="off")
    engine.script = saying(CALL)
    [choice] = chat(client).choices
    assert (choice.message.content, choice.finish_reason) == (CALL, "stop")


def test_a_template_without_tools_refuses_them(http: httpx.Client, engine: FakeEngine):
    def post(**fields: Any) -> httpx.Response:
        return http.post("/v1/chat/completions", json={"messages": USER, "max_tokens": 1, **fields})

    reply = post(tools=[WEATHER])
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "tools_not_supported")
    assert "chat template knows no tools" in reply.json()["error"]["message"]
    assert post(tools=[WEATHER], tool_choice="none").status_code == 200
    call = {"id": "1", "type": "function", "function": {"name": "now", "arguments": "{}"}}
    called = [*USER, {"role": "assistant", "content": None, "tool_calls": [call]}]
    reply = post(messages=called)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "messages")
    assert post(messages=called, tool_choice="none").status_code == 200


def function(**fields: Any) -> list[Any]:
    return [{"type": "function", "function": {"name": "f", **fields}}]


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"properties": {"a": schema}}
    return schema


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": 5}, "tools", "valid list"),
    ({"tools": [{"type": "function"}]}, "tools[0].function", "missing"),
    ({"tools": [{"type": "retrieval", "function": {"name": "f"}}]}, "tools[0].type", "'function'"),
    ({"tools": function(name="a b")}, "tools[0].function.name", "1 to 64 letters"),
    ({"tools": function(name="")}, "tools[0].function.name", "1 to 64 letters"),
    ({"tools": function(name="a" * 65)}, "tools[0].function.name", "1 to 64 letters"),
    ({"tools": function(name="a>\n")}, "tools[0].function.name", "1 to 64 letters"),
    ({"tools": function(parameters=[])}, "tools[0].function.parameters", "JSON schema of an object"),
    ({"tools": function(parameters={"type": "array"})}, "tools[0].function.parameters", "of an object"),
    ({"tools": function(parameters={"properties": 1})}, "tools[0].function.parameters", "must be an object"),
    ({"tools": function() * 2}, "tools", "the name 'f' is there twice"),
    ({"tools": function() * (MAX_TOOLS + 1)}, "tools", "at most 128 items"),
    ({"tools": function(parameters=nested(20))}, "tools", "at most 32 deep"),
    ({"tools": function(description="x" * MAX_TOOL_BYTES)}, "tools", f"at most {MAX_TOOL_BYTES} bytes"),
    ({"tools": [], "tool_choice": "required"}, "tool_choice", "needs tools"),
    ({"tool_choice": "any"}, "tool_choice", "must be 'none', 'auto', 'required' or"),
    ({"tool_choice": {"type": "function"}}, "tool_choice", "must be 'none', 'auto', 'required' or"),
    (
        {"tool_choice": {"type": "function", "function": {"name": "other"}}},
        "tool_choice",
        "names 'other', which is not in tools",
    ),
    ({"parallel_tool_calls": 1}, "parallel_tool_calls", "valid boolean"),
    ({"functions": [{}]}, "functions", "not supported"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param", "message"), BAD, ids=range(len(BAD)))
def test_bad_tools_are_refused(start: Start, engine: FakeEngine, fields: Any, param: str, message: str):
    got, said = refused(start(), **fields)
    assert (got, message in said) == (param, True), said
    assert engine.submitted == {}


def called(**fields: Any) -> dict[str, Any]:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}", **fields}}
    return {"messages": [*USER, {"role": "assistant", "content": "", "tool_calls": [call]}]}


BAD_CALLS: list[tuple[dict[str, Any], str, str]] = [
    (called(arguments="{"), "messages[1].tool_calls[0].function.arguments", "must be a JSON object"),
    (called(arguments="[]"), "messages[1].tool_calls[0].function.arguments", "must be a JSON object"),
    (called(arguments="[" * 10**5), "messages[1].tool_calls[0].function.arguments", "must be a JSON object"),
    (called(arguments=json.dumps(nested(20))), "messages[1].tool_calls[0].function.arguments", "32 deep"),
    (called(arguments=None), "messages[1].tool_calls[0].function.arguments", "must be a JSON object"),
    (called(name="a b"), "messages[1].tool_calls[0].function.name", "letters"),
    ({"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]},
     "messages[0].tool_calls[0].function", "missing"),
    ({"messages": [called()["messages"][1] | {"role": "user"}]}, "messages[0]",
     "only the assistant has tool_calls"),
    ({"messages": [{"role": "assistant", "content": "", "function_call": {"name": "f"}}]}, "messages[0]",
     "use tool_calls"),
    ({"messages": [{"role": "tool", "tool_call_id": "x" * 257, "content": ""}]}, "messages[0].tool_call_id",
     "at most 256"),
    ({"messages": [{"role": "assistant", "content": None}]}, "messages[0].content", "must be a string"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param", "message"), BAD_CALLS, ids=range(len(BAD_CALLS)))
def test_bad_turns_are_refused(start: Start, engine: FakeEngine, fields: Any, param: str, message: str):
    got, said = refused(start(), **fields)
    assert (got, message in said) == (param, True), said
    assert engine.submitted == {}


PIECES = ["<think>", "</think>", "<tool_call>", "</tool_call>", '{"name": "now"}', CALL, "a", "\n", "{", "ü"]


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(parts=st.lists(st.sampled_from(PIECES), max_size=8))
def test_a_stream_says_what_the_whole_says(start: Start, engine: FakeEngine, parts: list[str]):
    """The scripted engine sends a byte at a time."""
    if not hasattr(engine, "client"):
        engine.client = start(OPENED, tool_call_parser="hermes")  # pyright: ignore
    client = engine.client  # pyright: ignore
    engine.script = saying("".join(parts))
    [whole] = chat(client).choices
    content, calls, reason, chunks = streamed(client)
    assert (content, reason) == (whole.message.content or "", whole.finish_reason)
    made = [(call.function.name, call.function.arguments) for call in whole.message.tool_calls or []]
    assert [(call["name"], call["arguments"]) for call in calls] == made
    thoughts = [getattr(chunk.choices[0].delta, "reasoning_content", None) or "" for chunk in chunks]
    assert "".join(thoughts) == getattr(whole.message, "reasoning_content", "")
