import dataclasses
import json
from typing import Any

import httpx
import pytest
from http_fakes import BOS, EOS, PATIENCE, FakeEngine, RunningServer, saying

from hybridjax.serving.api import EngineStats, RequestOutput, SamplingParams
from hybridjax.serving.http.native import NativeAnswer
from hybridjax.serving.http.native_protocol import GenerateRequest
from hybridjax.serving.http.tokens import TokenTexts

PIXEL = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
PICTURE = {"role": "user", "content": [PIXEL]}


def generate(http: httpx.Client, sampling: Any = None, **body: Any) -> Any:
    reply = http.post("/generate", json={"sampling_params": sampling or {"max_new_tokens": 3}, **body})
    assert reply.status_code == 200, reply.text
    return reply.json()


def events(http: httpx.Client, sampling: Any = None, **body: Any) -> list[dict[str, Any]]:
    sampling = sampling or {"max_new_tokens": 3}
    reply = http.post("/generate", json={"sampling_params": sampling, "stream": True, **body})
    assert reply.headers["content-type"].startswith("text/event-stream")
    parts = reply.text.removesuffix("\n\n").split("\n\n")
    assert parts.pop() == "data: [DONE]"
    return [json.loads(part.removeprefix("data: ")) for part in parts]


def refusal(http: httpx.Client, path: str, **body: Any) -> tuple[str, str]:
    reply = http.post(path, json=body)
    assert reply.status_code == 400, reply.text
    return reply.json()["error"]["param"], reply.json()["error"]["message"]


def test_one_text(http: httpx.Client, engine: FakeEngine):
    engine.cached_tokens = 2
    reply = generate(http, text="hi")
    meta = reply["meta_info"]
    assert (reply["text"], reply["output_ids"]) == ("abc", [97, 98, 99])
    assert meta.pop("e2e_latency") > 0
    [(name, (prompt, params))] = engine.submitted.items()
    assert meta == {
        "id": name.removesuffix("-0"),
        "finish_reason": {"type": "length", "length": 3},
        "prompt_tokens": 3,
        "completion_tokens": 3,
        "cached_tokens": 2,
    }
    assert prompt == [BOS, *b"hi"]
    assert params == SamplingParams(max_tokens=3)


