"""The engine on the Qwen4Exp goldens: chunks, batches, tables on the host, images, cached prefixes."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

import hybridjax
from hybridjax.checkpoints import load_config
from hybridjax.configs import EngineConfig
from hybridjax.errors import RequestError
from hybridjax.images import content_hash
from hybridjax.serving import Engine, SamplingParams
from hybridjax.serving.programs import DeviceState
from hybridjax.serving.runner import ModelRunner
from hybridjax.serving.sizing import ngram_table_placement, pool_sizes

GOLDENS = Path(__file__).parent.parent / "goldens" / "qwen4_exp"
GREEDY = {"temperature": 0.0, "ignore_eos": True}
NAMES = ("text_small", "text_no_ple", "text_two_ple")


def poison(runner):
    """NaN in every float, and ids that no token has: whatever is read must have been written before."""

    def bad(x):
        floating = jnp.issubdtype(x.dtype, jnp.floating)
        return jnp.full_like(x, jnp.nan) if floating else jnp.full_like(x, 77)

    runner._state = DeviceState(jax.tree.map(bad, runner._state.caches), runner._state.sampler)


def make_engine(name, **fields):
    fields = {"context_length": 512, "max_running_requests": 4, "compilation_cache_dir": "", **fields}
    config = EngineConfig(model_path=str(GOLDENS / name), skip_server_warmup=True, **fields)
    placement = ngram_table_placement(config, load_config(GOLDENS / name))
    model = hybridjax.load_model(GOLDENS / name, dtype="float32", ple_offload=placement)
    runner = ModelRunner(model, config, pool_sizes(config, model))
    poison(runner)
    return Engine.from_parts(config, runner), runner


def golden(name):
    facts = json.loads((GOLDENS / name / "golden.json").read_text())
    want = load_file(GOLDENS / name / "golden.safetensors")
    return want["input_ids"][0].astype(np.int32), want["logits"][0], facts


@pytest.mark.parametrize("placement", ["device", "host", "mmap"])
@pytest.mark.parametrize(("name", "chunk"), [("text_small", 64), ("text_small", -1), ("text_two_ple", 64)])
def test_golden_logits_and_greedy_tokens(name, chunk, placement):
    ids, logits, facts = golden(name)
    engine, _ = make_engine(
        name, chunked_prefill_size=chunk, ple_offload=placement, max_running_requests=2
    )
    with engine:
        result = engine.generate(ids, SamplingParams(max_tokens=1, logprobs=20, **GREEDY))[0]
        exact = jax.nn.log_softmax(jnp.asarray(logits[-1]))
        for token, logprob in result.logprobs[0].top:
            assert logprob == pytest.approx(float(exact[token]), abs=1e-4)
        params = SamplingParams(max_tokens=len(facts["greedy"]), **GREEDY)
        prompt = ids[: facts["greedy_prompt_len"]]
        # The second one finds the first one's pages and snapshots.
        for result in (engine.generate(prompt, params)[0], engine.generate(prompt, params)[0]):
            assert list(result.token_ids) == facts["greedy"]
        engine.check_integrity()


@pytest.fixture(scope="module", params=["device", "host"])
def shared(request):
    """An engine with few slots and pages, and plain answers, one prompt at a time, by prompt."""
    engine, _ = make_engine(
        "text_small",
        chunked_prefill_size=64,
        ple_offload=request.param,
        max_total_tokens=1536,
        max_mamba_cache_size=2,
    )
    alone, _ = make_engine(
        "text_small", max_running_requests=1, disable_radix_cache=True, num_continuous_decode_steps=1
    )
    answers = {}

    def answer(prompt, tokens):
        key = (prompt.tobytes(), tokens)
        if key not in answers:
            params = SamplingParams(max_tokens=tokens, **GREEDY)
            answers[key] = alone.generate(prompt, params)[0].token_ids
        return answers[key]

    with engine, alone:
        yield engine, answer


@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_any_schedule_gives_the_tokens_of_plain_decoding(shared, data):
    engine, answer = shared
    base = np.random.default_rng(5).integers(1, 256, 300).astype(np.int32)
    prompts, sizes = [], []
    for i in range(data.draw(st.integers(1, 6))):
        kept = data.draw(st.sampled_from([0, 64, 100, 128, 192]))
        own = data.draw(st.integers(1, 150))
        tail = np.random.default_rng(i % 3).integers(0, 256, own).astype(np.int32)
        prompts.append(np.concatenate([base[:kept], tail]))
        sizes.append(data.draw(st.sampled_from([1, 5, 12])))
    params = [SamplingParams(max_tokens=n, **GREEDY) for n in sizes]
    for prompt, size, result in zip(prompts, sizes, engine.generate(prompts, params)):
        assert result.token_ids == answer(prompt, size)
    engine.check_integrity()
