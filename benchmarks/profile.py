"""Which kernels a piece of work consists of."""

import collections
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax


def kernel_times(run: Callable[[], Any]) -> dict[str, tuple[float, int]]:
    """Seconds and number of the kernels of one call of ``run``, which must wait for its result, by name.

    Empty where the device leaves no trace of its own (CPUs).
    """
    seconds: dict[str, float] = collections.defaultdict(float)
    counts: dict[str, int] = collections.defaultdict(int)
    with tempfile.TemporaryDirectory() as directory:
        with jax.profiler.trace(directory):
            run()
        for file in list(Path(directory).rglob("*.xplane.pb"))[:1]:
            for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
                if not plane.name.startswith("/device:"):
                    continue
                for line in plane.lines:
                    if "Stream" not in line.name:
                        continue
                    for event in line.events:
                        seconds[event.name] += event.duration_ns * 1e-9
                        counts[event.name] += 1
    return {name: (took, counts[name]) for name, took in seconds.items()}


def kernels(run: Callable[[], Any], top: int) -> None:
    """Prints the kernels of one call of ``run``, which must wait for its result, by total time."""
    found = kernel_times(run)
    if not found:
        return
    total, count = sum(took for took, _ in found.values()), sum(number for _, number in found.values())
    print(f"    {total * 1e6:.0f} us in {count} kernels")
    for name, (took, number) in sorted(found.items(), key=lambda item: -item[1][0])[:top]:
        print(f"    {took * 1e6:9.1f} us {number:5d} x {name[:90]}")
