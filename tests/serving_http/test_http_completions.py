import asyncio
import dataclasses

import httpx
import openai
import pytest
from http_fakes import BOS, FakeEngine, RunningServer, saying

from hybridjax.serving.api import SamplingParams


def test_completes_a_text_prompt(client: openai.OpenAI, engine: FakeEngine):
    engine.cached_tokens = 2
    done = client.completions.create(model="fake", prompt="hi", max_tokens=5)
    assert done.choices[0].text == "abcde"
    assert done.choices[0].finish_reason == "length"
    assert (done.object, done.model) == ("text_completion", "fake")
    assert done.id.startswith("cmpl-")
    assert done.usage is not None and done.usage.prompt_tokens_details is not None
    assert (done.usage.prompt_tokens, done.usage.completion_tokens, done.usage.total_tokens) == (3, 5, 8)
    assert done.usage.prompt_tokens_details.cached_tokens == 2
    [(prompt, params)] = engine.submitted.values()
    assert prompt == [BOS, *b"hi"]
    assert params == SamplingParams(max_tokens=5)
    assert engine.aborts == {}


def test_the_async_client_completes_and_streams(server: RunningServer):
    async def run() -> tuple[str, list[str]]:
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
            done = await client.completions.create(model="fake", prompt="hi", max_tokens=3)
            stream = await client.completions.create(model="fake", prompt="hi", max_tokens=30, stream=True)
            return done.choices[0].text, [chunk.choices[0].text async for chunk in stream]

    text, parts = asyncio.run(run())
    assert text == "abc"
    assert "".join(parts) == "abcdefghijklmnopqrstuvwxyzabcd"


def test_the_checkpoints_defaults_fill_what_a_request_leaves_out(serve, engine: FakeEngine):
    defaults = {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.05}
    engine.info = dataclasses.replace(engine.info, sampling_defaults=defaults)
    server = serve()
    named = {"temperature": 1, "top_p": 1, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1}
    for fields in ({}, {"temperature": None}, {"temperature": 0, "top_k": -1}, named):
        body = {"prompt": "x", "max_tokens": 1, **fields}
        assert httpx.post(server.url + "/v1/completions", json=body).status_code == 200
    messages = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
    assert httpx.post(server.url + "/v1/chat/completions", json=messages).status_code == 200
    filled = SamplingParams(max_tokens=1, **defaults)
    greedy = dataclasses.replace(filled, temperature=0, top_k=0)
    seen = [params for _, params in engine.submitted.values()]
    assert seen == [filled, filled, greedy, SamplingParams(max_tokens=1), filled]


def test_openais_defaults_can_be_kept(serve, engine: FakeEngine):
    engine.info = dataclasses.replace(engine.info, sampling_defaults={"temperature": 0.7})
    server = serve(sampling_defaults="openai")
    assert httpx.post(server.url + "/v1/completions", json={"prompt": "x"}).status_code == 200
    assert [params for _, params in engine.submitted.values()] == [SamplingParams()]


def test_max_tokens_defaults_to_16(client: openai.OpenAI):
    done = client.completions.create(model="fake", prompt="hi")
    assert done.choices[0].text == "abcdefghijklmnop"


def test_a_prompt_of_token_ids_goes_to_the_engine_as_it_is(client: openai.OpenAI, engine: FakeEngine):
    client.completions.create(model="fake", prompt=[5, 6, 7], max_tokens=1)
    assert [prompt for prompt, _ in engine.submitted.values()] == [[5, 6, 7]]


@pytest.mark.parametrize("prompts", [["x", "yz"], [[BOS, 120], [BOS, 121, 122]]])
def test_a_batch_answers_in_the_order_of_prompts_and_choices(
    client: openai.OpenAI, engine: FakeEngine, prompts: list
):
    engine.cached_tokens = 1
    done = client.completions.create(model="fake", prompt=prompts, n=2, seed=3, max_tokens=2)
    assert [(c.index, c.text) for c in done.choices] == [(0, "de"), (1, "ef"), (2, "de"), (3, "ef")]
    assert [prompt for prompt, _ in engine.submitted.values()] == [
        [BOS, *b"x"],
        [BOS, *b"x"],
        [BOS, *b"yz"],
        [BOS, *b"yz"],
    ]
    assert [params.seed for _, params in engine.submitted.values()] == [3, 4, 3, 4]
    assert done.usage is not None and done.usage.prompt_tokens_details is not None
    # A prompt counts once, however many completions it has.
    assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (5, 8)
    assert done.usage.prompt_tokens_details.cached_tokens == 2


def test_choices_without_a_seed_stay_without(client: openai.OpenAI, engine: FakeEngine):
    client.completions.create(model="fake", prompt="x", n=2, max_tokens=1)
    assert [params.seed for _, params in engine.submitted.values()] == [None, None]


