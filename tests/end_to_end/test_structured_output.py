"""Completions held to grammars: on real models, among other requests, under pressure, and over HTTP."""

import json
import re
import sys
import time
from pathlib import Path

import httpx
import hypothesis.strategies as st
import openai
import pytest
from hypothesis import given, settings

from hybridjax.errors import HybridJaxError, RequestError
from hybridjax.serving import Engine, SamplingParams
from hybridjax.serving.api import Grammar

sys.path.append(str(Path(__file__).parent.parent / "serving_http"))

from http_fakes import RunningServer

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 2},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
LIST = 'root ::= "[" item ("," item){0,2} "]"\nitem ::= [0-9]{1,3} | "x" [ab]? | "(" item ")"'
HEX = "[a-f]{2}-[0-9]{3}"


def is_person(text):
    value = json.loads(text)
    good = isinstance(value["name"], str) and len(value["name"]) <= 8 and type(value["age"]) is int
    return good and 0 <= value["age"] <= 150 and set(value.get("tags", [])) <= {"red", "green"}


def is_list(text):
    item = r"\(*([0-9]{1,3}|x[ab]?)\)*"
    return bool(re.fullmatch(rf"\[{item}(,{item}){{0,2}}\]", text)) and text.count("(") == text.count(")")


GRAMMARS = [
    (Grammar("json_schema", json.dumps(PERSON)), is_person),
    (Grammar("regex", HEX), lambda text: bool(re.fullmatch(HEX, text))),
    (Grammar("ebnf", LIST), is_list),
    (Grammar("lark", 'start: "yes" | "no"'), lambda text: text in ("yes", "no")),
    (Grammar("regex", "(ab|cd)*"), lambda text: bool(re.fullmatch("(ab|cd)*", text))),
]
PROMPTS = [
    "import os\n",
    "def main(",
    "In the beginning",
    "class Parser:\n    def __init__(self",
    "for x in",
] * 3
COMMON = {
    "context_length": 256,
    "chunked_prefill_size": 64,
    "compilation_cache_dir": "",
    "skip_server_warmup": True,
}


@pytest.fixture(scope="module", params=["tiny-sala", "tiny-flash-next"])
def engine(request):
    """Three rows and few pages; the second model's n-grams come from the host: a decode step in parts."""
    fields = {}
    if request.param == "tiny-flash-next":  # fewer shapes, so fewer programs to compile
        fields = {"ple_offload": "host", "enable_deterministic_inference": True}
    with Engine(request.param, **COMMON, **fields, max_running_requests=3, max_total_tokens=256) as engine:
        yield engine
        engine.check_integrity()


def check(result, grammar_of_it):
    grammar, matches = grammar_of_it
    if result.finish_reason == "stop":
        assert matches(result.text), (grammar, result.text)
    else:
        assert result.finish_reason == "length" and len(result.token_ids) == 48


def held(grammar, **fields):
    return SamplingParams(**{"max_tokens": 48, "temperature": 0.0, "grammar": grammar, **fields})


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_completion_matches(engine, temperature):
    jobs = [(prompt, entry) for prompt in PROMPTS[:3] for entry in GRAMMARS]
    params = [
        held(grammar, temperature=temperature, seed=i, logprobs=2 if i % 2 else None)
        for i, (_, (grammar, _)) in enumerate(jobs)
    ]
    results = engine.generate([prompt for prompt, _ in jobs], params)
    for result, (_, entry) in zip(results, jobs, strict=True):
        check(result, entry)
    assert sum(result.finish_reason == "stop" for result in results) > 9


jobs = st.lists(
    st.tuples(
        st.sampled_from(range(len(PROMPTS))),
        st.none() | st.sampled_from(range(len(GRAMMARS))),
        st.sampled_from([0.0, 1.0]),
        st.integers(0, 2),
        st.sampled_from([20, 48]),
    ),
    min_size=3,
    max_size=9,
)


