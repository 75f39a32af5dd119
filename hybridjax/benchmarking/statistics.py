"""Percentiles, service level objectives and arrival times: plain arithmetic, no clocks."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from hybridjax.errors import ConfigError

Summary = dict[str, float]
PERCENTILES = (90.0, 95.0, 99.0)

_GOODPUT_NAMES = {"ttft": "ttft", "tpot": "tpot", "itl": "itl", "e2e": "e2e", "e2el": "e2e"}


def summarize(seconds: Sequence[float], percentiles: Sequence[float] = PERCENTILES) -> Summary | None:
    """Mean, deviation, median, percentiles and the largest value in milliseconds; None without values.

    Percentiles interpolate linearly between the two nearest values; p99.9 has the name "p99.9".
    """
    if not seconds:
        return None
    values = np.asarray(seconds, np.float64) * 1e3
    named = {"mean": values.mean(), "std": values.std(), "median": np.median(values)}
    named |= {f"p{q:g}": value for q, value in zip(percentiles, np.percentile(values, percentiles))}
    return {name: float(value) for name, value in named.items()} | {"max": float(values.max())}


def parse_percentiles(text: str) -> tuple[float, ...]:
    """``"90,99.9"`` to numbers, ascending; raises ConfigError for anything outside 0..100."""
    try:
        found = sorted({float(part) for part in text.split(",")})
    except ValueError:
        found = []
    if not found or not all(0 <= q <= 100 for q in found):
        raise ConfigError(f"metric_percentiles is {text!r}; it must be numbers in 0..100, such as 90,99")
    return tuple(found)


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, quartiles, extremes and count."""
    q1, median, q3 = np.percentile(np.asarray(values, np.float64), (25, 50, 75))
    return {
        "median": float(median),
        "q1": float(q1),
        "q3": float(q3),
        "min": float(min(values)),
        "max": float(max(values)),
        "n": len(values),
    }


@dataclasses.dataclass(frozen=True)
class Latencies:
    """What one request felt like, in seconds; None where it cannot be said.

    Attributes:
      ttft: from sending to the first token.
      tpot: from first to last token, divided by the tokens after the first.
      itl: gaps between tokens.
      e2e: from sending to the end.
    """

    ttft: float | None
    tpot: float | None
    itl: tuple[float, ...]
    e2e: float


def parse_goodput(pairs: Sequence[str]) -> dict[str, float]:
    """``["ttft:500", "e2e:2000"]`` to milliseconds by name.

    Raises:
      ConfigError: an unknown or repeated name, or no positive number.
    """
    limits: dict[str, float] = {}
    for pair in pairs:
        key, colon, text = pair.partition(":")
        name = _GOODPUT_NAMES.get(key.strip().lower())
        if name is None or not colon:
            raise ConfigError(
                f"goodput has {pair!r}; it must be KEY:MILLISECONDS with ttft, tpot, itl or e2e"
            )
        if name in limits:
            raise ConfigError(f"goodput names {name} twice")
        try:
            limits[name] = float(text)
        except ValueError:
            limits[name] = math.nan
        if not 0 < limits[name] < math.inf:
            raise ConfigError(f"goodput has {pair!r}; the limit must be a positive number of milliseconds")
    return limits


def meets(latencies: Latencies, limits: dict[str, float]) -> bool:
    """Whether a request kept every limit (milliseconds); itl bounds its longest gap.

    What a request does not have (one token has no gaps) cannot miss a limit.
    """
    values = {
        "ttft": latencies.ttft,
        "tpot": latencies.tpot,
        "itl": max(latencies.itl, default=None),
        "e2e": latencies.e2e,
    }
    return all(values[name] is None or values[name] * 1e3 <= limit for name, limit in limits.items())


def arrival_times(count: int, rate: float, seed: int) -> list[float]:
    """Seconds after the start at which requests are due: a Poisson process that begins at 0.

    Args:
      count: number of requests.
      rate: requests per second; infinite: all at once.
      seed: the same seed gives the same times.
    """
    if not rate > 0:
        raise ConfigError(f"request_rate is {rate}; it must be positive, or inf")
    if math.isinf(rate) or count == 0:
        return [0.0] * count
    # A stream of its own: the workload uses the plain seed, and gaps must not follow its lengths.
    gaps = np.random.default_rng([seed, 1]).exponential(1 / rate, count - 1)
    return [0.0, *np.cumsum(gaps).tolist()]
