"""The engine on the golden checkpoints: every chunk size, batch size and arrival pattern, one answer."""

import functools
import json
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

import hybridjax
from hybridjax.configs import EngineConfig
from hybridjax.errors import RequestError
from hybridjax.serving import Engine, SamplingParams
from hybridjax.serving.programs import DeviceState
from hybridjax.serving.request import Limits, make_request
from hybridjax.serving.runner import ModelRunner
from hybridjax.serving.sizing import pool_sizes

GOLDENS = Path(__file__).parent.parent / "goldens" / "minicpm_sala"
GREEDY = {"temperature": 0.0, "ignore_eos": True}


def golden(name):
    facts = json.loads((GOLDENS / name / "golden.json").read_text())
    return load_file(GOLDENS / name / "golden.safetensors"), facts


def poison(runner):
    """Fills every cache with NaN: whatever is read must have been written by its own request."""
    caches = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), runner._state.caches)
    runner._state = DeviceState(caches, runner._state.sampler)


def make_engine(name, **fields):
    fields = {"context_length": 1024, "max_running_requests": 8, "compilation_cache_dir": "", **fields}
    config = EngineConfig(model_path=str(GOLDENS / name), skip_server_warmup=True, **fields)
    model = hybridjax.load_model(GOLDENS / name, dtype="float32")
    runner = ModelRunner(model, config, pool_sizes(config, model))
    poison(runner)
    return Engine.from_parts(config, runner), runner


def whole_prompt(want, runner):
    """The longest golden prompt that leaves room for two tokens, and its length."""
    return want["input_ids"][: runner.context_length - 2].astype(np.int32)


@pytest.mark.parametrize("chunk", [64, 128, -1])
@pytest.mark.parametrize("name", ["dense", "sparse", "sparse_wide"])
def test_every_chunk_size_gives_the_golden_logits_states_and_tokens(name, chunk):
    want, facts = golden(name)
    engine, runner = make_engine(
        name, chunked_prefill_size=chunk, max_running_requests=2, disable_radix_cache=True
    )
    with engine:
        prompt = whole_prompt(want, runner)
        params = SamplingParams(max_tokens=1, logprobs=20, **GREEDY)
        result = engine.generate(prompt, params)[0]
        logits = want["logits"][-1].astype(np.float64)
        logprobs = logits - np.log(np.sum(np.exp(logits - logits.max()))) - logits.max()
        top = dict(result.logprobs[0].top)
        assert result.token_ids == (int(np.argmax(logits)),)
        assert len(top) == 20
        for token, logprob in top.items():
            assert logprob == pytest.approx(logprobs[token], abs=2e-4)
        # The only request used the slot that is handed out first; its state is the prompt's.
        states = [
            s for slot in range(1, runner.num_slots) if not np.isnan((s := runner.slot_state(slot))[0]).any()
        ]
        finals = [v for k, v in sorted(want.items()) if k.startswith("state.")]
        assert len(states) == 1
        for got, final in zip(states[0], finals, strict=True):
            assert np.abs(got - final).max() / np.abs(final).max() < 1e-5

        start = facts["greedy_prompt_len"]
        params = SamplingParams(max_tokens=len(facts["greedy"]), **GREEDY)
        result = engine.generate(want["input_ids"][:start].tolist(), params)[0]
        assert list(result.token_ids) == facts["greedy"]
        engine.check_integrity()


@pytest.mark.parametrize("chunk", [64, 320])
def test_prompt_log_probabilities_are_the_golden_ones_at_every_position(chunk):
    want, _ = golden("sparse")
    engine, runner = make_engine("sparse", chunked_prefill_size=chunk, max_running_requests=2)
    with engine:
        prompt = whole_prompt(want, runner)
        events, done = [], threading.Event()

        def on_output(event):
            events.append(event)
            if event.finish_reason:
                done.set()

        params = SamplingParams(max_tokens=2, prompt_logprobs=5, **GREEDY)
        for _ in range(2):  # the second time its prefix is cached, and not used
            events.clear()
            done.clear()
            engine.submit(prompt, params, on_output)
            assert done.wait(120)
            found = next(e.prompt_logprobs for e in events if e.prompt_logprobs is not None)
            logits = want["logits"][: len(prompt)].astype(np.float64)
            exact = logits - logits.max(axis=-1, keepdims=True)
            exact -= np.log(np.exp(exact).sum(axis=-1, keepdims=True))
            assert found[0] is None
            for i, item in enumerate(found[1:]):
                assert item.token_id == prompt[i + 1]
                assert item.logprob == pytest.approx(exact[i, item.token_id], abs=2e-4)
                best = np.argsort(-exact[i], kind="stable")[:5]
                assert [v for _, v in item.top] == pytest.approx(exact[i, best].tolist(), abs=2e-4)


