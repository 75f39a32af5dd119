import asyncio
import logging
import sys
import threading

import numpy as np
import pytest
from serving_fakes import (
    FakeRunner,
    FakeTokenizer,
    Recorder,
    alone,
    engine_of,
    prompt_of,
    refuse,
    serving,
    submit_together,
)

from hybridjax.errors import EngineDeadError, GrammarError
from hybridjax.serving.api import SamplingParams
from hybridjax.serving.plan import DecodePlan, DecodeRow, NotLaunchedError, PrefillPlan, StepResult

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)


@pytest.fixture(autouse=True)
def expected_logs(caplog):
    """Failures are logged with their traceback; nothing else is."""
    caplog.set_level(logging.ERROR, logger="hybridjax.serving")
    yield
    assert caplog.get_records("call")


def break_down(plan) -> None:
    raise RuntimeError("planted")


def once(condition, action=break_down):
    """A hook that acts at the first plan for which the condition holds."""
    done = []

    def hook(plan):
        if not done and condition(plan):
            done.append(plan)
            action(plan)

    return hook


def entry_with(engine, recorder, source):
    """The entry "bad", whose text comes from ``source``; other requests' does not."""
    make = engine._make_text_source
    engine._make_text_source = lambda *_: source
    entry = engine._entry([1, 2], LONG, recorder, "bad")
    engine._make_text_source = make
    return entry


def names(plan) -> set[str]:
    return {row.request.request_id for row in plan.rows}


def test_a_plan_that_cannot_be_launched_fails_alone():
    with serving(chunked_prefill_size=64) as (engine, runner):
        recorder = Recorder()
        bad = once(lambda plan: isinstance(plan, PrefillPlan) and "bad" in names(plan), refuse)
        requests = [("first", 10, LONG), ("bad", 100, LONG), ("second", 10, LONG)]
        submit_together(engine, runner, recorder, requests, bad)
        recorder.wait(3)
        assert recorder.reason("bad") == "error"
        assert recorder.tokens("bad") == []
        for name in ("first", "second"):
            assert recorder.tokens(name) == alone(engine, prompt_of(10), LONG)
        assert runner.recoveries == 0
        assert engine.is_healthy


@pytest.mark.parametrize("where", ["launch", "read", "admit"])
@pytest.mark.parametrize("overlap", [True, False])
def test_a_failed_step_fails_admitted_requests_and_serving_goes_on(where, overlap):
    fields = {"max_running_requests": 2, "disable_overlap_schedule": not overlap}
    with serving(**fields) as (engine, runner):
        recorder = Recorder()
        at_decode = once(lambda plan: isinstance(plan, DecodePlan) and len(plan.rows) == 2)
        on_launch = at_decode if where == "launch" else None
        if where == "read":
            runner.on_read = at_decode
        if where == "admit":
            admit = runner.admit

            def failing(request):
                if request.request_id == "b" and not runner.recoveries:
                    raise RuntimeError("planted")
                admit(request)

            runner.admit = failing  # type: ignore[method-assign]
        requests = [(name, 70, LONG) for name in "abcd"]
        submit_together(engine, runner, recorder, requests, on_launch)
        recorder.wait(4)
        expected = alone(engine, prompt_of(70), LONG)
        for name in "ab":
            tokens = recorder.tokens(name)
            assert recorder.reason(name) == "error"
            assert tokens == expected[: len(tokens)]
        for name in "cd":
            assert recorder.tokens(name) == expected
        error = recorder.events["a"][-1].error
        assert error and "planted" not in error, "what exactly broke is for the log"
        assert runner.recoveries == 1
        assert engine.is_healthy
        engine.check_integrity()


def test_results_of_steps_before_a_failed_launch_still_count():
    with serving(num_continuous_decode_steps=4) as (engine, runner):
        recorder = Recorder()
        runner.on_launch = once(lambda plan: isinstance(plan, DecodePlan) and plan.rows[0].position == 18)
        request_id = engine.submit(prompt_of(10), LONG, recorder)
        recorder.wait()
        assert recorder.reason(request_id) == "error"
        assert recorder.tokens(request_id) == alone(engine, prompt_of(10), LONG)[: 1 + 4 + 4]


