"""What the engine's events add up to: token counts and latencies. No I/O, no metrics library."""

import bisect
import collections
import dataclasses
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence

from hybridjax.serving.api import RequestOutput

# SGLang's buckets, with finer ones at the low end.
FIRST_TOKEN_BUCKETS = (
    0.01,
    0.02,
    0.05,
    0.1,
    0.2,
    0.4,
    0.6,
    0.8,
    1,
    2,
    4,
    6,
    8,
    10,
    20,
    40,
    60,
    100,
    200,
    400,
)
BETWEEN_TOKENS_BUCKETS = (
    *(0.002, 0.004, 0.006, 0.008, 0.010, 0.015, 0.020, 0.025, 0.030, 0.035, 0.040),
    *(0.060, 0.080, 0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8),
)
QUEUE_BUCKETS = (
    *(0.001, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 4, 6, 8, 10, 20, 40, 60),
    *(100, 200, 400, 600, 1200),
)
REQUEST_BUCKETS = (0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8, 10, 20, 40, 60, 100, 200, 400, 600, 1200, 2400)

RATE_SECONDS = 5
# What "lately" means for the hit rate and the median: so many prompts.
RECENT = 128
_FAR_PAST = float("-inf")


class Histogram:
    """How often values fell into which bucket.

    Attributes:
      bounds: upper bounds of the buckets, themselves included; one more bucket takes what is above.
      counts: per bucket.
      total: sum of the values.
    """

    def __init__(self, bounds: Sequence[float]):
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float, times: int = 1) -> None:
        self.counts[bisect.bisect_left(self.bounds, value)] += times
        self.total += value * times


@dataclasses.dataclass
class Timing:
    """When things happened to one completion, on the telemetry's clock.

    Attributes:
      first_token: seconds from submission to the first token.
      queued: whether its time in the queue has been counted.
    """

    submitted: float
    first_token: float | None = None
    last_token: float | None = None
    queued: bool = False


class Telemetry:
    """Adds up events; ``record`` is called for each, from the engine's thread, and is cheap.

    Attributes:
      finished: completions by finish reason.
      prompt_tokens, cached_tokens: of prompts whose first token has come.
      first_token, between_tokens, request, queue: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self.clock = clock
        self.finished: Counter[str] = Counter()
        self.prompt_tokens = self.cached_tokens = self.generated_tokens = 0
        self.first_token = Histogram(FIRST_TOKEN_BUCKETS)
        self.between_tokens = Histogram(BETWEEN_TOKENS_BUCKETS)
        self.request = Histogram(REQUEST_BUCKETS)
        self.queue = Histogram(QUEUE_BUCKETS)
        # Of the last prompts whose first token has come.
        self._recent: collections.deque[tuple[int, int, float]] = collections.deque(maxlen=RECENT)
        self._last_token = _FAR_PAST
        # Tokens per whole second, the newest RATE_SECONDS + 1 of them.
        self._by_second: dict[int, int] = {}
        self._lock = threading.Lock()

    def start(self) -> Timing:
        return Timing(self.clock())

    def record(self, timing: Timing, output: RequestOutput) -> None:
        now = self.clock()
        with self._lock:
            if output.queue_seconds is not None and not timing.queued:
                timing.queued = True
                self.queue.add(output.queue_seconds)
            if output.token_ids:
                self._add_tokens(timing, output, now)
            if output.finish_reason is not None:
                self.finished[output.finish_reason] += 1
                self.request.add(now - timing.submitted)

    @property
    def seconds_since_token(self) -> float:
        return self.clock() - self._last_token

    def tokens_per_second(self) -> float:
        """The average over the last whole seconds."""
        second = int(self.clock())
        with self._lock:
            recent = (self._by_second.get(second - i, 0) for i in range(1, RATE_SECONDS + 1))
            return sum(recent) / RATE_SECONDS

    def cache_hit_rate(self) -> float:
        """Share of the tokens of the last prompts that came from the prefix cache."""
        with self._lock:
            prompt = sum(tokens for tokens, _, _ in self._recent)
            return sum(cached for _, cached, _ in self._recent) / prompt if prompt else 0.0

    def median_first_token(self) -> float | None:
        """Seconds to the first token, the median of the last ones; None before the first."""
        with self._lock:
            times = sorted(seconds for _, _, seconds in self._recent)
        return times[len(times) // 2] if times else None

    def _add_tokens(self, timing: Timing, output: RequestOutput, now: float) -> None:
        new = len(output.token_ids)
        if timing.last_token is None:
            timing.first_token = now - timing.submitted
            self.first_token.add(timing.first_token)
            self._recent.append((output.prompt_tokens, output.cached_tokens, timing.first_token))
            self.prompt_tokens += output.prompt_tokens
            self.cached_tokens += output.cached_tokens
        else:
            self.between_tokens.add((now - timing.last_token) / new, new)
        timing.last_token = self._last_token = now
        self.generated_tokens += new
        second = int(now)
        if second not in self._by_second:
            oldest = second - RATE_SECONDS
            self._by_second = {s: n for s, n in self._by_second.items() if s >= oldest} | {second: 0}
        self._by_second[second] += new