def test_the_largest_seed_wraps_around(client: openai.OpenAI, engine: FakeEngine):
    engine.script = saying("x")
    client.completions.create(model="fake", prompt="x", n=2, seed=2**63 - 1, max_tokens=1)
    assert [params.seed for _, params in engine.submitted.values()] == [2**63 - 1, -(2**63)]


def test_every_sampling_field_reaches_the_engine(client: openai.OpenAI, engine: FakeEngine):
    client.completions.create(
        model="fake",
        prompt="x",
        max_tokens=4,
        temperature=0.5,
        top_p=0.9,
        seed=7,
        presence_penalty=0.25,
        frequency_penalty=-0.5,
        logit_bias={"97": 5, "3": -100},
        logprobs=2,
        stop=["\n\n", "END"],
        user="somebody",
        extra_body={
            "top_k": 40,
            "min_p": 0.1,
            "min_tokens": 2,
            "repetition_penalty": 1.1,
            "stop_token_ids": [9],
            "ignore_eos": True,
            "skip_special_tokens": False,
            "no_stop_trim": True,
            "metadata": {"of": "the client"},
        },
    )
    [(_, params)] = engine.submitted.values()
    assert params == SamplingParams(
        max_tokens=4,
        temperature=0.5,
        top_k=40,
        top_p=0.9,
        min_p=0.1,
        seed=7,
        repetition_penalty=1.1,
        presence_penalty=0.25,
        frequency_penalty=-0.5,
        logit_bias={97: 5.0, 3: -100.0},
        stop=("\n\n", "END"),
        stop_token_ids=(9,),
        include_stop_str_in_output=True,
        ignore_eos=True,
        min_tokens=2,
        logprobs=2,
        skip_special_tokens=False,
    )


def test_null_means_left_out(http: httpx.Client, engine: FakeEngine):
    nulls = dict.fromkeys(("temperature", "top_p", "n", "stop", "seed", "stream", "stream_options", "suffix"))
    reply = http.post("/v1/completions", json={"model": None, "prompt": "x", "max_tokens": None, **nulls})
    assert reply.status_code == 200
    assert [params for _, params in engine.submitted.values()] == [SamplingParams(max_tokens=16)]


def test_a_stop_string_ends_the_text(client: openai.OpenAI):
    done = client.completions.create(model="fake", prompt="x", stop="fg", max_tokens=20)
    assert (done.choices[0].text, done.choices[0].finish_reason) == ("abcde", "stop")
    assert done.choices[0].model_extra == {"stop_reason": "fg"}
    kept = client.completions.create(
        model="fake", prompt="x", stop="fg", max_tokens=20, extra_body={"include_stop_str_in_output": True}
    )
    assert kept.choices[0].text == "abcdefg"


def test_the_models_own_end_has_no_stop_reason(client: openai.OpenAI, engine: FakeEngine):
    engine.script = saying("Grüße, 世界!")
    done = client.completions.create(model="fake", prompt="x", max_tokens=50)
    assert (done.choices[0].text, done.choices[0].finish_reason) == ("Grüße, 世界!", "stop")
    assert done.choices[0].model_extra == {"stop_reason": None}


