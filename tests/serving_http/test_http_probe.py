import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest
from http_fakes import PATIENCE, FakeEngine

from hybridjax.errors import EngineDeadError, QueueFullError
from hybridjax.serving.api import SamplingParams
from hybridjax.serving.http.errors import DrainingError
from hybridjax.serving.http.generation import Front, Lifecycle
from hybridjax.serving.http.probe import HealthProbe
from hybridjax.serving.http.telemetry import Telemetry

URL = "/health_generate"


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def with_probe(
    engine: FakeEngine,
    body: Callable[[HealthProbe, Front, Clock], Awaitable[None]],
    timeout: float = PATIENCE,
) -> None:
    async def run() -> None:
        clock = Clock()
        front = Front(
            engine=engine,
            lifecycle=Lifecycle(),
            telemetry=Telemetry(clock),
            model="fake",
            max_completions=8,
            sampling_defaults={},
        )
        await body(HealthProbe(front, timeout, clock), front, clock)

    asyncio.run(run())


def test_a_healthy_engine_generates_one_token(http: httpx.Client, engine: FakeEngine):
    assert http.get(URL).json() == {"status": "ok"}
    [(prompt, params)] = engine.submitted.values()
    assert prompt == [0]
    assert params == SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)


def test_an_engine_that_generates_nothing_is_told_and_left_nothing(serve: Any, engine: FakeEngine):
    engine.allow(0)
    server = serve(health_check_timeout=0.5)
    reply = httpx.get(server.url + URL, timeout=PATIENCE)
    assert reply.status_code == 503
    assert reply.json()["error"]["message"] == "the engine has generated nothing for 0.5 seconds"
    engine.wait_until(lambda: not engine.live)
    assert set(engine.aborts.values()) == {1}


def test_an_engine_that_is_known_to_be_dead_is_not_asked(http: httpx.Client, engine: FakeEngine):
    engine.is_healthy = False
    assert http.get(URL).status_code == 503
    assert engine.submitted == {}


def test_a_draining_server_is_not_healthy(engine: FakeEngine):
    async def body(probe: HealthProbe, front: Front, clock: Clock) -> None:
        front.lifecycle.draining = True
        with pytest.raises(DrainingError):
            await probe.check()

    with_probe(engine, body)


def test_a_result_is_used_for_a_second(engine: FakeEngine):
    async def body(probe: HealthProbe, front: Front, clock: Clock) -> None:
        await probe.check()
        clock.now += 0.99
        await probe.check()
        assert len(engine.submitted) == 1
        clock.now += 0.02
        await probe.check()
        assert len(engine.submitted) == 2

    with_probe(engine, body)


def test_a_failure_is_used_for_a_second_too(engine: FakeEngine):
    async def body(probe: HealthProbe, front: Front, clock: Clock) -> None:
        engine.submit_error = QueueFullError("full")
        for _ in range(2):
            with pytest.raises(EngineDeadError):
                await probe.check()
        engine.submit_error = None
        with pytest.raises(EngineDeadError):
            await probe.check()
        clock.now += 1
        await probe.check()

    with_probe(engine, body)


def test_one_probe_serves_all_who_ask_meanwhile(engine: FakeEngine):
    async def body(probe: HealthProbe, front: Front, clock: Clock) -> None:
        engine.allow(0)
        asking = [asyncio.create_task(probe.check()) for _ in range(20)]
        await asyncio.to_thread(engine.wait_until, lambda: bool(engine.live))
        asking[0].cancel()
        clock.now += 50
        asking.append(asyncio.create_task(probe.check()))
        engine.allow(None)
        results = await asyncio.gather(*asking, return_exceptions=True)
        assert isinstance(results[0], asyncio.CancelledError)
        assert results[1:] == [None] * 20
        assert len(engine.submitted) == 1

    with_probe(engine, body)


def test_recent_tokens_are_proof_enough(engine: FakeEngine):
    async def body(probe: HealthProbe, front: Front, clock: Clock) -> None:
        front.telemetry._last_token = clock.now - 0.5
        await probe.check()
        assert engine.submitted == {}
        clock.now += 1
        await probe.check()
        assert len(engine.submitted) == 1

    with_probe(engine, body)


def test_behind_a_queue_the_tokens_of_others_count(engine: FakeEngine):
    async def body(probe: HealthProbe, front: Front, clock: Clock) -> None:
        engine.allow(0)
        asking = asyncio.create_task(probe.check())
        await asyncio.to_thread(engine.wait_until, lambda: bool(engine.live))
        front.telemetry._last_token = clock.now
        await asking
        clock.now += 1
        with pytest.raises(EngineDeadError, match="nothing for 0.2 seconds"):
            await probe.check()
        assert len(engine.submitted) == 2

    with_probe(engine, body, timeout=0.2)


def test_probes_are_not_counted_as_requests(serve: Any, engine: FakeEngine):
    server = serve(enable_metrics=True)
    before = httpx.get(server.url + "/metrics").text
    assert httpx.get(server.url + URL).status_code == 200
    assert httpx.get(server.url + "/metrics").text == before
