import random
import subprocess
import sys
import threading

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings
from serving_fakes import (
    FakeRunner,
    FakeTokenizer,
    Recorder,
    alone,
    engine_of,
    prompt_of,
    serving,
    submit_together,
)

from hybridjax.configs import EngineConfig
from hybridjax.errors import ConfigError, EngineDeadError, QueueFullError, RequestError
from hybridjax.serving import Engine, GenerationResult, RequestOutput, SamplingParams
from hybridjax.serving.plan import DecodePlan, PrefillPlan

LENGTHS = [1, 63, 64, 65, 127, 128, 129, 200]
GREEDY = SamplingParams(temperature=0, max_tokens=9)


@settings(max_examples=40)
@given(
    requests=st.lists(
        st.tuples(
            st.sampled_from(LENGTHS),
            st.fixed_dictionaries(
                {
                    "max_tokens": st.integers(1, 30),
                    "temperature": st.sampled_from([0.0, 1.0]),
                    "seed": st.integers(0, 2**63 - 1),
                    "ignore_eos": st.booleans(),
                    "min_tokens": st.sampled_from([0, 0, 4]),
                }
            ),
        ),
        max_size=14,
    ),
    fields=st.fixed_dictionaries(
        {
            "chunked_prefill_size": st.sampled_from([-1, 64, 128, 256]),
            "num_continuous_decode_steps": st.integers(1, 5),
            "disable_overlap_schedule": st.booleans(),
            "max_running_requests": st.sampled_from([None, 1, 3]),
        }
    ),
    pages=st.sampled_from([9, 40]),
)
def test_tokens_do_not_depend_on_the_schedule(requests, fields, pages):
    runner = FakeRunner(num_pages=pages, context_length=256)
    with serving(runner, **fields) as (engine, _):
        prompts = [prompt_of(length, i) for i, (length, _) in enumerate(requests)]
        params = [
            SamplingParams(**{**values, "min_tokens": min(values["min_tokens"], values["max_tokens"])})
            for _, values in requests
        ]
        results = engine.generate(prompts, params)
        engine.check_integrity()
        for result, prompt, settings_ in zip(results, prompts, params, strict=True):
            assert list(result.token_ids) == alone(engine, prompt, settings_)
            assert list(result.prompt_token_ids) == prompt
        assert runner.most_in_flight <= (1 if fields["disable_overlap_schedule"] else 2)


def test_overlap_keeps_one_step_in_flight():
    for disabled, expected in ((False, 2), (True, 1)):
        with serving(disable_overlap_schedule=disabled) as (engine, runner):
            engine.generate([prompt_of(5)], SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))
            assert runner.most_in_flight == expected


def test_generate_forms():
    with serving(tokenizer=FakeTokenizer()) as (engine, _):
        one = engine.generate("hello", GREEDY)
        assert len(one) == 1
        ids = FakeTokenizer().encode("hello")
        for same in (ids, [ids], ["hello"]):
            assert engine.generate(same, GREEDY)[0].token_ids == one[0].token_ids
        two = engine.generate(["hello", [5, 6]], [GREEDY, SamplingParams(max_tokens=2, ignore_eos=True)])
        assert two[0].token_ids == one[0].token_ids
        assert len(two[1].token_ids) == 2
        assert engine.generate([]) == []
        assert len(engine.generate("x")) == 1
        named = engine.generate(["a", "b"], GREEDY, request_ids=["first", "second"])
        assert [result.request_id for result in named] == ["first", "second"]
        assert isinstance(named[0], GenerationResult)
        texts = FakeTokenizer().texts
        shown = [token for token in one[0].token_ids if token not in (2, 3)]
        assert one[0].text == "".join(texts[token] for token in shown)


def test_generate_refuses_all_or_nothing():
    with serving() as (engine, runner):
        cases = [
            ([[1], []], GREEDY, None),
            ([[1], [2]], [GREEDY], None),
            ([[1], [2]], GREEDY, ["a", "a"]),
            ([[1], [2]], GREEDY, ["a"]),
            (["text"], GREEDY, None),
        ]
        for prompts, params, ids in cases:
            with pytest.raises(RequestError):
                engine.generate(prompts, params, request_ids=ids)
        assert runner.plans == []


def test_generate_takes_more_prompts_than_may_queue():
    with serving(max_queued_requests=1) as (engine, _):
        results = engine.generate([[i] for i in range(30)], GREEDY)
        assert [list(r.token_ids) for r in results] == [alone(engine, [i], GREEDY) for i in range(30)]