def test_steps_launched_after_a_failed_one_do_not_count():
    with serving(num_continuous_decode_steps=4) as (engine, runner):
        recorder = Recorder()
        runner.on_read = once(lambda plan: isinstance(plan, DecodePlan) and plan.rows[0].position == 14)
        request_id = engine.submit(prompt_of(10), LONG, recorder)
        recorder.wait()
        assert recorder.reason(request_id) == "error"
        assert recorder.tokens(request_id) == alone(engine, prompt_of(10), LONG)[: 1 + 4]
        [row] = runner.plans[-1].rows
        assert isinstance(row, DecodeRow) and row.position == 18, "was launched, and read only to be dropped"


def test_a_row_that_the_device_cannot_take_fails_alone():
    with serving() as (engine, runner):
        recorder = Recorder()

        def refuse_b(plan):
            bad = [row.request for row in plan.rows if row.request.request_id == "b"]
            if bad:
                raise NotLaunchedError("planted", bad)

        submit_together(engine, runner, recorder, [(name, 70, LONG) for name in "abc"], refuse_b)
        recorder.wait(3)
        expected = alone(engine, prompt_of(70), LONG)
        assert recorder.reason("b") == "error"
        assert recorder.tokens("a") == recorder.tokens("c") == expected
        assert runner.recoveries == 0


class Limited:
    """A matcher that goes beyond a limit with the first token."""

    ready, is_complete = True, False

    def accept(self, token):
        raise GrammarError("too many items")


@pytest.mark.parametrize("where", ["mask", "token"])
def test_a_grammar_beyond_a_limit_ends_its_request_alone_with_a_line_in_the_log(where, caplog):
    caplog.set_level(logging.WARNING, logger="hybridjax.serving")
    with serving() as (engine, runner):
        recorder = Recorder()

        def limit_b(plan):
            bad = [row.request for row in plan.rows if row.request.request_id == "b"]
            if bad and where == "mask":
                raise NotLaunchedError("too many items", bad) from GrammarError("too many items")
            for request in bad:
                request.matcher = Limited()

        submit_together(engine, runner, recorder, [(name, 70, LONG) for name in "abc"], limit_b)
        recorder.wait(3)
        last = recorder.events["b"][-1]
        assert (last.finish_reason, last.error, last.is_requests_fault) == ("error", "too many items", True)
        assert recorder.tokens("a") == recorder.tokens("c") == alone(engine, prompt_of(70), LONG)
    [record] = [record for record in caplog.records if "too many items" in record.getMessage()]
    assert record.levelno == logging.WARNING and record.exc_info is None


@pytest.mark.parametrize("recovery", ["refuses", "raises"])
@pytest.mark.parametrize("where", ["on_launch", "on_read"])
def test_an_engine_that_cannot_recover_fails_everything(where, recovery):
    runner = FakeRunner(recoverable=False)
    if recovery == "raises":
        runner.recover = lambda: break_down(None)  # type: ignore[method-assign,assignment]
    engine = engine_of(runner, max_running_requests=2)
    recorder = Recorder()
    at_decode = once(lambda plan: isinstance(plan, DecodePlan))
    runner.on_read = at_decode if where == "on_read" else runner.on_read
    requests = [(name, 70, LONG) for name in "abcd"]
    submit_together(engine, runner, recorder, requests, at_decode if where == "on_launch" else None)
    recorder.wait(4)
    assert {recorder.reason(name) for name in "abcd"} == {"error"}
    assert all(recorder.events[name][-1].error for name in "abcd")
    engine._loop._thread.join()
    assert not engine.is_healthy
    with pytest.raises(EngineDeadError, match="failed"):
        engine.submit([1], GREEDY, recorder)
    assert runner.closed == 1
    engine.check_integrity()
    engine.shutdown()
    assert runner.closed == 1
    assert runner.violations == []