def test_every_sampling_parameter_reaches_the_engine(http: httpx.Client, engine: FakeEngine):
    same = {
        **{"temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "repetition_penalty": 1.1},
        **{"presence_penalty": 0.2, "frequency_penalty": 0.3, "ignore_eos": True},
        **{"skip_special_tokens": False},
    }
    native = {"max_new_tokens": 5, "min_new_tokens": 2, "sampling_seed": 9, "stop": "zz"}
    native |= {"stop_token_ids": [4], "no_stop_trim": True, "logit_bias": {"5": 1}, "json_schema": None}
    generate(http, same | native, input_ids=[1])
    [(prompt, params)] = engine.submitted.values()
    assert prompt == [1]
    expected = SamplingParams(
        max_tokens=5,
        min_tokens=2,
        seed=9,
        stop=("zz",),
        stop_token_ids=(4,),
        include_stop_str_in_output=True,
        logit_bias={5: 1.0},
        **same,
    )
    assert params == expected


def test_what_sglangs_own_clients_send_is_taken(http: httpx.Client):
    """The fields of its language frontend and of its bench_serving."""
    frontend = {
        **{
            "max_new_tokens": 3,
            "min_new_tokens": 0,
            "n": 1,
            "stop": [],
            "stop_token_ids": [],
            "stop_regex": [],
        },
        **{"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "frequency_penalty": 0.0},
        **{"presence_penalty": 0.0, "ignore_eos": False, "regex": None, "json_schema": None},
        **{"skip_special_tokens": True, "spaces_between_special_tokens": True},
    }
    assert generate(http, frontend, text="x")["text"] == "abc"
    bench = {"lora_path": None, "image_data": None, "return_logprob": False, "logprob_start_len": -1}
    sampling = {"temperature": 0.0, "max_new_tokens": 3, "ignore_eos": True}
    assert events(http, sampling, input_ids=[1, 2], **bench)[-1]["meta_info"]["completion_tokens"] == 3


def test_what_is_left_out_is_sglangs_or_the_checkpoints(serve: Any, engine: FakeEngine):
    engine.info = dataclasses.replace(engine.info, sampling_defaults={"temperature": 0.6, "top_k": 20})
    server = serve()
    httpx.post(server.url + "/generate", json={"text": "x"})
    httpx.post(server.url + "/generate", json={"text": "x", "sampling_params": {"top_k": -1}})
    assert [params for _, params in engine.submitted.values()] == [
        SamplingParams(max_tokens=128, temperature=0.6, top_k=20),
        SamplingParams(max_tokens=128, temperature=0.6, top_k=0),
    ]


@pytest.mark.parametrize("prompts", [{"text": ["x", "yz"]}, {"input_ids": [[BOS, 120], [BOS, 121, 122]]}])
def test_a_batch_answers_in_order(http: httpx.Client, engine: FakeEngine, prompts: dict[str, Any]):
    each = [{"max_new_tokens": 2, "n": 2, "sampling_seed": 0}, {"max_new_tokens": 3, "n": 2}]
    replies = generate(http, each, **prompts)
    assert [reply["text"] for reply in replies] == ["ab", "bc", "abc", "abc"]
    assert [reply["meta_info"]["prompt_tokens"] for reply in replies] == [2, 2, 3, 3]
    assert len({reply["meta_info"]["id"] for reply in replies}) == 4


def test_a_list_of_one_answers_with_a_list(http: httpx.Client):
    assert [reply["text"] for reply in generate(http, text=["x"])] == ["abc"]
    assert [reply["text"] for reply in generate(http, {"n": 2, "max_new_tokens": 1}, text="x")] == ["a", "a"]


@pytest.mark.parametrize(
    ("said", "sampling", "reason", "text"),
    [
        ("hey", {}, {"type": "stop", "matched": EOS}, "hey"),
        ("hey", {"stop": ["y"]}, {"type": "stop", "matched": "y"}, "he"),
        ("hey", {"stop_token_ids": [121]}, {"type": "stop", "matched": 121}, "he"),
        ("hey", {"max_new_tokens": 1}, {"type": "length", "length": 1}, "h"),
    ],
)
def test_finish_reasons(
    http: httpx.Client, engine: FakeEngine, said: str, sampling: Any, reason: Any, text: str
):
    engine.script = saying(said)
    reply = generate(http, sampling or {"max_new_tokens": 9}, text="x")
    assert (reply["text"], reply["meta_info"]["finish_reason"]) == (text, reason)


def test_a_stream_repeats_the_text(http: httpx.Client, engine: FakeEngine):
    seen = events(http, text="x")
    assert [event["text"] for event in seen] == sorted({event["text"] for event in seen})
    assert seen[-1]["text"] == "abc" and seen[-1]["output_ids"] == [97, 98, 99]
    assert [event["meta_info"]["finish_reason"] for event in seen[:-1]] == [None] * (len(seen) - 1)
    assert seen[-1]["meta_info"]["finish_reason"] == {"type": "length", "length": 3}
    assert "index" not in seen[0]


def test_a_long_stream_does_not_grow_with_the_square_of_its_length():
    request = GenerateRequest.model_validate({"text": "x", "stream": True})
    answer = NativeAnswer(request, ["r"], TokenTexts(None), lambda: 0.0)
    count, shown = 20_000, []
    for token in range(count):
        last = "length" if token == count - 1 else None
        event = answer.event(0, RequestOutput(request_id="r", token_ids=(token,), finish_reason=last))
        if event is not None:
            shown.append(event["output_ids"])
    lengths = [len(ids) for ids in shown]
    # Every token at first, then ever rarer; nothing is lost.
    assert lengths[:257] == list(range(1, 257)) + [258]
    assert shown[-1] == list(range(count))
    assert sum(lengths) < 300 * count


def test_a_streamed_batch_says_which(http: httpx.Client, engine: FakeEngine):
    seen = events(http, {"max_new_tokens": 2, "n": 2, "sampling_seed": 0}, text=["x", "y"])
    last = {event["index"]: event["text"] for event in seen}
    assert last == {0: "ab", 1: "bc", 2: "ab", 3: "bc"}


@pytest.mark.parametrize("with_text", [False, True])
def test_logprobs(http: httpx.Client, with_text: bool):
    wanted = {"return_logprob": True, "top_logprobs_num": 2, "return_text_in_logprobs": with_text}
    whole = generate(http, {"max_new_tokens": 2}, text="x", logprob_start_len=-1, **wanted)["meta_info"]
    a, b, c = ("a", "b", "c") if with_text else (None, None, None)
    assert whole["output_token_logprobs"] == [[-0.5, 97, a], [-0.5, 98, b]]
    assert whole["output_top_logprobs"] == [[[-0.5, 97, a], [-1.5, 98, b]], [[-0.5, 98, b], [-1.5, 99, c]]]
    assert (whole["input_token_logprobs"], whole["input_top_logprobs"]) == ([], [])
    streamed = events(http, {"max_new_tokens": 2}, text="x", **wanted)[-1]["meta_info"]
    assert streamed["output_token_logprobs"] == whole["output_token_logprobs"]


def test_no_logprobs_unless_asked_for(http: httpx.Client):
    assert "output_token_logprobs" not in generate(http, text="x")["meta_info"]
    meta = generate(http, text="x", return_logprob=True)["meta_info"]
    assert len(meta["output_token_logprobs"]) == 3 and "output_top_logprobs" not in meta


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({}, "text", "give either text or input_ids"),
    ({"text": "x", "input_ids": [1]}, "text", "give either text or input_ids"),
    ({"text": 5}, "text", "must be a string"),
    ({"text": [[1]]}, "text", "must be a string or a list of strings"),
    ({"text": []}, "text", "1 to 256"),
    ({"text": ["x"] * 257}, "text", "at most 256 prompts"),
    ({"input_ids": "x"}, "input_ids", "must be a list of token ids"),
    ({"input_ids": [1, -1]}, "input_ids", "token id"),
    ({"input_ids": []}, "input_ids", "token id"),
    ({"text": "x", "logprob_start_len": 0}, "logprob_start_len", "needs return_logprob"),
    ({"text": "x", "return_logprob": True, "logprob_start_len": 3}, "logprob_start_len", "only 2 tokens"),
    ({"text": "x", "timeout": -1}, "timeout", "greater than 0"),
    ({"text": "x", "top_logprobs_num": 1}, "top_logprobs_num", "needs return_logprob"),
    ({"text": "x", "return_logprob": True, "top_logprobs_num": 21}, "top_logprobs_num", "equal to 20"),
    ({"text": "x", "image_data": "http://x"}, "image_data", "not supported"),
    ({"text": "x", "input_embeds": [[0.5]]}, "input_embeds", "not supported"),
    ({"text": "x", "sampling_params": 5}, "sampling_params[0]", "must be an object"),
    ({"text": "x", "sampling_params": {"n": 9}}, "sampling_params[0].n", "equal to 8"),
    ({"text": "x", "sampling_params": {"top_p": 2}}, "sampling_params[0].top_p", "or equal to 1"),
    ({"text": "x", "sampling_params": {"stop_regex": "a"}}, "sampling_params[0]", "stop_regex is not"),
    ({"text": "x", "sampling_params": [{}, {}]}, "sampling_params", "2 entries for 1 prompts"),
    ({"text": ["x", "y"], "sampling_params": [{}, {"n": 2}]}, "sampling_params", "the same n"),
    (
        {"text": "x", "sampling_params": {"max_new_tokens": 1, "min_new_tokens": 2}},
        "sampling_params.min_new_tokens",
        "must be at most max_new_tokens, 1",
    ),
    ({"text": ["x", "y"], "rid": "a"}, "rid", "2 different names"),
    ({"text": ["x", "y"], "rid": ["a", "a"]}, "rid", "2 different names"),
    ({"text": "x", "rid": "a" * 257}, "rid[0]", "at most 256"),
    ({"text": ["x"] * 200, "sampling_params": {"n": 2}}, "text", "asks for 400 completions"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "param", "message"), BAD)
def test_a_bad_field_is_named(http: httpx.Client, engine: FakeEngine, body: Any, param: str, message: str):
    got, said = refusal(http, "/generate", **body)
    assert (got, message in said) == (param, True), said
    assert engine.submitted == {}


def abort(http: httpx.Client, **body: Any) -> int:
    reply = http.post("/abort_request", json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()["aborted"]


def endless(http: httpx.Client, **body: Any) -> Any:
    sampling = {"max_new_tokens": 2**19, **body.pop("sampling", {})}
    return http.stream("POST", "/generate", json={"stream": True, "sampling_params": sampling, **body})


def last_events(stream: httpx.Response) -> dict[int, dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in stream.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    return {event.get("index", 0): event["meta_info"] for event in map(json.loads, lines)}


def test_a_request_is_aborted_by_its_name(http: httpx.Client, engine: FakeEngine):
    engine.allow(0)
    with endless(http, text="x", rid="mine") as stream:
        engine.wait_until(lambda: len(engine.live) == 1)
        assert refusal(http, "/generate", text="x", rid="mine") == ("rid", "rid 'mine' is in use")
        assert abort(http, rid="other") == 0
        assert abort(http, rid="mine") == 1
        assert last_events(stream)[0]["finish_reason"]["type"] == "abort"
    engine.allow(None)
    assert generate(http, text="x", rid="mine")["meta_info"]["id"] == "mine"
    assert abort(http, rid="mine") == 0


def test_one_prompt_of_a_batch_is_aborted(http: httpx.Client, engine: FakeEngine):
    engine.allow(0)
    with endless(http, text=["x", "y"], rid=["first", "second"], sampling={"n": 2, "max_new_tokens": 1}) as s:
        engine.wait_until(lambda: len(engine.live) == 4)
        assert abort(http, rid="second") == 2
        engine.wait_until(lambda: len(engine.live) == 2)
        engine.allow(None)
        last = last_events(s)
    assert [last[i]["id"] for i in range(4)] == ["first-0", "first-1", "second-0", "second-1"]
    assert [last[i]["finish_reason"]["type"] for i in range(4)] == ["length"] * 2 + ["abort"] * 2


def test_ids_of_answers_abort_too(http: httpx.Client, engine: FakeEngine):
    engine.allow(4)
    with endless(http, text=["x", "y"]) as native:
        engine.wait_until(lambda: engine.emitted == 4)
        lines = native.iter_lines()
        first = json.loads(next(lines)[6:])["meta_info"]["id"]
        assert abort(http, rid=first) == 1
        assert abort(http, rid=first.partition("-")[0]) == 1
        assert list(lines)[-2:] == ["data: [DONE]", ""]
    engine.allow(1)
    body = {"prompt": "x", "stream": True, "max_tokens": 2**19}
    with http.stream("POST", "/v1/completions", json=body) as stream:
        lines = stream.iter_lines()
        assert abort(http, rid=json.loads(next(lines)[6:])["id"]) == 1
        assert '"finish_reason":"abort"' in "".join(lines)


def test_abort_all_needs_the_admin_key(serve: Any, engine: FakeEngine):
    server = serve(api_key="user", admin_api_key="admin")
    engine.allow(0)
    user, admin = ({"authorization": f"Bearer {key}"} for key in ("user", "admin"))
    with httpx.Client(base_url=server.url, headers=user, timeout=PATIENCE) as http:
        with endless(http, text=["x", "y"]) as stream:
            engine.wait_until(lambda: len(engine.live) == 2)
            assert http.post("/abort_request", json={"abort_all": True}).status_code == 401
            reply = http.post("/abort_request", json={"abort_all": True}, headers=admin)
            assert reply.json() == {"aborted": 2}
            assert {meta["finish_reason"]["type"] for meta in last_events(stream).values()} == {"abort"}


def test_an_abort_needs_a_name(http: httpx.Client):
    assert refusal(http, "/abort_request") == ("rid", "rid is missing")


def test_without_a_tokenizer_ids_go_in_and_out(serve: Any, engine: FakeEngine):
    engine.tokenizer = None
    server = serve()
    with httpx.Client(base_url=server.url, timeout=PATIENCE) as http:
        reply = generate(http, input_ids=[1, 2])
        assert "text" not in reply and reply["output_ids"] == [97, 98, 99]
        assert refusal(http, "/generate", text="x")[0] == "text"
        stop = {"stop": "a"}
        assert refusal(http, "/generate", input_ids=[1], sampling_params=stop)[0] == "sampling_params.stop"
        assert "no tokenizer" in refusal(http, "/tokenize", prompt="x")[1]
        assert "no tokenizer" in refusal(http, "/detokenize", tokens=[1])[1]


def test_tokenize_and_detokenize(http: httpx.Client):
    def post(path: str, **body: Any) -> Any:
        return http.post(path, json=body).json()

    length = 2**20
    one = post("/tokenize", prompt="hi")
    assert one == {"tokens": [BOS, 104, 105], "count": 3, "max_model_len": length}
    two = post("/tokenize", prompt=["", "h"], add_special_tokens=False)
    assert two == {"tokens": [[], [104]], "count": [0, 1], "max_model_len": length}
    assert post("/detokenize", tokens=[BOS, 104, 105]) == {"text": "hi"}
    assert post("/detokenize", tokens=[BOS, 104], skip_special_tokens=False) == {"text": "<bos>h"}
    assert post("/detokenize", tokens=[[104], [105]]) == {"text": ["h", "i"]}
    assert post("/detokenize", tokens=[]) == {"text": ""}


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/tokenize", {"prompt": "x" * (2**20 + 1)}, "at most 1048576 characters"),
        ("/tokenize", {"prompt": [1]}, "must be a string"),
        ("/tokenize", {}, "prompt is missing"),
        ("/detokenize", {"tokens": [1] * (2**20 + 1)}, "at most 1048576 token ids"),
        ("/detokenize", {"tokens": [258]}, "token ids are 0..257"),
        ("/detokenize", {"tokens": "x"}, "must be a list of token ids"),
        ("/detokenize", {"tokens": [[1], 2]}, "must be a string, a list of token ids"),
    ],
)
def test_token_routes_are_bounded(http: httpx.Client, path: str, body: Any, message: str):
    assert message in refusal(http, path, **body)[1]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "prompt is missing; give either prompt or messages"),
        (
            {"prompt": "x", "messages": [{"role": "user", "content": "x"}]},
            "prompt is given with messages; give ",
        ),
        ({"messages": [PICTURE]}, "messages has images; this route takes text only"),
    ],
)
def test_what_is_wrong_with_fields_together_names_one(http: httpx.Client, body: Any, message: str):
    param, said = refusal(http, "/tokenize", **body)
    assert said.startswith(message) and param == message.partition(" ")[0]


