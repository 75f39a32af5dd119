"""The bundled models: what they know, and one behind the real server, driven by the official client."""

import asyncio
import math
import random
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import openai
import pytest

import hybridjax
from hybridjax.checkpoints import resolve
from hybridjax.serving import Engine, SamplingParams

sys.path.append(str(Path(__file__).parent.parent / "serving_http"))

from http_fakes import RunningServer

PROMPTS = ["import os\n", "def main(", "In the beginning", "class Parser:\n    def __init__(self", "for x in"]


MODELS = ("tiny-sala", "tiny-flash-next")


@pytest.fixture(scope="module")
def engine():
    """Room for 6 requests at a time, so that 64 must queue; chunks of 64, so that prompts are cut."""
    with Engine(
        "tiny-sala",
        context_length=1024,
        max_running_requests=6,
        chunked_prefill_size=64,
        compilation_cache_dir="",
    ) as engine:
        yield engine


@pytest.fixture(scope="module", params=MODELS)
def each_engine(request, engine):
    """Every bundled model's name and an engine that runs it."""
    if request.param == engine.config.model_path:
        yield request.param, engine
        return
    with Engine(
        request.param,
        context_length=1024,
        max_running_requests=2,
        chunked_prefill_size=64,
        compilation_cache_dir="",
    ) as other:
        yield request.param, other


@pytest.fixture(scope="module")
def server(engine):
    server = RunningServer(engine, served_model_name="tiny-sala")
    yield server
    server.settle()
    server.stop()


def all_free(engine):
    """Whether no request is left and, but for what the prefix cache keeps, every page and slot is free."""
    engine.check_integrity()
    engine.flush_cache()
    stats = engine._loop._scheduler.stats()
    scheduler = engine._loop._scheduler
    return (
        stats.waiting == stats.prefilling == stats.running == 0
        and stats.free_pages == scheduler.memory.pages.capacity
        and stats.free_slots == scheduler.memory.slots.capacity
    )


def test_the_official_client_completes_and_streams(engine, server):
    expected = engine.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=20))
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        assert [m.id for m in client.models.list()] == ["tiny-sala"]
        for prompt, want in zip(PROMPTS, expected, strict=True):
            whole = client.completions.create(model="tiny-sala", prompt=prompt, max_tokens=20, temperature=0)
            assert whole.choices[0].text == want.text
            assert whole.choices[0].finish_reason == want.finish_reason
            assert whole.usage.completion_tokens == len(want.token_ids)
            chunks = list(
                client.completions.create(
                    model="tiny-sala",
                    prompt=prompt,
                    max_tokens=20,
                    temperature=0,
                    stream=True,
                    stream_options={"include_usage": True},
                )
            )
            assert "".join(c.choices[0].text for c in chunks if c.choices) == want.text
            assert chunks[-1].usage == whole.usage
        chat = client.chat.completions.create(
            model="tiny-sala",
            messages=[{"role": "user", "content": "import os"}],
            max_tokens=12,
            temperature=0,
        )
        assert chat.choices[0].message.role == "assistant"
        assert chat.usage.completion_tokens <= 12


def test_the_engine_continues_as_the_teacher_forced_model_does(each_engine):
    """Long enough that blocks are left out (12 of 14, 64 of 213) and decoding crosses a block border."""
    name, engine = each_engine
    model = hybridjax.load_model(name, dtype="float32")
    tokenizer = hybridjax.load_tokenizer(resolve(name))
    prompt = tokenizer.encode(Path(random.__file__).read_text())[:850]
    result = engine.generate(
        prompt, SamplingParams(temperature=0, max_tokens=60, logprobs=1, ignore_eos=True)
    )[0]
    ids = jnp.asarray([[*prompt, *result.token_ids]], jnp.int32)
    logits = np.asarray(jax.jit(model.__call__)(ids)[0], np.float64)[len(prompt) - 1 : -1]
    assert list(result.token_ids) == logits.argmax(-1).tolist()
    norm = np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1)) + logits.max(-1)
    want = logits[np.arange(60), list(result.token_ids)] - norm
    np.testing.assert_allclose([t.logprob for t in result.logprobs], want, atol=2e-4)


def test_64_clients_with_random_aborts_leave_every_page_and_slot_free(engine, server):
    rng = random.Random(0)
    jobs = [
        (rng.choice(PROMPTS) * rng.randint(1, 30), rng.randint(1, 40), rng.random() < 0.5) for _ in range(64)
    ]

    async def one(client, prompt, limit, leave_after):
        """Reads a stream to its end, or leaves after some chunks; returns the text if it was whole."""
        stream = await client.completions.create(
            model="tiny-sala", prompt=prompt, max_tokens=limit, temperature=0, stream=True
        )
        parts = []
        async with stream:
            async for chunk in stream:
                parts.append(chunk.choices[0].text)
                if leave_after is not None and len(parts) > leave_after:
                    return None
        return "".join(parts)

    async def everybody():
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
            leaving = [rng.randint(0, 3) if leaves else None for _, _, leaves in jobs]
            tasks = [one(client, p, n, after) for (p, n, _), after in zip(jobs, leaving)]
            return await asyncio.gather(*tasks)

    texts = asyncio.run(everybody())
    server.settle()
    assert all_free(engine)
    whole = [i for i, text in enumerate(texts) if text is not None]
    assert len(whole) >= 24
    for i in whole[:12]:
        prompt, limit, _ = jobs[i]
        alone = engine.generate(prompt, SamplingParams(temperature=0, max_tokens=limit))[0]
        assert texts[i] == alone.text
    assert all_free(engine)


@pytest.mark.parametrize("name", MODELS)
def test_a_bundled_model_beats_xz_by_its_card(name):
    card = (resolve(name) / "README.md").read_text()
    row = next(line for line in card.splitlines() if line.startswith("| all |"))
    ours, xz = (float(cell) for cell in row.strip("| ").split("|")[-2:])
    assert ours < xz
    assert sum(f.stat().st_size for f in resolve(name).iterdir()) <= 12e6


@pytest.mark.parametrize(("name", "bits_per_byte"), list(zip(MODELS, (1.2025, 1.2641))))
def test_a_bundled_model_predicts_text_it_has_not_seen(name, bits_per_byte):
    """The beginning of the book of Judges, which is held out of the training text."""
    text = (Path(__file__).parent / "judges.txt").read_text()
    model, tokenizer = hybridjax.load_model(name, dtype="float32"), hybridjax.load_tokenizer(name)
    ids = tokenizer.encode(text)
    assert ids[0] == model.config.bos_token_id
    logits = np.asarray(jax.jit(model.__call__)(jnp.asarray([ids], jnp.int32))[0, :-1], np.float64)
    norm = np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1)) + logits.max(-1)
    nats = np.sum(norm - logits[np.arange(len(logits)), ids[1:]])
    assert nats / math.log(2) / len(text.encode()) == pytest.approx(bits_per_byte, rel=0.01)


def test_shutdown_frees_the_device():
    code = (
        "import hybridjax, jax;"
        "e = hybridjax.Engine('tiny-sala', skip_server_warmup=True, context_length=256);"
        "e.generate([5, 6], hybridjax.SamplingParams(max_tokens=2)); e.shutdown();"
        "left = sum(a.nbytes for a in jax.live_arrays()); print(left); assert left < 2**20, left"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", MODELS)
def test_the_tokenizer_is_found_by_the_model_s_name(name):
    tokenizer = hybridjax.load_tokenizer(name)
    text = "def f(x):\n    return x\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text