@settings(max_examples=8)
@given(jobs)
def test_neighbours_under_grammars_change_no_token(engine, jobs):
    """Neither those of ordinary requests nor, though these are preempted, each other's."""
    alone = engine.__dict__.setdefault("answers", {})
    prompts = [PROMPTS[prompt] for prompt, *_ in jobs]
    params = [
        held(None if which is None else GRAMMARS[which][0], temperature=heat, seed=seed, max_tokens=length)
        for _, which, heat, seed, length in jobs
    ]
    for job, prompt, one in zip(jobs, prompts, params, strict=True):
        if job not in alone:
            alone[job] = engine.generate(prompt, one)[0]
    together = engine.generate(prompts, params)
    for job, result in zip(jobs, together, strict=True):
        want = alone[job]
        assert (result.token_ids, result.finish_reason) == (want.token_ids, want.finish_reason), job
        assert job[1] is None or result.finish_reason == "length" or GRAMMARS[job[1]][1](result.text)
    engine.check_integrity()


def test_with_other_settings(engine):
    regex = Grammar("regex", "(ab|cd){3}")
    free = Grammar("regex", "(ab|cd)*")

    def run(grammar, **fields):
        return engine.generate("import", held(grammar, **fields))[0]

    for fields in ({"ignore_eos": True}, {"min_tokens": 30}, {"logit_bias": {2: 100, 4: 100}}):
        result = run(regex, **fields)
        assert result.finish_reason == "stop" and re.fullmatch("(ab|cd){3}", result.text), fields
    # Where the grammar may go on, it does.
    for fields in ({"ignore_eos": True}, {"min_tokens": 48}):
        result = run(free, logit_bias={2: 100, 4: 100}, **fields)
        assert result.finish_reason == "length" and len(result.token_ids) == 48
        assert re.fullmatch("(ab|cd)*[ac]?", result.text)
    eager = run(free, logit_bias={2: 100, 4: 100})
    assert (eager.text, eager.finish_reason, eager.stop_reason) == ("", "stop", None)
    late = run(free, logit_bias={2: 100, 4: 100}, min_tokens=4)
    assert late.finish_reason == "stop" and len(late.token_ids) >= 5 and re.fullmatch("(ab|cd)+", late.text)
    stopped = run(free, stop=("b", "d"), ignore_eos=True)
    assert stopped.finish_reason == "stop" and stopped.stop_reason in ("b", "d")
    assert re.fullmatch("a|c", stopped.text)
    own = run(free, stop_token_ids=[999], logit_bias={999: 100})
    assert (own.text, own.finish_reason, own.stop_reason) == ("", "stop", 999)
    exact = run(Grammar("regex", "x{6}"), max_tokens=6, ignore_eos=True)
    assert exact.text == "xxxxxx"[: len(exact.text)]
    whole = run(Grammar("regex", "x{6}"), max_tokens=len(run(Grammar("regex", "x{6}")).token_ids))
    assert (whole.text, whole.finish_reason) == ("xxxxxx", "stop")
    penalised = run(regex, repetition_penalty=1.5, presence_penalty=1.0, temperature=1.0, top_k=3, top_p=0.9)
    assert re.fullmatch("(ab|cd){3}", penalised.text)
    scored = run(Grammar("regex", "zq"), logprobs=2)
    assert scored.text == "zq" and all(entry.logprob < 0 for entry in scored.logprobs)


def test_a_matcher_that_breaks_ends_its_own_request_only(engine):
    make = engine._grammars.matcher
    broken = []

    def sabotage(params):
        matcher = make(params)
        if matcher is None or broken:
            return matcher
        broken.append(matcher)
        accept, calls = matcher.accept, []

        def fail(token):
            calls.append(token)
            if len(calls) == 3:
                raise HybridJaxError("broken on purpose")
            accept(token)

        matcher.accept = fail
        return matcher

    engine._grammars.matcher = sabotage
    try:
        results = engine.generate(PROMPTS[:3], [held(GRAMMARS[i][0]) for i in (0, 0, 1)])
    finally:
        del engine._grammars.matcher
    assert [result.finish_reason == "error" for result in results] == [True, False, False]
    check(results[1], GRAMMARS[0])
    check(results[2], GRAMMARS[1])
    assert engine.is_healthy
    engine.check_integrity()


