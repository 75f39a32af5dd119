"""Which kernels a piece of work consists of."""

import collections
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax


def kernels(run: Callable[[], Any], top: int) -> None:
    """Prints the kernels of one call of ``run``, which must wait for its result, by total time.

    Nothing is printed where the device leaves no trace of its own (CPUs).
    """
    with tempfile.TemporaryDirectory() as directory:
        with jax.profiler.trace(directory):
            run()
        files = list(Path(directory).rglob("*.xplane.pb"))
        if not files:
            return
        data = jax.profiler.ProfileData.from_file(str(files[0]))
        seconds: dict[str, float] = collections.defaultdict(float)
        counts: dict[str, int] = collections.defaultdict(int)
        for plane in data.planes:
            if not plane.name.startswith("/device:"):
                continue
            for line in plane.lines:
                if "Stream" not in line.name:
                    continue
                for event in line.events:
                    seconds[event.name] += event.duration_ns * 1e-9
                    counts[event.name] += 1
    total = sum(seconds.values())
    if not total:
        return
    print(f"    {total * 1e6:.0f} us in {sum(counts.values())} kernels")
    for name, took in sorted(seconds.items(), key=lambda item: -item[1])[:top]:
        print(f"    {took * 1e6:9.1f} us {counts[name]:5d} x {name[:90]}")