def test_too_many_prompt_log_probabilities_are_refused():
    limits = Limits(context_length=10**6, vocab_size=97)
    make_request("a", np.zeros(2**19 // 21, int), SamplingParams(prompt_logprobs=20), limits, seed=0)
    with pytest.raises(RequestError, match="prompt_logprobs is 20 for a prompt of 24967 tokens"):
        make_request("a", np.zeros(24967, int), SamplingParams(prompt_logprobs=20), limits, seed=0)


@pytest.fixture(scope="module", params=["sparse", "sparse_wide"])
def shared(request):
    """One engine and the sequential answer to any prompt, each computed once."""
    want, _ = golden(request.param)
    engine, _ = make_engine(request.param, chunked_prefill_size=128)
    answers = {}

    def alone(start, length, new):
        key = (start, length, new)
        if key not in answers:
            prompt = want["input_ids"][start : start + length].tolist()
            answers[key] = engine.generate(prompt, SamplingParams(max_tokens=new, **GREEDY))[0].token_ids
        return answers[key]

    with engine:
        yield engine, want["input_ids"], alone


@pytest.mark.parametrize("size", range(1, 9))
def test_a_batch_of_any_size_gives_what_each_prompt_gives_alone(shared, size):
    engine, ids, alone = shared
    jobs = [(7 * i, 40 + 37 * i, 10) for i in range(size)]
    prompts = [ids[start : start + length].tolist() for start, length, _ in jobs]
    results = engine.generate(prompts, SamplingParams(max_tokens=10, **GREEDY))
    assert [r.token_ids for r in results] == [alone(*job) for job in jobs]


JOB = st.tuples(
    st.integers(0, 100), st.sampled_from([1, 63, 64, 65, 127, 128, 129, 300, 520]), st.integers(1, 14)
)


@settings(max_examples=15)
@given(
    jobs=st.lists(JOB, min_size=1, max_size=10),
    gaps=st.lists(st.integers(0, 3), min_size=10, max_size=10),
    aborted=st.sets(st.integers(0, 9), max_size=3),
)
def test_mixed_arrivals_and_aborts_change_no_token(shared, jobs, gaps, aborted):
    engine, ids, alone = shared
    expected = [alone(*job) for job in jobs]
    events = [[] for _ in jobs]
    progress = threading.Condition()

    def listener(index):
        def on_output(event):
            with progress:
                events[index].append(event)
                progress.notify_all()

        return on_output

    names = []
    for i, (start, length, new) in enumerate(jobs):
        # Arrive once the request before has made some tokens, not after a time.
        with progress:
            progress.wait_for(functools.partial(_has_made, events[i - 1] if i else None, gaps[i]))
        prompt = ids[start : start + length].tolist()
        params = SamplingParams(max_tokens=new, **GREEDY)
        names.append(engine.submit(prompt, params, listener(i)))
        if i in aborted:
            engine.abort(names[-1])
    with progress:
        progress.wait_for(lambda: all(_ended(e) for e in events))
    for i, (job, got) in enumerate(zip(jobs, events)):
        assert sum(e.finish_reason is not None for e in got) == 1
        tokens = tuple(t for e in got for t in e.token_ids)
        if got[-1].finish_reason == "abort":
            assert i in aborted
            assert tokens == expected[i][: len(tokens)]
        else:
            assert tokens == expected[i], job
    engine.check_integrity()


def _has_made(events, count):
    return events is None or _ended(events) or sum(len(e.token_ids) for e in events) >= count


def _ended(events):
    return bool(events) and events[-1].finish_reason is not None
