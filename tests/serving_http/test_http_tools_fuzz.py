"""Random chats with tools and reasoning, of models that write anything: refused or answered, never failed."""

import itertools
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from chat_fakes import OPENED, THINKING, TemplateTokenizer
from http_fakes import EOS, fuzzed_server
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_http_fuzz import anything, check, scalars

from hybridjax.serving.http.protocol import ChatCompletionRequest

names = st.sampled_from(["f", "get_weather", "a b", "", "ü", "f" * 65])
schemas = st.fixed_dictionaries(
    {},
    optional={"type": st.sampled_from(["object", "array"]), "properties": st.dictionaries(names, anything)},
)
functions = st.fixed_dictionaries(
    {"name": names}, optional={"description": scalars, "parameters": schemas | anything, "strict": scalars}
)
tools = st.lists(st.fixed_dictionaries({"type": st.just("function"), "function": functions}), max_size=3)
choices = st.sampled_from(["none", "auto", "required", "any"]) | st.fixed_dictionaries(
    {"type": st.just("function"), "function": st.fixed_dictionaries({"name": names})}
)
arguments = st.sampled_from(["{}", '{"a": 1}', "[]", "{", "[" * 10**4]) | anything
calls = st.lists(
    st.fixed_dictionaries(
        {"function": st.fixed_dictionaries({"name": names, "arguments": arguments})},
        optional={"id": scalars, "type": st.just("function") | scalars},
    ),
    max_size=2,
)
messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant", "tool"])},
        optional={
            "content": st.none() | st.text(max_size=5),
            "tool_calls": st.none() | calls,
            "tool_call_id": scalars,
            "reasoning_content": scalars,
        },
    ),
    max_size=3,
)
likely: dict[str, st.SearchStrategy[Any]] = {
    "tools": tools,
    "tool_choice": choices,
    "messages": messages,
    "n": st.integers(1, 2),
    "logprobs": st.booleans(),
    "max_tokens": st.integers(1, 60),
    "stream": st.booleans(),
    "prompt_logprobs": st.integers(0, 3),
    **dict.fromkeys(("parallel_tool_calls", "separate_reasoning", "continue_final_message"), st.booleans()),
    "add_generation_prompt": st.booleans(),
    "reasoning_effort": st.sampled_from(["low", "none", "much"]),
    "timeout": st.floats(0, 2),
    "stop": st.sampled_from(["</tool_call>", "</think>", "}", "\n"]),
}
WRITTEN = [
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<function=f>", "<parameter=a>", "</parameter>"),
    *(
        "</function>",
        '{"name": "f", "arguments": {"a": 1}}',
        '{"name": "get_weather"',
        "}",
        '"',
        "\n",
        "äb世",
    ),
]
FIELDS = [*ChatCompletionRequest.model_fields, *likely, *likely]


@pytest.fixture(scope="module", params=[THINKING, OPENED], ids=["json", "xml"])
def http(request: pytest.FixtureRequest) -> Iterator[httpx.Client]:
    tokenizer = TemplateTokenizer(request.param)
    with fuzzed_server(context_length=4096, tokenizer=tokenizer) as (engine, client):
        endless = itertools.cycle(itertools.permutations(WRITTEN, 5))
        engine.script = lambda prompt, params: iter([*"".join(next(endless)).encode(), EOS])
        yield client
    assert len(engine.submitted) > 20


@st.composite
def bodies(draw: st.DrawFn) -> Any:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]}
    if draw(st.booleans()):
        body["tools"] = [{"type": "function", "function": {"name": "f"}}]
    for name in draw(st.lists(st.sampled_from(FIELDS), max_size=4, unique=True)):
        wild = draw(st.integers(0, 5)) == 0
        body[name] = draw(anything if wild else likely.get(name, scalars))
    return body


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(body=bodies())
def test_near_misses_never_fail_the_server(http: httpx.Client, body: Any):
    content = json.dumps(body)
    check(http.post("/v1/chat/completions", content=content, headers={"content-type": "application/json"}))
