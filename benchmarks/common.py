"""What every benchmark shares: the machine's own limits, statistics, and the closing JSON line."""

import json
import os
import subprocess
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from hybridjax.benchmarking import offline
from hybridjax.benchmarking.statistics import spread


def environment() -> dict[str, Any]:
    """Device, versions and commit: what a number means nothing without."""
    return {**offline.device(), "commit": os.environ.get("COMMIT") or _commit()}


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