def test_streams_with_usage_in_the_last_chunk(client: openai.OpenAI, engine: FakeEngine):
    engine.cached_tokens = 1
    stream = client.completions.create(
        model="fake", prompt="hi", max_tokens=5, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == "abcde"
    assert [chunk.choices[0].finish_reason for chunk in chunks[-2:-1]] == ["length"]
    assert all(chunk.choices[0].finish_reason is None for chunk in chunks[:-2])
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None and chunks[-1].usage.prompt_tokens_details is not None
    assert (chunks[-1].usage.prompt_tokens, chunks[-1].usage.completion_tokens) == (3, 5)
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens == 1
    assert len({chunk.id for chunk in chunks}) == 1


def test_a_stream_is_sse_and_ends_with_done(http: httpx.Client):
    reply = http.post("/v1/completions", json={"prompt": "x", "max_tokens": 2, "stream": True})
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert reply.headers["cache-control"] == "no-cache"
    events = reply.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert all(event.startswith("data: {") for event in events[:-2])
    assert "usage" not in reply.text


def test_streams_interleave_choices_by_index(client: openai.OpenAI):
    texts = {0: "", 1: "", 2: "", 3: ""}
    ended = []
    stream = client.completions.create(
        model="fake", prompt=["x", "y"], n=2, seed=1, max_tokens=40, stream=True
    )
    for chunk in stream:
        [choice] = chunk.choices
        assert choice.index not in ended
        texts[choice.index] += choice.text
        if choice.finish_reason is not None:
            ended.append(choice.index)
    long = "abcdefghijklmnopqrstuvwxyz" * 2
    assert texts == {0: long[1:41], 1: long[2:42], 2: long[1:41], 3: long[2:42]}
    assert sorted(ended) == [0, 1, 2, 3]


def test_text_without_tokens_and_tokens_without_text_stream_in_order(
    client: openai.OpenAI, engine: FakeEngine
):
    engine.script = saying("a世b")
    stream = client.completions.create(model="fake", prompt="x", max_tokens=9, stop="zz", stream=True)
    chunks = [chunk.choices[0] for chunk in stream]
    assert "".join(choice.text for choice in chunks) == "a世b"
    assert all(choice.text or choice.finish_reason for choice in chunks)


def test_echo_begins_with_the_prompt(client: openai.OpenAI):
    done = client.completions.create(model="fake", prompt=["x: ", "y: "], echo=True, max_tokens=2)
    assert [c.text for c in done.choices] == ["x: ab", "y: ab"]
    of_ids = client.completions.create(model="fake", prompt=[BOS, 122], echo=True, max_tokens=2)
    assert of_ids.choices[0].text == "zab"
    stream = client.completions.create(model="fake", prompt="x: ", echo=True, max_tokens=2, stream=True)
    parts = [chunk.choices[0].text for chunk in stream]
    assert parts[0] == "x: "
    assert "".join(parts) == "x: ab"


def test_logprobs_of_a_completion(client: openai.OpenAI):
    done = client.completions.create(model="fake", prompt="x", max_tokens=3, logprobs=2)
    logprobs = done.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["a", "b", "c"]
    assert logprobs.token_logprobs == [-0.5, -0.5, -0.5]
    assert logprobs.top_logprobs == [{"a": -0.5, "b": -1.5}, {"b": -0.5, "c": -1.5}, {"c": -0.5, "d": -1.5}]
    assert logprobs.text_offset == [0, 1, 2]


def test_logprobs_0_reports_the_sampled_token(client: openai.OpenAI):
    done = client.completions.create(model="fake", prompt="x", max_tokens=1, logprobs=0)
    assert done.choices[0].logprobs is not None
    assert done.choices[0].logprobs.top_logprobs == [{"a": -0.5}]


def test_streamed_logprobs_join_to_those_of_the_whole(client: openai.OpenAI, engine: FakeEngine):
    engine.script = saying("a世b")
    whole = client.completions.create(model="fake", prompt="x", max_tokens=9, logprobs=1).choices[0].logprobs
    stream = client.completions.create(model="fake", prompt="x", max_tokens=9, logprobs=1, stream=True)
    parts = [chunk.choices[0].logprobs for chunk in stream]
    assert whole is not None
    assert whole.tokens == ["a", "bytes:\\xe4", "bytes:\\xb8", "bytes:\\x96", "b", "<eos>"]
    # The three bytes of one character begin one character.
    assert whole.text_offset == [0, 1, 2, 2, 2, 3]
    for field in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        joined = [x for part in parts if part is not None for x in getattr(part, field)]
        assert joined == getattr(whole, field)


def test_token_ids_on_request(http: httpx.Client):
    body = {"prompt": "x", "max_tokens": 3, "return_token_ids": True}
    assert http.post("/v1/completions", json=body).json()["choices"][0]["token_ids"] == [97, 98, 99]
    body = {"prompt": "x", "max_tokens": 3}
    assert "token_ids" not in http.post("/v1/completions", json=body).json()["choices"][0]


def test_without_a_tokenizer_token_ids_come_back(serve):
    server = serve(tokenizer=None)
    body = {"prompt": [1, 2], "max_tokens": 2, "logprobs": 1}
    choice = httpx.post(server.url + "/v1/completions", json=body).json()["choices"][0]
    assert choice["token_ids"] == [97, 98]
    assert choice["logprobs"]["tokens"] == ["token_id:97", "token_id:98"]
    assert choice["logprobs"]["text_offset"] == [0, 0]
    streamed = httpx.post(server.url + "/v1/completions", json={**body, "stream": True}).text
    assert '"token_ids":[97' in streamed


def test_the_served_name_is_the_configured_one(serve):
    server = serve(served_model_name="org/Some-Model")
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["org/Some-Model"]
        assert client.models.retrieve("org/Some-Model").id == "org/Some-Model"
        done = client.completions.create(model="org/Some-Model", prompt="x", max_tokens=1)
        assert done.model == "org/Some-Model"
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="fake", prompt="x", max_tokens=1)


def test_the_model_card_tells_the_context_length(client: openai.OpenAI):
    card = client.models.retrieve("fake")
    assert (card.id, card.object, card.owned_by) == ("fake", "model", "hybridjax")
    assert card.model_extra == {"root": "/models/fake", "max_model_len": 2**20}