def test_a_mask_that_fails_ends_its_own_request_only(engine):
    """The failure comes to light when a step with other rows is being launched."""
    make = engine._grammars.matcher
    broken = []

    def sabotage(params):
        matcher = make(params)
        if matcher is not None and not broken:
            broken.append(matcher)
            compute = matcher._compute

            def fail():
                if matcher._count == 2:
                    raise HybridJaxError("the grammar cannot go on: on purpose")
                return compute()

            matcher._compute = fail
        return matcher

    events = []
    engine._grammars.matcher = sabotage
    try:
        engine.submit(PROMPTS[0], held(GRAMMARS[0][0]), events.append)
        others = engine.generate(PROMPTS[1:3], [held(GRAMMARS[0][0]), held(None, ignore_eos=True)])
    finally:
        del engine._grammars.matcher
    deadline = time.monotonic() + 60
    while events[-1].finish_reason is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert events[-1].finish_reason == "error" and "cannot go on" in events[-1].error
    check(others[0], GRAMMARS[0])
    assert others[1].finish_reason == "length"
    engine.check_integrity()


def test_a_refused_grammar_leaves_nothing_behind(engine):
    before = engine.stats
    for grammar in (Grammar("regex", "("), Grammar("json_schema", "{", "response_format")):
        with pytest.raises(RequestError) as error:
            engine.submit("x", held(grammar), lambda event: None)
        assert error.value.param == grammar.field
    assert engine.stats == before


def test_an_engine_without_a_tokenizer_refuses_grammars():
    with Engine("tiny-sala", **COMMON, skip_tokenizer_init=True) as engine:
        with pytest.raises(RequestError, match="regex needs") as error:
            engine.submit([1, 2], held(Grammar("regex", "a", "regex")), lambda event: None)
        assert error.value.code == "unsupported"


@pytest.fixture(scope="module")
def server():
    with Engine("tiny-sala", **COMMON, max_running_requests=3, enable_deterministic_inference=True) as engine:
        server = RunningServer(engine, tokenizer=engine.tokenizer, served_model_name="tiny-sala")
        yield server
        server.settle()
        server.stop()


def test_the_official_client(server):
    wanted = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": PERSON}}
    question = {"model": "tiny-sala", "messages": [{"role": "user", "content": "Who?"}], "seed": 1}
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        whole = client.chat.completions.create(
            **question, max_completion_tokens=120, n=2, temperature=0, response_format=wanted
        )
        for choice in whole.choices:
            assert choice.finish_reason == "stop" and is_person(choice.message.content)
        chunks = client.chat.completions.create(
            **question, max_completion_tokens=120, temperature=0, response_format=wanted, stream=True
        )
        pieces = [chunk.choices[0] for chunk in chunks]
        assert len(pieces) > 3 and pieces[-1].finish_reason == "stop"
        assert "".join(piece.delta.content or "" for piece in pieces) == whole.choices[0].message.content
        loose = client.chat.completions.create(
            **question, max_completion_tokens=40, response_format={"type": "json_object"}
        )
        assert loose.choices[0].message.content.startswith("{")
        picked = client.completions.create(
            model="tiny-sala", prompt="Well, ", max_tokens=8, extra_body={"guided_choice": ["yes", "no\n"]}
        )
        assert picked.choices[0].text in ("yes", "no\n")
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(
                **question,
                response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": 1}}},
            )
        assert refused.value.param == "response_format"


