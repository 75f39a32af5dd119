"""Forced tool calls and log probabilities of prompts on a real model, over HTTP."""

import json
import sys
from pathlib import Path

import openai
import pytest

import hybridjax
from hybridjax.serving import Engine
from hybridjax.text import load_tokenizer

sys.path.append(str(Path(__file__).parent.parent / "serving_http"))

from chat_fakes import OPENED, TOOLS
from http_fakes import RunningServer

BUNDLED = Path(hybridjax.__file__).parent / "bundled" / "tiny-sala"
WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer", "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
FUNCTIONS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "now"}},
]
ASKED = {"model": "tiny-sala", "messages": [{"role": "user", "content": "Weather?"}], "tools": FUNCTIONS}
NAMED = {"type": "function", "function": {"name": "get_weather"}}


@pytest.fixture(scope="module")
def engine():
    fields = {"context_length": 512, "compilation_cache_dir": "", "skip_server_warmup": True}
    with Engine("tiny-sala", **fields, max_running_requests=2) as engine:
        yield engine
        engine.check_integrity()


@pytest.fixture(params=[(TOOLS, {}), (OPENED, {"reasoning_parser": "off"})], ids=["json", "xml"])
def client(engine, request):
    template, config = request.param
    tokenizer = load_tokenizer(BUNDLED, template)
    server = RunningServer(engine, tokenizer=tokenizer, served_model_name="tiny-sala", **config)
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        yield client
    server.settle()
    server.stop()


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_forced_call_keeps_to_its_schema(client, choice):
    create = client.chat.completions.create
    limits = {"tool_choice": choice, "parallel_tool_calls": False, "max_tokens": 150}
    for seed in range(2):
        done = create(**ASKED, **limits, seed=seed, temperature=1).choices[0]
        assert done.finish_reason == "tool_calls" and done.message.content is None
        [call] = done.message.tool_calls
        arguments = json.loads(call.function.arguments)
        if call.function.name == "now":
            assert choice == "required" and arguments == {}
        else:
            assert set(arguments) == {"city", "days"} and type(arguments["days"]) is int
            assert arguments["city"] in ("Paris", "Rome") and arguments["days"] <= 9
        chunks = list(create(**ASKED, **limits, seed=seed, temperature=1, stream=True))
        parts = [part for chunk in chunks for part in chunk.choices[0].delta.tool_calls or []]
        assert parts[0].function.name == call.function.name and len(parts) > 2 * bool(arguments)
        assert "".join(part.function.arguments for part in parts) == call.function.arguments
        assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_strict_tools_leave_the_text_free_until_a_call_begins(client):
    """The model writes no tags by itself: what it writes is what it writes without tools that are strict."""
    create = client.chat.completions.create
    strict = [{"type": "function", "function": {**tool["function"], "strict": True}} for tool in FUNCTIONS]
    for seed in range(2):
        limits = {"max_tokens": 20, "seed": seed, "temperature": 1}
        free, held = (
            create(**{**ASKED, "tools": tools}, **limits).choices[0] for tools in (FUNCTIONS, strict)
        )
        assert held.message == free.message and held.finish_reason == free.finish_reason


def test_a_text_scores_what_it_scored_when_it_was_written(client):
    prompt = list(range(40, 110))
    greedy = {"model": "tiny-sala", "max_tokens": 6, "temperature": 0, "logprobs": 2}
    ids = {"return_token_ids": True}
    written = client.completions.create(**greedy, prompt=prompt, extra_body=ids).choices[0]
    echoed = client.completions.create(
        model="tiny-sala", prompt=prompt + written.token_ids, max_tokens=0, echo=True, logprobs=2
    ).choices[0]
    assert echoed.logprobs.token_logprobs[0] is None
    assert len(echoed.logprobs.tokens) == 76
    assert echoed.logprobs.tokens[70:] == written.logprobs.tokens
    assert echoed.logprobs.token_logprobs[70:] == pytest.approx(written.logprobs.token_logprobs, abs=1e-4)
    for seen, made in zip(echoed.logprobs.top_logprobs[70:], written.logprobs.top_logprobs, strict=True):
        assert seen == pytest.approx(made, abs=1e-4)
