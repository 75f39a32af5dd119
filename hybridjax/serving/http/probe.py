"""GET /health_generate: a health check that the device takes part in."""

import asyncio
import time
import uuid
from collections.abc import Callable

from starlette.concurrency import run_in_threadpool

from hybridjax.errors import EngineDeadError, HybridJaxError
from hybridjax.serving.api import SamplingParams
from hybridjax.serving.http.errors import DrainingError
from hybridjax.serving.http.generation import Front, Generation, Job

FRESH_SECONDS = 1.0
ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)


class HealthProbe:
    """Generates one token, unless that would tell nothing new. Used on the event loop only.

    At most one probe runs; who asks meanwhile gets its result, as does who asks within a second. A
    server that has produced tokens in the last second needs no probe.

    Args:
      front: the engine, and what it has done lately.
      timeout: seconds after which a probe has failed.
      clock: seconds.
    """

    def __init__(self, front: Front, timeout: float, clock: Callable[[], float] = time.monotonic):
        self._front = front
        self._timeout = timeout
        self._clock = clock
        self._probe: asyncio.Task[bool] | None = None
        self._ended = float("-inf")

    async def check(self) -> None:
        """Raises DrainingError or EngineDeadError unless the engine generates."""
        if self._front.lifecycle.draining:
            raise DrainingError("the server is shutting down")
        if not self._front.engine.is_healthy:
            raise EngineDeadError("the engine is not healthy")
        if self._front.telemetry.seconds_since_token < FRESH_SECONDS:
            return
        stale = self._clock() - self._ended >= FRESH_SECONDS
        if self._probe is None or (self._probe.done() and stale):
            self._probe = asyncio.create_task(self._generate())
        # Who gives up waiting does not end the probe for the others.
        if not await asyncio.shield(self._probe):
            raise EngineDeadError(f"the engine has generated nothing for {self._timeout:g} seconds")

    async def _generate(self) -> bool:
        # Its own telemetry: probes are nobody's requests.
        generation = Generation(self._front.engine, f"health-{uuid.uuid4().hex}", incremental=False)
        try:
            async with asyncio.timeout(self._timeout):
                await run_in_threadpool(generation.submit, [Job([0], ONE_TOKEN)])
                [(_, output)] = await generation.next()
            return bool(output.token_ids)
        except (TimeoutError, HybridJaxError):
            # Behind a long queue the probe gets no turn, but then others do.
            return self._front.telemetry.seconds_since_token < self._timeout
        finally:
            generation.close()
            self._ended = self._clock()