def test_a_detokenizer_that_raises_fails_only_its_request():
    class Bad:
        def push(self, ids, /):
            raise ValueError("planted")

        def flush(self):
            return ""

    with serving(tokenizer=FakeTokenizer()) as (engine, _):
        recorder = Recorder()
        entry = entry_with(engine, recorder, Bad())
        engine._loop.add([entry])
        engine.submit([1, 2], LONG, recorder, request_id="good")
        recorder.wait(2)
        assert recorder.reason("bad") == "error"
        assert recorder.events["bad"][-1].error == "internal error"
        assert recorder.tokens("good") == alone(engine, [1, 2], LONG)


def test_numbers_that_are_not_finite_fail_only_their_request():
    with serving() as (engine, runner):
        read = runner.read

        def poisoned(handle):
            result = read(handle)
            logprobs = result.logprobs.copy()
            for column, row in enumerate(runner.plans[handle].rows):
                if row.request.request_id == "bad":
                    logprobs[-1, column] = np.nan
            return StepResult(result.tokens, logprobs)

        runner.read = poisoned  # type: ignore[method-assign]
        recorder = Recorder()
        for name in ("bad", "good"):
            engine.submit([1, 2], LONG, recorder, request_id=name)
        recorder.wait(2)
        assert recorder.reason("bad") == "error"
        assert "finite" in (recorder.events["bad"][-1].error or "")
        assert recorder.tokens("good") == alone(engine, [1, 2], LONG)
        assert runner.recoveries == 0


def test_a_callback_that_raises_disturbs_nobody():
    with serving() as (engine, _):
        recorder = Recorder()

        def bad(event):
            recorder(event)
            raise ValueError("planted")

        for name, on_output in (("bad", bad), ("good", recorder)):
            engine.submit([1, 2], LONG, on_output, request_id=name)
        recorder.wait(2)
        for name in ("bad", "good"):
            assert recorder.tokens(name) == alone(engine, [1, 2], LONG)


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, asyncio.CancelledError])
def test_a_callback_cannot_end_the_engine(kind):
    with serving() as (engine, _):
        recorder = Recorder()

        def bad(event):
            recorder(event)
            raise kind()

        for name, on_output in (("bad", bad), ("worse", bad), ("good", recorder)):
            engine.submit([1, 2], LONG, on_output, request_id=name)
        recorder.wait(3)
        for name in ("bad", "worse", "good"):
            assert recorder.tokens(name) == alone(engine, [1, 2], LONG)
        assert engine.is_healthy


def test_an_end_that_fails_keeps_nobody_elses_from_coming():
    """The last events of all, when the engine is closed, while whatever ends two of them raises."""
    with serving() as (engine, runner):
        recorder, entered, release = Recorder(), threading.Event(), threading.Event()
        runner.on_launch = lambda plan: (entered.set(), release.wait(30))
        for name in "abcd":
            engine.submit([1, 2], LONG, recorder, request_id=name)
        assert entered.wait(30)
        loop = engine._loop
        for name in "ab":
            processor = loop._live.named(name).processor

            def end(*args):
                raise SystemExit

            processor.end = end
        threading.Timer(0.2, release.set).start()  # when the engine has been told to stop
    recorder.wait(2)
    assert [recorder.reason(name) for name in "cd"] == ["abort", "abort"]
    assert runner.closed == 1


def test_any_number_of_rows_may_fail_one_by_one():
    """Each failed launch names one request: with recursion, some hundreds of them end the engine."""
    rows = sys.getrecursionlimit() + 50
    size = {"num_pages": rows + 10, "num_slots": rows + 1, "max_decode_rows": rows, "max_prefill_tiles": rows}
    runner, failing = FakeRunner(**size, max_decode_steps=1), []

    def refuse_first(plan):
        if failing or (isinstance(plan, DecodePlan) and len(plan.rows) == rows):
            failing.append(plan.rows[0].request)
            raise NotLaunchedError("planted", [plan.rows[0].request])

    runner.on_launch = refuse_first
    with serving(runner, max_running_requests=rows, max_queued_requests=rows) as (engine, _):
        recorder = Recorder()
        params = SamplingParams(max_tokens=50, ignore_eos=True)
        for i in range(rows):
            engine.submit([1, 2, 3], params, recorder, request_id=str(i))
        recorder.wait(rows)
        assert {recorder.reason(str(i)) for i in range(rows)} == {"error"}
        assert len(failing) == rows
        runner.on_launch = lambda plan: None
        assert engine.generate([[1, 2]], LONG)[0].token_ids == tuple(alone(engine, [1, 2], LONG))