def test_the_model_is_described(serve: Any, engine: FakeEngine):
    engine.info = dataclasses.replace(engine.info, sampling_defaults={"top_k": 5})
    server = serve(served_model_name="name")
    expected = {
        **{"model_path": "/models/fake", "tokenizer_path": "/models/fake", "is_generation": True},
        **{"preferred_sampling_params": {"top_k": 5}, "served_model_name": "name"},
        **{"context_length": 2**20, "vocab_size": 258, "has_image_understanding": False},
    }
    for path in ("/model_info", "/get_model_info"):
        assert httpx.get(server.url + path).json() == expected


def test_the_server_is_described_without_its_keys(serve: Any, engine: FakeEngine):
    engine.stats = EngineStats(running=2)
    server: RunningServer = serve(api_key="secret-1", admin_api_key="secret-2", page_size=128)
    assert (
        httpx.get(server.url + "/server_info", headers={"authorization": "Bearer secret-1"}).status_code
        == 401
    )
    for path in ("/server_info", "/get_server_info"):
        reply = httpx.get(server.url + path, headers={"authorization": "Bearer secret-2"})
        info = reply.json()
        assert (info["page_size"], info["drain_timeout"], info["port"]) == (128, 1.0, 0)
        assert info["engine"]["vocab_size"] == 258
        assert info["internal_states"][0]["running"] == 2
        assert set(info["versions"]) >= {"python", "jax", "hybridjax"}
        assert "api_key" not in info and "admin_api_key" not in info
        assert "secret" not in reply.text


def test_flushing_the_cache_is_for_operators(serve: Any, engine: FakeEngine):
    server = serve(api_key="user", admin_api_key="admin")
    with httpx.Client(base_url=server.url, timeout=PATIENCE) as http:
        assert http.post("/flush_cache", headers={"authorization": "Bearer user"}).status_code == 401
        assert engine.flushes == 0
        reply = http.post("/flush_cache", headers={"authorization": "Bearer admin"})
        assert (reply.json(), engine.flushes) == ({"success": True}, 1)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/generate", {"text": ""}, "text"),
        ("/generate", {"text": ["a", ""]}, "text"),
        ("/v1/completions", {"prompt": ""}, "prompt"),
        ("/v1/completions", {"prompt": ["a", ""]}, "prompt"),
    ],
)
def test_an_empty_text_is_refused(http: httpx.Client, path: str, body: dict[str, Any], param: str):
    reply = http.post(path, json=body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)
    assert "empty" in reply.json()["error"]["message"]