def test_generate_reports_logprobs():
    with serving() as (engine, _):
        params = SamplingParams(temperature=0, max_tokens=4, logprobs=3, ignore_eos=True)
        result = engine.generate([[1, 2]], params)[0]
        assert result.logprobs is not None
        assert tuple(item.token_id for item in result.logprobs) == result.token_ids
        assert [len(item.top) for item in result.logprobs] == [3] * 4
        assert engine.generate([[1, 2]], GREEDY)[0].logprobs is None


def test_unseeded_requests_draw_from_the_engines_seed():
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    found = []
    for seed in (0, 0, 1):
        with serving(random_seed=seed) as (engine, _):
            found.append([r.token_ids for r in engine.generate([[1], [1]], params)])
    assert found[0] == found[1] != found[2]
    assert found[0][0] != found[0][1]


def test_stop_string_ends_a_request_in_the_engine():
    tokenizer = FakeTokenizer(["xyz"[i % 3] for i in range(101)])
    with serving(tokenizer=tokenizer) as (engine, _):
        free = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
        text = engine.generate([[4]], free)[0].text
        stop = text[10:13]
        params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, stop=[stop])
        result = engine.generate([[4]], params)[0]
        assert result.text == text[: text.index(stop)]
        assert (result.finish_reason, result.stop_reason) == ("stop", stop)


def test_submit_streams_events_in_order():
    with serving(num_continuous_decode_steps=2) as (engine, _):
        recorder = Recorder()
        params = SamplingParams(temperature=0, max_tokens=7, ignore_eos=True)
        request_id = engine.submit([1, 2, 3], params, recorder)
        recorder.wait()
        events = recorder.events[request_id]
        assert [len(event.token_ids) for event in events] == [1, 2, 2, 2]
        assert [event.completion_tokens for event in events] == [1, 3, 5, 7]
        assert {event.prompt_tokens for event in events} == {3}
        assert recorder.reason(request_id) == "length"
        assert isinstance(events[0], RequestOutput)


def test_submit_validates():
    with serving() as (engine, _):
        recorder = Recorder()

        def refused(prompt, **params):
            with pytest.raises(RequestError) as caught:
                engine.submit(prompt, SamplingParams(**params), recorder)
            return caught.value

        assert refused([]).param == "prompt"
        assert refused("text").param == "prompt"
        assert refused([101]).param == "prompt"
        assert refused([1] * 640, max_tokens=None).code == "context_length_exceeded"
        assert refused([1] * 600, max_tokens=41).code == "context_length_exceeded"
        assert refused([1], logit_bias={101: 1.0}).param == "logit_bias"
        assert refused([1], stop=["x"]).param == "stop"
        assert recorder.events == {}
        assert engine.info.context_length == 640


def test_context_is_bounded_by_the_pages():
    with serving(FakeRunner(num_pages=4, context_length=640)) as (engine, _):
        assert engine.info.context_length == 192
        assert engine.info.max_total_tokens == 192
        with pytest.raises(RequestError) as caught:
            engine.submit([1] * 100, SamplingParams(max_tokens=93), Recorder())
        assert caught.value.code == "context_length_exceeded"
        params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
        assert len(engine.generate([[1] * 100], params)[0].token_ids) == 92


def test_request_ids_are_unique_while_in_use():
    with serving() as (engine, runner):
        recorder = Recorder()
        reused = threading.Event()

        def duplicate(plan):
            if not reused.is_set():
                reused.set()
                with pytest.raises(RequestError) as caught:
                    engine.submit([1], GREEDY, recorder, request_id="mine")
                codes.append(caught.value.code)

        codes: list[str | None] = []
        runner.on_launch = duplicate
        assert engine.submit([1], GREEDY, recorder, request_id="mine") == "mine"
        recorder.wait()
        assert codes == ["duplicate_request_id"]
        first = recorder.tokens("mine")
        recorder.events.clear()
        engine.submit([1], GREEDY, recorder, request_id="mine")
        recorder.wait()
        assert recorder.tokens("mine") == first
        assert engine.submit([1], GREEDY, recorder) != engine.submit([1], GREEDY, recorder)
        recorder.wait(2)