FIELDS = [
    ({"regex": HEX}, HEX),
    ({"ebnf": 'root ::= "x"{2}'}, "xx"),
    ({"json_schema": '{"enum": [1, "b"]}'}, '1|"b"'),
    ({"json_schema": {"enum": [1, "b"]}}, '1|"b"'),
    ({"guided_regex": "a|b"}, "a|b"),
    ({"guided_json": {"type": "null"}}, "null"),
    ({"guided_grammar": "start: /[xy]{3}/"}, "[xy]{3}"),
    ({"guided_grammar": 'root ::= "r"'}, "r"),
    ({"structured_outputs": {"choice": ["a", 'q"']}}, 'a|q"'),
    ({"structured_outputs": {"json": '{"const": true}'}}, "true"),
]


@pytest.mark.parametrize(("fields", "form"), FIELDS, ids=[str(row[0])[:40] for row in FIELDS])
def test_every_name_of_a_grammar(server, fields, form):
    body = {"model": "tiny-sala", "prompt": "hello", "max_tokens": 30, **fields}
    answer = httpx.post(server.url + "/v1/completions", json=body, timeout=60).json()["choices"][0]
    assert re.fullmatch(form, answer["text"]) and answer["finish_reason"] == "stop"
    body = {"text": "hello", "sampling_params": {"max_new_tokens": 30, **fields}}
    answer = httpx.post(server.url + "/generate", json=body, timeout=60).json()
    assert re.fullmatch(form, answer["text"])


JSON = {"content-type": "application/json"}
HOSTILE = [
    {"regex": "((a{1000}){1000}){1000}"},
    {"regex": "(" * 20_000},
    {"regex": "(x+x+)+y" * 9000},
    {"regex": "a?" * 30_000},
    {"ebnf": "root ::= " + "(" * 30_000},
    {"ebnf": 'root ::= r0\nr1500 ::= "a"\n' + "\n".join(f"r{i} ::= r{i + 1} r{i + 1}" for i in range(1500))},
    {"json_schema": '{"items":' * 3000 + "{}" + "}" * 3000},
    {"json_schema": {"enum": list(range(100_000))}},
    {"json_schema": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}},
    {"json_schema": {"$ref": "http://localhost:1/"}},
    {"json_schema": {"allOf": [{"anyOf": [{"required": [x, str(i)]} for x in "ab"]} for i in range(40)]}},
    {"response_format": {"type": "json_schema", "json_schema": {"schema": {"pattern": "\\u0000(?<=a)b"}}}},
    {"guided_choice": ["\ud800"]},
    {"guided_choice": ["x"] * 5000},
    {"guided_grammar": "start: " + "a? " * 3000 + '\na: "x"'},
    {"guided_grammar": 'start: ("a" "b"){1000000}'},
]  # fmt: skip


def test_hostile_grammars_are_refused_and_leave_the_server_healthy(server):
    for fields in HOSTILE:
        start = time.monotonic()
        body = json.dumps({"model": "tiny-sala", "prompt": "hello", "max_tokens": 3, **fields})
        answer = httpx.post(server.url + "/v1/completions", content=body, headers=JSON, timeout=120)
        assert answer.status_code == 400, (str(fields)[:60], answer.text[:200])
        param = answer.json()["error"]["param"]
        assert param is None or param.partition(".")[0] in fields, answer.text[:300]
        assert len(answer.text) < 2000 and time.monotonic() - start < 60
    answer = httpx.get(server.url + "/health")
    assert answer.status_code == 200
    good = httpx.post(
        server.url + "/v1/completions",
        json={"model": "tiny-sala", "prompt": "hello", "max_tokens": 9, "regex": "ok"},
        timeout=60,
    )
    assert good.json()["choices"][0]["text"] == "ok"
    invalid = httpx.post(
        server.url + "/v1/completions",
        content=b'{"model": "tiny-sala", "prompt": "hello", "regex": "\xff"}',
        headers=JSON,
        timeout=60,
    )
    assert invalid.status_code == 400
