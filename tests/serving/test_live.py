"""Who gives a request its last event, and who may touch the scheduler, when several threads could."""

import threading

import pytest
from serving_fakes import FakeRunner, Recorder, alone, engine_of, prompt_of, serving

from hybridjax.errors import EngineDeadError
from hybridjax.serving.api import SamplingParams
from hybridjax.serving.live import Calls

LONG = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
PATIENCE = 60


class Hold:
    """A function that blocks its first caller until it is released."""

    def __init__(self):
        self.entered, self.release = threading.Event(), threading.Event()

    def __call__(self, *_) -> None:
        self.entered.set()
        assert self.release.wait(PATIENCE)


def in_thread(call):
    """Runs ``call`` in a thread; returns it and the list that gets what it raises, or None."""
    ends: list[BaseException | None] = []

    def run():
        try:
            call()
        except BaseException as error:
            ends.append(error)
        else:
            ends.append(None)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, ends


class OneAtATime(Recorder):
    """Notices callbacks that overlap or come after the last event; blocks within one."""

    def __init__(self, hold_at):
        super().__init__()
        self.hold, self.hold_at = Hold(), hold_at
        self.inside, self.problems, self.threads = 0, [], []

    def __call__(self, event):
        before = self.events[event.request_id]
        if self.inside or (before and before[-1].finish_reason):
            self.problems.append(event)
        self.inside += 1
        self.threads.append(threading.current_thread().name)
        if self.hold_at(event) and not self.hold.release.is_set():
            self.hold()
        self.inside -= 1
        super().__call__(event)


@pytest.mark.parametrize("at", ["first", "last"])
def test_a_request_in_whose_callback_the_engine_is_gets_its_last_event_from_there(at):
    engine = engine_of(FakeRunner())
    recorder = OneAtATime(lambda event: (event.finish_reason is not None) == (at == "last"))
    engine.submit(prompt_of(10), LONG, recorder, request_id="a")
    assert recorder.hold.entered.wait(PATIENCE)
    other = Recorder()
    engine.submit(prompt_of(10), LONG, other, request_id="b")
    engine.give_up("planted")
    other.wait()
    assert other.reason("b") == "error", "told at once"
    assert not recorder.problems
    recorder.hold.release.set()
    recorder.wait()
    engine._loop._thread.join(PATIENCE)
    assert not recorder.problems
    assert set(recorder.threads) == {"hybridjax-engine"}
    if at == "first":
        assert (recorder.reason("a"), recorder.events["a"][-1].error) == ("error", "planted")
    else:
        assert recorder.reason("a") == "length"
    engine.shutdown()


def test_the_scheduler_is_the_thread_s_own_until_it_has_ended():
    runner, hold = FakeRunner(), Hold()
    engine = engine_of(runner)
    runner.close = hold  # the thread's last act
    scheduler, thread = engine._loop._scheduler, engine._loop._thread
    check, alive = scheduler.check_integrity, []
    closing, _ = in_thread(engine.shutdown)
    assert hold.entered.wait(PATIENCE)
    assert not engine.is_healthy

    def watched():
        alive.append(thread.is_alive())
        check()

    scheduler.check_integrity = watched
    outside, ends = in_thread(engine.check_integrity)
    outside.join(0.1)  # time enough to go wrong
    hold.release.set()
    for one in (outside, closing):
        one.join(PATIENCE)
    assert (alive, ends) == ([False], [None])


def test_calls_after_the_end_do_not_overlap():
    engine = engine_of(FakeRunner())
    engine.shutdown()
    scheduler, hold, inside = engine._loop._scheduler, Hold(), []
    scheduler.check_integrity = hold
    scheduler.flush_cache = lambda: inside.append(hold.release.is_set())
    first, _ = in_thread(engine.check_integrity)
    assert hold.entered.wait(PATIENCE)
    second, _ = in_thread(engine.flush_cache)
    second.join(0.1)
    hold.release.set()
    for one in (first, second):
        one.join(PATIENCE)
    assert inside == [True]


def test_a_call_that_hangs_is_answered_when_the_engine_is_given_up():
    engine, hold = engine_of(FakeRunner()), Hold()
    engine._loop._scheduler.flush_cache = hold
    callers = [in_thread(engine.flush_cache) for _ in range(2)]
    assert hold.entered.wait(PATIENCE)
    engine.give_up("planted")
    for thread, ends in callers:
        thread.join(PATIENCE)
        assert [str(error) for error in ends] == ["planted"]
        assert isinstance(ends[0], EngineDeadError)
    hold.release.set()
    engine._loop._thread.join(PATIENCE)
    assert not engine._loop._thread.is_alive()


def test_every_call_is_answered_although_the_pools_cannot_be_flushed_at_the_end():
    runner = FakeRunner()
    engine, hold = engine_of(runner), Hold()
    runner.on_launch = hold
    recorder = Recorder()
    engine.submit(prompt_of(10), LONG, recorder, request_id="a")
    assert hold.entered.wait(PATIENCE)
    scheduler = engine._loop._scheduler

    def broken():
        raise KeyError("planted")

    scheduler.flush_cache = broken
    waiting, ends = in_thread(engine.flush_cache)
    while not engine._loop._calls:
        pass
    closing, _ = in_thread(engine.shutdown)
    while engine.is_healthy:
        pass
    hold.release.set()
    for one in (waiting, closing):
        one.join(PATIENCE)
    recorder.wait()
    assert recorder.reason("a") == "abort"
    assert [str(error) for error in ends] == ["'planted'"]
    assert runner.closed == 1


def test_a_callback_may_call_between_steps():
    with serving() as (engine, _):
        recorder = Recorder()

        def on_output(event):
            engine.check_integrity()
            engine.flush_cache()
            recorder(event)

        engine.submit(prompt_of(70), LONG, on_output, request_id="a")
        recorder.wait()
        assert recorder.tokens("a") == alone(engine, prompt_of(70), LONG)


def test_a_call_may_queue_another_which_waits_its_turn():
    calls, made = Calls(threading.Condition()), []
    calls.add(lambda: (made.append("first"), calls.add(lambda: made.append("second")), None)[-1])
    calls.run()
    assert made == ["first"] and calls
    calls.run()
    assert made == ["first", "second"] and not calls
