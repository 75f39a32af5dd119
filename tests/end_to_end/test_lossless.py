"""The product's claim on real models: cached prefixes, chunks, other requests and preemption change no token.

Engines that are short of pages and slots run random arrivals, aborts and preemptions; every answer is that of
an engine which runs one request at a time, token by token, without a cache. Under deterministic inference
log probabilities are equal to the last bit as well.
"""

import itertools
import threading
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from safetensors.numpy import load_file

from hybridjax.calibration import Quantization, Settings
from hybridjax.serving import Engine, SamplingParams

GOLDENS = Path(__file__).parent.parent / "goldens"
MODELS = {
    "tiny-sala": ("tiny-sala", {}),
    "sparse": (str(GOLDENS / "minicpm_sala" / "sparse"), {}),
    "tiny-flash-next": ("tiny-flash-next", {}),
    "tiny-flash-next, host": ("tiny-flash-next", {"ple_offload": "host"}),
    "tiny-flash-next, NVFP4": ("tiny-flash-next", {"quantization": "nvfp4"}),
}
COMMON = {"context_length": 768, "compilation_cache_dir": "", "skip_server_warmup": True}
CROWDED = {
    "max_running_requests": 4,
    "chunked_prefill_size": 128,
    "max_total_tokens": 832,  # little more than one request may need
    "max_mamba_cache_size": 2,
}


def reference(path, **fields):
    """One request at a time, one token per dispatch, nothing cached, whole prompts."""
    return Engine(
        path,
        **COMMON | fields,
        max_running_requests=1,
        chunked_prefill_size=-1,
        num_continuous_decode_steps=1,
        disable_radix_cache=True,
        disable_overlap_schedule=True,
    )


class Answers:
    """What the reference says, each computed once."""

    def __init__(self, engine):
        self._engine, self._known = engine, {}

    def __call__(self, prompt, params):
        key = (tuple(prompt), params.max_tokens, params.seed, params.temperature, params.presence_penalty)
        if key not in self._known:
            self._known[key] = self._engine.generate([prompt], params)[0]
        return self._known[key]


@pytest.fixture(scope="module", params=MODELS)
def pair(request, tmp_path_factory):
    path, fields = MODELS[request.param]
    if "quantization" in fields:
        target = tmp_path_factory.mktemp("quantized") / path
        Quantization(
            path, target, "modelopt", Settings(method="rtn", weights_only=True), progress=False
        ).quantize()
        path = str(target)
    with (
        Engine(path, **COMMON | CROWDED | fields, schedule_policy="lpm", max_prefill_share=1.0) as crowded,
        reference(path) as plain,
    ):
        yield crowded, Answers(plain)


def trunk(engine):
    if engine.info.vocab_size == 97:
        return load_file(GOLDENS / "minicpm_sala" / "sparse" / "golden.safetensors")["input_ids"].tolist()
    return np.random.default_rng(0).integers(5, engine.info.vocab_size - 8, 700).tolist()


def prompt_of(engine, length, fork, seed):
    """A prompt that leaves the common trunk after ``fork`` tokens."""
    tail = np.random.default_rng(seed).integers(5, engine.info.vocab_size - 8, max(0, length - fork)).tolist()
    return trunk(engine)[: min(fork, length)] + tail


def preempt(engine, which):
    """Preempts an admitted request, between two steps."""
    scheduler = engine._loop._scheduler

    def call():
        if scheduler.admitted:
            scheduler.preempt(scheduler.admitted[which % len(scheduler.admitted)])

    engine._loop._between_steps(call)


EDGES = [1, 63, 64, 65, 128, 129, 192, 320, 450]
JOBS = st.lists(
    st.tuples(
        st.tuples(st.sampled_from(EDGES), st.sampled_from([0, *EDGES]), st.integers(0, 2)),
        st.sampled_from([1, 9, 70]),
        st.sampled_from([0.0, 0.0, 0.9]),
        st.sampled_from([0.0, 0.0, 0.5]),
    ),
    min_size=2,
    max_size=6,
)