def test_a_full_queue_refuses():
    with serving(max_queued_requests=2, max_running_requests=1) as (engine, runner):
        recorder = Recorder()
        entered, release = threading.Event(), threading.Event()

        def hold(plan):
            entered.set()
            assert release.wait(60)

        runner.on_launch = hold
        engine.submit([1], GREEDY, recorder)
        assert entered.wait(60)
        for _ in range(2):
            engine.submit([1], GREEDY, recorder)
        with pytest.raises(QueueFullError) as caught:
            engine.submit([1], GREEDY, recorder)
        assert caught.value.retry_after > 0
        release.set()
        recorder.wait(3)
        engine.submit([1], GREEDY, recorder)
        recorder.wait()


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("phase", ["waiting", "prefill", "first decode", "decode"])
def test_abort_in_each_phase(phase, overlap):
    """The abort arrives while a step is launched; the victim is in no plan after that one."""
    fields = {"max_running_requests": 1 if phase == "waiting" else 2, "chunked_prefill_size": 64}
    with serving(disable_overlap_schedule=not overlap, **fields) as (engine, runner):
        recorder = Recorder()
        long = SamplingParams(temperature=0, max_tokens=300, ignore_eos=True)
        aborted_at = []

        def abort_when_due(plan):
            rows = {row.request.request_id: row for row in plan.rows}
            due = {
                "waiting": isinstance(plan, DecodePlan) and "other" in rows,
                "prefill": isinstance(plan, PrefillPlan) and "victim" in rows and rows["victim"].start == 64,
                "first decode": isinstance(plan, DecodePlan) and "victim" in rows,
                "decode": isinstance(plan, DecodePlan) and "victim" in rows and rows["victim"].position > 230,
            }
            if due[phase] and not aborted_at:
                aborted_at.append(len(runner.plans))
                engine.abort("victim")

        requests = [("other", 5, GREEDY), ("victim", 200, long)]
        submit_together(engine, runner, recorder, requests, abort_when_due)
        recorder.wait(2)
        assert recorder.reason("victim") == "abort"
        expected = alone(engine, prompt_of(200), long)
        tokens = recorder.tokens("victim")
        assert tokens == expected[: len(tokens)]
        assert recorder.tokens("other") == alone(engine, prompt_of(5), GREEDY)
        after = [row for plan in runner.plans[aborted_at[0] + 1 :] for row in plan.rows]
        assert all(row.request.request_id != "victim" for row in after)
        if phase == "waiting":
            assert "victim" not in runner.admitted
        engine.check_integrity()
        engine.flush_cache()
        assert engine._loop._scheduler.memory.pages.available == 39


def test_abort_of_unknown_or_finished_requests_is_ignored():
    with serving() as (engine, _):
        engine.abort("nobody")
        recorder = Recorder()
        request_id = engine.submit([1], GREEDY, recorder)
        recorder.wait()
        engine.abort(request_id)
        engine.check_integrity()
        assert recorder.reason(request_id) in ("length", "stop")


def test_a_late_abort_does_not_hit_the_next_owner_of_the_id():
    with serving() as (engine, _):
        recorder = Recorder()
        old = engine._entry([1], GREEDY, recorder, "id")
        engine._loop._aborts.append(old)
        engine.submit([1], GREEDY, recorder, request_id="id")
        recorder.wait()
        assert recorder.reason("id") != "abort"


@pytest.mark.parametrize("length", [1, 70])
def test_a_reused_id_gets_nothing_of_a_step_that_was_in_flight(length):
    with serving() as (engine, runner):
        recorder = Recorder()
        long = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
        runner.on_launch = lambda plan: engine.abort("id") if len(runner.plans) == 2 else None

        def resubmit(event):
            if event.finish_reason is not None:
                assert event.finish_reason == "abort"
                assert runner.most_in_flight == 2
                engine.submit(prompt_of(length), GREEDY, recorder, request_id="id")

        engine.submit([1], long, resubmit, request_id="id")
        recorder.wait()
        assert recorder.tokens("id") == alone(engine, prompt_of(length), GREEDY)


def test_callbacks_may_submit_and_abort():
    with serving() as (engine, _):
        recorder = Recorder()
        long = SamplingParams(temperature=0, max_tokens=500, ignore_eos=True)

        def chain(event):
            recorder(event)
            if event.finish_reason is None:
                engine.abort(event.request_id)
            else:
                engine.submit([2], GREEDY, recorder, request_id="second")

        engine.submit([1], long, chain, request_id="first")
        recorder.wait(2)
        assert recorder.reason("first") == "abort"
        assert recorder.tokens("second") == alone(engine, [2], GREEDY)


