"""The prefix cache on the real models: the same tokens as without it, whatever was cached before."""

from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from safetensors.numpy import load_file

from hybridjax.serving import Engine, SamplingParams

GOLDENS = Path(__file__).parent.parent / "goldens" / "minicpm_sala"
MODELS = {
    "tiny-sala": "tiny-sala",
    "sparse": str(GOLDENS / "sparse"),
    "sparse_wide": str(GOLDENS / "sparse_wide"),
}


@pytest.fixture(scope="module", params=MODELS)
def engines(request):
    """The same model with a cache that has to evict, and without one."""
    common = {
        "context_length": 1024,
        "max_running_requests": 4,
        "chunked_prefill_size": 128,
        "compilation_cache_dir": "",
        "skip_server_warmup": True,
    }
    path = MODELS[request.param]
    with (
        Engine(path, **common, max_total_tokens=3072, max_mamba_cache_size=3) as cached,
        Engine(path, **common, disable_radix_cache=True) as plain,
    ):
        yield cached, plain


def trunk(engine):
    if engine.info.vocab_size == 97:
        return load_file(GOLDENS / "sparse" / "golden.safetensors")["input_ids"].tolist()
    return np.random.default_rng(0).integers(5, engine.info.vocab_size, 900).tolist()


def prompt_of(engine, length, fork, seed):
    """A prompt that leaves the common trunk after ``fork`` tokens."""
    tail = np.random.default_rng(seed).integers(5, engine.info.vocab_size, max(0, length - fork)).tolist()
    return trunk(engine)[: min(fork, length)] + tail


EDGES = [1, 63, 64, 65, 127, 128, 129, 192, 320, 513, 700]


@settings(max_examples=12)
@given(
    waves=st.lists(
        st.lists(
            st.tuples(st.sampled_from(EDGES), st.sampled_from([0, *EDGES]), st.integers(0, 2)),
            min_size=1,
            max_size=5,
        ),
        min_size=2,
        max_size=4,
    )
)
def test_shared_prefixes_of_every_length_change_no_token(engines, waves):
    cached, plain = engines
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    for wave in waves:
        prompts = [prompt_of(cached, *job) for job in wave]
        got = [r.token_ids for r in cached.generate(prompts, params)]
        assert got == [plain.generate([p], params)[0].token_ids for p in prompts]
        cached.check_integrity()


def test_a_hit_is_reported_and_seeded_sampling_does_not_notice(engines):
    cached, plain = engines
    cached.flush_cache()
    prompt = prompt_of(cached, 700, 700, 0)
    params = SamplingParams(temperature=0.9, top_p=0.95, seed=5, max_tokens=12, ignore_eos=True)
    expected = plain.generate([prompt], params)[0].token_ids
    events = []
    for _ in range(2):
        assert cached.generate([prompt], params)[0].token_ids == expected
    cached.submit(prompt, params, events.append, request_id="third")
    cached.generate([prompt[:5]], params)
    while not events or events[-1].finish_reason is None:
        cached.check_integrity()
    assert events[-1].cached_tokens == 640
    assert tuple(t for e in events for t in e.token_ids) == expected


def test_a_corrupted_snapshot_changes_the_tokens(engines):
    """The test above would notice: state that is not the prompt's leads elsewhere."""
    cached, plain = engines
    cached.flush_cache()
    prompt = prompt_of(cached, 500, 500, 0)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0)
    expected = plain.generate([prompt], params)[0]
    assert cached.generate([prompt], params)[0].token_ids == expected.token_ids
    runner, scheduler = cached._loop._runner, cached._loop._scheduler
    slots = np.array(scheduler.memory.cache.held_slots())
    caches = tuple(
        type(c)(c.state.at[slots].multiply(-3.0)) if hasattr(c, "state") else c for c in runner._state.caches
    )
    runner._state = type(runner._state)(caches, runner._state.sampler)
    damaged = cached.generate([prompt], params)[0]
    assert [t.logprob for t in damaged.logprobs] != pytest.approx(
        [t.logprob for t in expected.logprobs], abs=1e-3
    )
    cached.flush_cache()
    assert cached.generate([prompt], params)[0].token_ids == expected.token_ids