@settings(max_examples=6)
@given(jobs=JOBS, preemptions=st.lists(st.integers(0, 5), max_size=6), aborted=st.sets(st.integers(0, 5)))
def test_no_schedule_changes_a_token(pair, jobs, preemptions, aborted):
    crowded, answer = pair
    events, progress = [[] for _ in jobs], threading.Condition()

    def listener(index):
        def on_output(event):
            with progress:
                events[index].append(event)
                progress.notify_all()

        return on_output

    def made():
        return sum(len(event.token_ids) for list_ in events for event in list_)

    def all_ended():
        return all(list_ and list_[-1].finish_reason for list_ in events)

    wanted = []
    for i, (prompt, tokens, temperature, penalty) in enumerate(jobs):
        params = SamplingParams(
            temperature=temperature,
            max_tokens=tokens,
            seed=i,
            presence_penalty=penalty,
            repetition_penalty=1.0 + penalty,
            ignore_eos=True,
        )
        wanted.append((prompt_of(crowded, *prompt), params))
        name = crowded.submit(*wanted[-1], listener(i), cache_salt="a" if i % 3 == 2 else None)
        if i in aborted and i % 2:
            crowded.abort(name)
    for which in preemptions:
        before = made()
        with progress:
            assert progress.wait_for(lambda: made() > before or all_ended(), timeout=120)  # noqa: B023
        preempt(crowded, which)
        crowded.check_integrity()
    with progress:
        assert progress.wait_for(all_ended, timeout=120)
    crowded.check_integrity()
    for (prompt, params), list_ in zip(wanted, events, strict=True):
        got = tuple(token for event in list_ for token in event.token_ids)
        expected = answer(prompt, params).token_ids
        assert sum(event.finish_reason is not None for event in list_) == 1
        assert got == (expected[: len(got)] if list_[-1].finish_reason == "abort" else expected)


def test_memory_that_runs_out_is_noticed_only_by_the_counter(pair):
    crowded, answer = pair
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    prompts = [prompt_of(crowded, 150, 64, seed) for seed in range(4)]
    before = crowded.stats.preempted
    results = crowded.generate(prompts, params)
    assert crowded.stats.preempted > before
    for prompt, result in zip(prompts, results, strict=True):
        assert result.token_ids == answer(prompt, params).token_ids
    crowded.check_integrity()


@pytest.mark.parametrize("name", ["tiny-sala", "tiny-flash-next"])
def test_deterministic_inference_is_equal_to_the_last_bit(name):
    """Other requests, chunks, hits, preemption, greedy and seeded: the same float32 log probabilities."""
    fields = {"enable_deterministic_inference": True, "num_continuous_decode_steps": 4}
    path, _ = MODELS[name]
    params = [
        SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, logprobs=3),
        SamplingParams(temperature=1.0, seed=3, max_tokens=30, ignore_eos=True, logprobs=3),
    ]
    with Engine(path, **COMMON | CROWDED | fields) as engine:
        prompts = [prompt_of(engine, length, 128, i) for i, length in enumerate((300, 65, 190, 31))]
        jobs = [(prompt, params[i % 2]) for i, prompt in enumerate(prompts)]
        alone = []
        for prompt, one in jobs:
            alone.append(engine.generate([prompt], one)[0])
            engine.flush_cache()
        before = engine.stats.preempted
        scheduler = engine._loop._scheduler
        undisturbed, calls = scheduler.next_plan, itertools.count(1)

        def disturbed():
            """In the loop's thread: preempts somebody before every fifth plan, for a while."""
            count = next(calls)
            if count % 5 == 0 and count <= 30 and scheduler.admitted:
                scheduler.preempt(scheduler.admitted[count % len(scheduler.admitted)])
            return undisturbed()

        for next_plan in (undisturbed, disturbed, undisturbed):  # from the second on with hits
            scheduler.next_plan = next_plan
            together = engine.generate(*map(list, zip(*jobs, strict=True)))
            for single, crowded in zip(alone, together, strict=True):
                assert crowded.token_ids == single.token_ids
                assert crowded.logprobs == single.logprobs
        assert engine.stats.preempted > before


def test_prompt_logprobs_do_not_depend_on_chunks_or_neighbours(pair):
    crowded, answer = pair
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, prompt_logprobs=2)
    prompt, events, done = prompt_of(crowded, 300, 300, 0), [], threading.Event()
    crowded.generate([prompt[:200]], SamplingParams(max_tokens=1))  # a prefix that must not be used

    def on_output(event):
        events.append(event)
        if event.finish_reason:
            done.set()

    crowded.submit(prompt, params, on_output)
    crowded.generate([prompt_of(crowded, 129, 0, seed) for seed in range(3)], SamplingParams(max_tokens=4))
    assert done.wait(120)
    given = [event.prompt_logprobs for event in events if event.prompt_logprobs is not None]
    assert len(given) == 1 and len(given[0]) == 300 and given[0][0] is None
    assert [item.token_id for item in given[0][1:]] == prompt[1:]
    assert events[-1].cached_tokens == 0
    # A generated token's log probability is that of the same token at the end of a longer prompt.
    for length in (64, 65, 200, 299):
        one = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, logprobs=2)
        top = answer(prompt[:length], one).logprobs[0].top
        assert [token for token, _ in given[0][length].top] == [token for token, _ in top]
        assert [v for _, v in given[0][length].top] == pytest.approx([v for _, v in top], abs=2e-4)