def test_idle_does_not_spin():
    with serving() as (engine, _):
        steps = []
        step = engine._loop._step
        engine._loop._step = lambda: (steps.append(1), step())  # type: ignore[method-assign]
        engine.generate([[1, 2]], GREEDY)
        engine.check_integrity()
        before = len(steps)
        for _ in range(5):
            engine.check_integrity()
        assert len(steps) - before <= 6


@pytest.mark.parametrize("pages", [12, 40])
def test_many_submitters_with_random_aborts(pages):
    runner = FakeRunner(num_pages=pages, context_length=400)
    with serving(runner, chunked_prefill_size=128, max_queued_requests=10_000) as (engine, _):
        recorder = Recorder()
        wanted: dict[str, tuple[list[int], SamplingParams]] = {}
        start = threading.Barrier(64)

        def submitter(worker: int) -> None:
            rng = random.Random(worker)
            start.wait()
            for i in range(3):
                name = f"{worker}-{i}"
                prompt = prompt_of(rng.choice(LENGTHS), worker)
                params = SamplingParams(
                    temperature=rng.choice([0, 1]),
                    seed=worker,
                    max_tokens=rng.randint(1, 25),
                    ignore_eos=rng.random() < 0.5,
                )
                wanted[name] = prompt, params
                engine.submit(prompt, params, recorder, request_id=name)
                if rng.random() < 0.4:
                    engine.abort(f"{rng.randint(0, worker)}-{i}")

        threads = [threading.Thread(target=submitter, args=(worker,)) for worker in range(64)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        recorder.wait(64 * 3)
        engine.check_integrity()
        reasons = {name: recorder.reason(name) for name in wanted}
        assert set(reasons.values()) <= {"stop", "length", "abort"}
        for name, (prompt, params) in wanted.items():
            expected, tokens = alone(engine, prompt, params), recorder.tokens(name)
            assert tokens == (expected[: len(tokens)] if reasons[name] == "abort" else expected)


def test_shutdown_ends_everything_and_is_idempotent():
    runner = FakeRunner(num_pages=5000, context_length=100_000)
    engine = engine_of(runner, max_running_requests=2, chunked_prefill_size=64)
    recorder = Recorder()
    reached = threading.Event()

    def notice(plan):
        if len(runner.plans) == 4:
            reached.set()

    endless = SamplingParams(temperature=0, max_tokens=90_000, ignore_eos=True)
    requests = [("decoding", 10, endless), ("prefilling", 1000, endless), ("waiting", 10, endless)]
    submit_together(engine, runner, recorder, requests, notice)
    assert reached.wait(60)
    engine.submit([1], endless, recorder, request_id="latest")
    stoppers = [threading.Thread(target=engine.shutdown) for _ in range(3)]
    for thread in stoppers:
        thread.start()
    for thread in stoppers:
        thread.join()
    engine.shutdown()
    names = ("decoding", "prefilling", "waiting", "latest")
    assert {recorder.reason(name) for name in names} == {"abort"}
    assert runner.closed == 1
    assert not engine._loop._thread.is_alive()
    engine.check_integrity()
    assert engine._loop._scheduler.memory.pages.available == 4999
    with pytest.raises(EngineDeadError, match="shut down"):
        engine.submit([1], GREEDY, recorder)
    with pytest.raises(EngineDeadError):
        engine.generate([[1]], GREEDY)
    engine.abort("decoding")


def test_shutdown_from_a_callback():
    with serving() as (engine, _):
        recorder = Recorder()

        def stop(event):
            recorder(event)
            engine.shutdown()

        long = SamplingParams(temperature=0, max_tokens=300, ignore_eos=True)
        request_id = engine.submit([1], long, stop)
        recorder.wait()
        assert recorder.reason(request_id) == "abort"


def test_unknown_settings_are_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match="contxt_length.*context_length"):
        Engine("tiny-sala", contxt_length=5)
    with pytest.raises(ConfigError, match="page_size"):
        Engine("tiny-sala", page_size=0)


def test_info_describes_the_engine():
    runner = FakeRunner(max_decode_rows=6)
    with serving(runner, model_path="some/where/model", max_running_requests=100) as (engine, _):
        assert engine.info.model_name == "model"
        assert engine.info.max_running_requests == 6
        assert engine.info.vocab_size == 101
        assert engine.is_healthy
    assert EngineConfig().max_running_requests is None


def test_the_front_door_stays_light():
    code = (
        "import sys, hybridjax.serving.api; print(sorted({'jax', 'flax', 'tokenizers'} & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
