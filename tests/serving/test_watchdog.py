"""An engine that hangs is given up: every request ends, and nothing waits for the hung thread."""

import asyncio
import logging
import threading
import time

import httpx
import pytest
from serving_fakes import FakeRunner, Recorder, engine_of, prompt_of

from hybridjax.configs.serving import ServerConfig
from hybridjax.errors import EngineDeadError
from hybridjax.serving.api import SamplingParams
from hybridjax.serving.compiling import Programs
from hybridjax.serving.http.app import create_app
from hybridjax.serving.runner import ModelRunner
from hybridjax.serving.watchdog import Watchdog, stacks

LONG = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
PATIENCE = 60


class Hung:
    """A hook that blocks its first caller until it is released."""

    def __init__(self):
        self.entered, self.release = threading.Event(), threading.Event()

    def __call__(self, plan) -> None:
        self.entered.set()
        assert self.release.wait(PATIENCE)


@pytest.fixture(params=["on_launch", "on_read"])
def hung(request):
    """An engine whose device does not come back from a launch or a read, and what holds it."""
    runner, hold = FakeRunner(), Hung()
    engine = engine_of(runner)
    setattr(runner, request.param, hold)
    yield engine, hold
    hold.release.set()
    engine._loop._thread.join(PATIENCE)
    assert not engine._loop._thread.is_alive()
    engine.shutdown()


def watch(engine, timeout: float = 0.2) -> threading.Event:
    barked = threading.Event()
    Watchdog(engine, timeout, barked.set).start()
    return barked


def test_a_hung_device_ends_every_request(hung, caplog):
    engine, hold = hung
    recorder = Recorder()
    with caplog.at_level(logging.CRITICAL):
        engine.submit(prompt_of(30), LONG, recorder, request_id="a")
        assert hold.entered.wait(PATIENCE)
        engine.submit(prompt_of(30), LONG, recorder, request_id="b")
        flush = threading.Thread(target=lambda: pytest.raises(EngineDeadError, engine.flush_cache))
        flush.start()
        assert watch(engine).wait(PATIENCE)
        recorder.wait(2)
        flush.join(PATIENCE)
    for name in "ab":
        assert recorder.reason(name) == "error"
        assert recorder.events[name][-1].error == "the engine has made no progress for 0.2 seconds"
    assert not engine.is_healthy
    with pytest.raises(EngineDeadError):
        engine.submit(prompt_of(3), LONG, recorder)
    with pytest.raises(EngineDeadError):
        engine.check_integrity()
    # The log says where it hangs.
    assert "hybridjax-engine" in caplog.text and "self._runner." in caplog.text
    # Neither waits for the thread that hangs.
    engine.abort("a")
    engine.shutdown()


def test_a_device_that_comes_back_after_all_says_nothing_more(hung):
    engine, hold = hung
    recorder = Recorder()
    engine.submit(prompt_of(30), LONG, recorder, request_id="a")
    assert hold.entered.wait(PATIENCE)
    engine.give_up("planted")
    count = len(recorder.events["a"])
    hold.release.set()
    engine._loop._thread.join(PATIENCE)
    assert len(recorder.events["a"]) == count
    engine.give_up("again")
    assert recorder.reason("a") == "error"


def test_health_generate_notices_at_once_and_health_with_the_watchdog(hung):
    engine, hold = hung
    app = create_app(engine, None, ServerConfig(health_check_timeout=0.2))

    async def ask(path: str) -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.get(path)

    async def both() -> list[int]:
        return [(await ask(path)).status_code for path in ("/health", "/health_generate")]

    assert asyncio.run(both()) == [200, 503]
    assert hold.entered.is_set()
    engine.give_up("planted")
    assert asyncio.run(both()) == [503, 503]


class Pulse:
    """Beats as told; counts how often it was given up."""

    def __init__(self, *pulses: int | None):
        self._pulses = list(pulses)
        self.looks = 0
        self.given_up: list[str] = []
        self.looked = threading.Semaphore(0)

    @property
    def pulse(self) -> int | None:
        now = self._pulses[min(self.looks, len(self._pulses) - 1)]
        self.looks += 1
        self.looked.release()
        return now

    def give_up(self, why: str) -> None:
        self.given_up.append(why)
        raise RuntimeError("planted: telling a request has failed")


def test_only_an_unchanged_pulse_is_a_hang():
    # 20 looks per timeout: a hang is 20 looks in a row that show the same number as the one before.
    lively = [i // 19 for i in range(100)]
    waiting = [7] * 15 + [None] * 30 + [7] * 15
    patient = Pulse(*lively, *waiting, None)
    dog = Watchdog(patient, 0.02)
    dog.start()
    for _ in range(len(lively) + len(waiting) + 5):
        assert patient.looked.acquire(timeout=PATIENCE)
    dog.stop()
    dog.stop()
    assert patient.given_up == []
    stuck = Pulse(1, 2, 3)
    barked = threading.Event()
    Watchdog(stuck, 0.02, barked.set).start()
    assert barked.wait(PATIENCE)
    assert stuck.given_up == ["the engine has made no progress for 0.02 seconds"]
    assert stuck.looks == 2 + 1 + 20


def test_an_idle_a_compiling_and_a_stopped_engine_have_no_pulse():
    runner, recorder = FakeRunner(), Recorder()
    engine = engine_of(runner)
    seen = []

    def compile_late(plan) -> None:
        runner.is_compiling = True  # pyright: ignore[reportAttributeAccessIssue]
        seen.append(engine.pulse)
        runner.is_compiling = False  # pyright: ignore[reportAttributeAccessIssue]
        seen.append(engine.pulse)

    runner.on_launch = compile_late
    engine.submit(prompt_of(5), SamplingParams(max_tokens=1), recorder)
    recorder.wait()
    assert seen[0] is None and isinstance(seen[1], int)
    deadline = time.monotonic() + PATIENCE
    while engine.pulse is not None:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    engine.shutdown()
    assert engine.pulse is None


def test_the_stacks_name_every_thread():
    hold = Hung()
    thread = threading.Thread(target=hold, args=(None,), name="somebody")
    thread.start()
    assert hold.entered.wait(PATIENCE)
    shown = stacks()
    hold.release.set()
    thread.join()
    assert "Thread 'somebody':" in shown and "in __call__" in shown
    assert "Thread 'MainThread':" in shown


def test_the_runner_says_when_it_compiles_late():
    runner = object.__new__(ModelRunner)
    runner._programs = Programs()
    seen = []

    def compile():
        seen.append(runner.is_compiling)
        if len(seen) == 1:
            raise RuntimeError("planted")
        return "program"

    with pytest.raises(RuntimeError, match="planted"):
        runner._programs.late("bucket", compile)
    assert not runner.is_compiling
    for _ in range(2):
        assert runner._programs.late("bucket", compile) == "program"
        assert not runner.is_compiling
    assert seen == [True, True]