def test_a_fault_of_a_request_that_is_not_in_the_step_fails_the_step_once():
    with serving() as (engine, runner):
        recorder, elsewhere = Recorder(), object()

        def blame(plan):
            raise NotLaunchedError("planted", [elsewhere])

        runner.on_launch = blame
        engine.submit([1, 2], LONG, recorder, request_id="a")
        recorder.wait(1)
        assert recorder.reason("a") == "error"


def test_malformed_results_fail_their_requests_but_not_the_engine():
    with serving() as (engine, runner):
        read = runner.read
        broken = [True]

        def short(handle):
            result = read(handle)
            if broken.pop() if broken else False:
                return StepResult(result.tokens[:, :0], result.logprobs[:, :0])
            return result

        runner.read = short  # type: ignore[method-assign]
        recorder = Recorder()
        engine.submit([1, 2], LONG, recorder, request_id="bad")
        recorder.wait()
        assert recorder.reason("bad") == "error"
        assert list(engine.generate([[1, 2]], LONG)[0].token_ids) == alone(engine, [1, 2], LONG)


def leak_everything(scheduler):
    scheduler.memory.pages.allocate(scheduler.memory.pages.available)


def leak_a_slot(scheduler):
    scheduler.memory.slots.allocate()


def free_twice(scheduler):
    scheduler.memory.pages._free.append(scheduler.memory.pages._free[0])


@pytest.mark.parametrize("corrupt", [leak_everything, leak_a_slot, free_twice])
def test_pools_that_contradict_themselves_are_replaced(corrupt):
    """Planted while a request runs; noticed at the latest when the engine is idle."""
    with serving() as (engine, runner):
        scheduler = engine._loop._scheduler
        runner.on_launch = once(lambda plan: isinstance(plan, DecodePlan), lambda plan: corrupt(scheduler))
        first = engine.generate([prompt_of(70)], GREEDY)[0]
        assert list(first.token_ids) == alone(engine, prompt_of(70), GREEDY)
        engine.check_integrity()
        second = engine.generate([prompt_of(70)] * 9, GREEDY)
        assert all(result.token_ids == first.token_ids for result in second)
        engine.flush_cache()
        assert scheduler.memory.pages.available == 39


def test_a_request_whose_pages_were_freed_under_it_ends_and_serving_goes_on():
    with serving(disable_radix_cache=True) as (engine, runner):
        scheduler = engine._loop._scheduler

        def free_pages(plan):
            scheduler.memory.pages.release(plan.rows[0].request.pages)

        runner.on_launch = once(lambda plan: isinstance(plan, DecodePlan), free_pages)
        first = engine.generate([prompt_of(70)], GREEDY)[0]
        assert first.finish_reason == "length"
        assert list(engine.generate([prompt_of(70)], GREEDY)[0].token_ids) == list(first.token_ids)


def test_a_preemption_that_fails_ends_those_who_hold_memory_and_serving_goes_on():
    runner = FakeRunner(num_pages=8, context_length=448)
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    with serving(runner, max_running_requests=3) as (engine, _):
        recorder, scheduler = Recorder(), engine._loop._scheduler
        preempt, preempted = scheduler.preempt, []

        def failing(request):
            if not preempted:
                preempted.append(request.request_id)
                scheduler.memory.pages.release(request.pages)  # so that they cannot be given back
            preempt(request)

        scheduler.preempt = failing
        submit_together(engine, runner, recorder, [(name, 60, params) for name in "abcde"])
        recorder.wait(5)
        assert len(preempted) == 1
        # Whoever was being preempted holds nothing any more and waits, with the tokens it had.
        ended = [name for name in "abcde" if recorder.reason(name) == "error"]
        assert ended == [name for name in "abc" if name not in preempted]
        expected = alone(engine, prompt_of(60), params)
        for name in "abcde":
            tokens = recorder.tokens(name)
            assert tokens == (expected[: len(tokens)] if name in ended else expected)
        assert engine.is_healthy


