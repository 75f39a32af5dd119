"""What every benchmark shares: the machine's own limits, statistics, and the closing JSON line."""

import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def environment() -> dict[str, Any]:
    """Device, versions and commit: what a number means nothing without."""
    import flax

    device = jax.devices()[0]
    return {
        "device": device.device_kind,
        "platform": device.platform,
        "host": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "flax": flax.__version__,
        "commit": os.environ.get("COMMIT") or _commit(),
    }


def _commit() -> str:
    """Short hash, with a + where files differ from it; a copy without history names it in $COMMIT."""
    return _git("rev-parse", "--short", "HEAD") + ("+" if _git("status", "--porcelain") else "")


def _git(*arguments: str) -> str:
    try:
        return subprocess.run(["git", *arguments], capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def times(run: Callable[[], Any], repeats: int, warmup: int = 2) -> dict[str, float]:
    """Wall seconds of ``run``, which must wait for its own result: median and quartiles."""
    for _ in range(warmup):
        run()
    samples = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        samples.append(time.perf_counter() - start)
    return spread(samples)


def spread(samples: list[float]) -> dict[str, float]:
    """Median, quartiles and count."""
    if len(samples) < 2:
        return {"median": samples[0], "q1": samples[0], "q3": samples[0], "n": 1}
    q1, median, q3 = statistics.quantiles(samples, n=4)
    return {"median": median, "q1": q1, "q3": q3, "n": len(samples)}


def copy_bandwidth(elements: int) -> float:
    """Bytes per second read plus written by a large on-device copy (x + 1 over float32)."""
    x = jnp.ones((elements,), jnp.float32)
    add = jax.jit(lambda x: x + 1)
    median = times(lambda: add(x).block_until_ready(), repeats=10)["median"]
    return 2 * x.nbytes / median


def matmul_rate(size: int, dtype: Any) -> float:
    """Floating-point operations per second of a square matrix product on random data."""
    key = jax.random.key(0)
    a = jax.random.normal(key, (size, size), dtype)
    product = jax.jit(lambda a: a @ a)
    median = times(lambda: product(a).block_until_ready(), repeats=10)["median"]
    return 2 * size**3 / median


def finish(name: str, rows: list[dict[str, Any]], **extra: Any) -> None:
    """Prints the closing JSON line."""
    print(json.dumps({"benchmark": name, **environment(), **extra, "rows": rows}))