def fail_to_plan():
    raise KeyError("planted")


def plan_nothing():
    return None


@pytest.mark.parametrize("next_plan", [fail_to_plan, plan_nothing])
def test_planning_that_always_fails_ends_every_request_but_not_the_engine(next_plan):
    with serving(max_running_requests=2) as (engine, runner):
        recorder, scheduler = Recorder(), engine._loop._scheduler
        works = scheduler.next_plan
        break_planning = once(
            lambda plan: isinstance(plan, DecodePlan),
            lambda plan: setattr(scheduler, "next_plan", next_plan),
        )
        submit_together(engine, runner, recorder, [(name, 10, LONG) for name in "abcd"], break_planning)
        recorder.wait(4)
        assert {recorder.reason(name) for name in "abcd"} == {"error"}
        engine.submit([1, 2], LONG, recorder, request_id="late")
        recorder.wait()
        assert recorder.reason("late") == "error"
        engine.check_integrity()
        scheduler.next_plan = works
        assert list(engine.generate([[1, 2]], LONG)[0].token_ids) == alone(engine, [1, 2], LONG)


def test_a_request_that_was_half_admitted_gives_everything_back():
    with serving() as (engine, runner):
        recorder, scheduler = Recorder(), engine._loop._scheduler
        take, failures = scheduler._waiting.take, []

        def failing(request):
            if request.request_id == "b" and not failures:
                failures.append(request)
                assert request.slot and request.pages
                raise KeyError("planted")
            take(request)

        scheduler._waiting.take = failing
        submit_together(engine, runner, recorder, [(name, 70, LONG) for name in "abc"])
        recorder.wait(3)
        assert [recorder.reason(name) for name in "abc"] == ["error", "error", "length"]
        assert recorder.tokens("c") == alone(engine, prompt_of(70), LONG)
        engine.check_integrity()


def test_a_request_that_cannot_be_queued_fails_alone():
    with serving() as (engine, _):
        recorder, scheduler = Recorder(), engine._loop._scheduler
        add = scheduler.add

        def failing(request):
            if request.request_id == "bad":
                raise KeyError("planted")
            add(request)

        scheduler.add = failing
        for name in ("bad", "good"):
            engine.submit([1, 2], LONG, recorder, request_id=name)
        recorder.wait(2)
        assert recorder.reason("bad") == "error"
        assert recorder.tokens("good") == alone(engine, [1, 2], LONG)


def test_a_detokenizer_that_fails_when_a_request_is_aborted_fails_only_this():
    class Bad:
        def push(self, ids, /):
            return ""

        def flush(self):
            raise ValueError("planted")

    with serving(tokenizer=FakeTokenizer()) as (engine, runner):
        recorder = Recorder()
        entry = entry_with(engine, recorder, Bad())
        runner.on_launch = once(lambda plan: isinstance(plan, DecodePlan), lambda plan: engine.abort("bad"))
        engine._loop.add([entry])
        engine.submit([1, 2], LONG, recorder, request_id="good")
        recorder.wait(2)
        assert recorder.reason("bad") == "error"
        assert recorder.events["bad"][-1].error == "internal error"
        assert recorder.tokens("good") == alone(engine, [1, 2], LONG)


def test_a_runner_that_cannot_close_does_not_keep_shutdown_from_returning():
    runner = FakeRunner()
    runner.close = lambda: break_down(None)  # type: ignore[method-assign,assignment]
    engine = engine_of(runner)
    engine.shutdown()
    assert not engine.is_healthy
