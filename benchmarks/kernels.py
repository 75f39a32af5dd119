"""Times of the recurrent GPU kernels at the released shapes, beside the XLA path and the peers.

    python -m benchmarks.kernels [--ops simple_gla_decode,...] [--sizes 1,8,64,256]
    python -m benchmarks.kernels --tune [--write-table sm_90.json]

Sizes are rows (decode), tokens (prefill) or trees of 16 nodes (verify, commit: paths of 5).

Each implementation is first compared with a float64 recurrence; a wrong one is not timed. A time is that of
one call among many in one program, which XLA replays as a CUDA graph: gaps between kernels count, launches
from the host do not. The pool is donated from call to call; verification, which writes none, is called with
other queries each time, and what depends on the tree alone is computed once in a program. Copies of q, k and
v, of 256 MiB together, take turns, so that prompts do not stay in the cache; XLA's forms have copies for each
call, as XLA computes once what calls have in common. Peers are timed in the same run, likewise, where they
are installed; see ``peers``. Limit: the bytes of a call over the copy bandwidth measured in this run.
``--tune`` times the variants of a kernel and ends with a tuning table.
"""

import argparse
import functools
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental.mosaic.gpu import profiler

from benchmarks import peers
from benchmarks.common import copy_bandwidth, environment, finish
from benchmarks.recurrent_cases import CASES, Case, recurrence, results, worst
from hybridjax.batch import TILE
from hybridjax.errors import ConfigError
from hybridjax.ops.dispatch import OPS, architecture
from hybridjax.pallas_kernels import catalog, tuning
from hybridjax.pallas_kernels.state_update import multiprocessors

SIZES = {
    **peers.RECORDED,
    **dict.fromkeys(("simple_gla_verify", "gated_delta_verify", "recurrent_commit"), (1, 8, 64)),
}
_MOVED = 6e9  # bytes of the calls of one program
_CALLS = range(8, 200)
_CALLS_OF_XLA = 16  # of many operations each: more take minutes to compile
_TURNS = 2**28  # bytes of q, k and v that take turns


def calls_of(case: Case) -> int:
    """Calls of one program."""
    return max(_CALLS.start, min(_CALLS.stop, int(_MOVED / case.moved)))


def turns_of(case: Case) -> int:
    """Copies of q, k and v that take turns."""
    return max(1, min(8, -(-_TURNS // sum(x.nbytes for x in case.operands[:3]))))


def error(name: str, function: Callable, size: int) -> float:
    """Largest relative error of the outputs of a row and head, and of a head's state."""
    case = CASES[name](size, key=5)
    want = results(case, tuple(recurrence(name, case)))
    got, again = (results(case, jax.jit(function)(*case.operands)) for _ in range(2))
    assert all(bool((a == b).all()) for a, b in zip(got, again)), "two runs differ"
    return worst(got, want)


def microseconds(
    function: Callable, case: Case, repeats: int, profile: bool = True, xla: bool = False
) -> tuple[float, float]:
    """Median time of one call inside programs of many, and the time that its kernels run; see the module.

    ``xla``: of a function that is no kernel.
    """
    calls = min(calls_of(case), _CALLS_OF_XLA if xla else _CALLS.stop)
    apart = xla or case.parts or case.gives == "outputs"
    copies = calls if apart else min(calls, turns_of(case))
    turns = [tuple(x * 1 if i else x for x in case.operands[:3]) for i in range(copies)]
    if case.gives == "outputs":
        return _unchained(function, case, turns, repeats, profile)

    def many(turns, *operands):
        out = None
        for i in range(calls):
            operands = (*turns[i % len(turns)], *operands[3:])
            out, pool = function(*operands) if case.gives == "both" else (None, function(*operands))
            operands = (*operands[: case.pool], pool, *operands[case.pool + 1 :])
        return out, operands[case.pool]

    donating = jax.jit(many, donate_argnums=1 + case.pool)
    operands = list(case.operands)
    operands[case.pool] = operands[case.pool] + 0
    samples, queued = [], 4
    for sample in range(repeats + 2):
        start = time.perf_counter()
        for _ in range(queued):
            _, operands[case.pool] = donating(turns, *operands)
        jax.block_until_ready(operands[case.pool])
        if sample > 1:
            samples.append((time.perf_counter() - start) / queued / calls)
    if jax.default_backend() == "cpu" or not profile:
        return 1e6 * statistics.median(samples), float("nan")
    kernels = profiler.measure(jax.jit(many), aggregate=False)(turns, *operands)[1] or []
    # Without donation the program begins with a copy of the pool.
    running = sum(ms for i, (name, ms) in enumerate(kernels) if i > 0 or "copy" not in name.lower())
    return 1e6 * statistics.median(samples), 1e3 * running / calls


def _unchained(
    function: Callable, case: Case, turns: list, repeats: int, profile: bool
) -> tuple[float, float]:
    """The same for calls that do not depend on each other: each has queries, keys and values of its own."""
    many = jax.jit(lambda turns, rest: [function(*own, *rest) for own in turns])
    rest, calls = case.operands[3:], len(turns)
    samples = []
    for sample in range(repeats + 2):
        start = time.perf_counter()
        for _ in range(4):
            out = many(turns, rest)
        jax.block_until_ready(out)
        if sample > 1:
            samples.append((time.perf_counter() - start) / 4 / calls)
    if jax.default_backend() == "cpu" or not profile:
        return 1e6 * statistics.median(samples), float("nan")
    kernels = profiler.measure(many, aggregate=False)(turns, rest)[1] or []
    return 1e6 * statistics.median(samples), 1e3 * sum(ms for _, ms in kernels) / calls


def candidates(name: str, tune: bool) -> dict[str, tuple[Callable, tuning.Options | None]]:
    """Implementations of an op by name; with ``tune`` also variants of its kernel, with their options."""
    found: dict[str, tuple[Callable, tuning.Options | None]] = {
        item: (functools.partial(OPS[name], implementation=item), None) for item in OPS[name].names
    }
    if name.endswith(("prefill", "verify")):
        del found["reference"]  # a token at a time
    if tune:
        kernel = catalog.by_name(name)
        for static in kernel.variants:
            options = kernel.tuned.options(static) if kernel.tuned else static
            label = ",".join(f"{key}={value}" for key, value in options.items())
            function = functools.partial(kernel.function(), **static)
            found[f"kernel[{label}]"] = function, options if kernel.tuned else None
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ops", default=",".join(CASES))
    parser.add_argument("--sizes", default="", help="rows or tokens; default: those of the peers")
    parser.add_argument("--implementations", default="")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--tune", action="store_true", help="time variants of the kernels, too")
    parser.add_argument("--write-table", type=Path, help="a tuning table to put the best variants into")
    parser.add_argument("--no-profile", action="store_true", help="leave out the kernels' own times")
    parser.add_argument("--no-peers", action="store_true", help="use the peers' recorded times")
    options = parser.parse_args()
    if options.write_table and not options.tune:
        parser.error("--write-table needs --tune")

    library = None
    if not options.no_peers:
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # for torch to have some memory
        library, reason = peers.load()
        print(f"peers: {library.name if library else 'as recorded; ' + reason}", flush=True)
    bandwidth = copy_bandwidth(2**31 if jax.default_backend() != "cpu" else 2**26)
    print(f"{environment()}\ncopy {bandwidth / 1e12:.2f} TB/s", flush=True)
    run = Run(options, bandwidth, library)
    run.table(options.write_table)  # refused before anything is timed
    for name in options.ops.split(","):
        run.op(name)
    if options.tune:
        table = run.table(options.write_table)
        print(tuning.text(table))
        if options.write_table:
            tuning.write(options.write_table, table)
    finish("kernels", run.rows, copy_bytes_per_second=bandwidth)
    return 0


class Run:
    """What was timed so far: ``rows`` of the result, and ``timed`` variants by op, for a tuning table."""

    def __init__(self, options: argparse.Namespace, bandwidth: float, library: peers.Library | None):
        self.options, self.bandwidth, self.library = options, bandwidth, library
        self.rows: list[dict[str, Any]] = []
        self.timed: dict[str, list[tuple[dict[str, int], tuning.Options, float]]] = {}

    def op(self, name: str) -> None:
        """Checks and times every implementation of one op at each size."""
        wanted = [label for label in self.options.implementations.split(",") if label]
        sizes = [int(s) for s in self.options.sizes.split(",") if s] or list(SIZES[name])
        check = 5 * TILE if name.endswith("prefill") else 7
        longest_first = sorted(sizes, reverse=True)
        cases = ((size, case := CASES[name](size), calls_of(case), turns_of(case)) for size in longest_first)
        others = peers.measure(name, CASES[name](check, key=5), cases, self.library)
        for label, (function, static) in candidates(name, self.options.tune).items():
            if wanted and not any(label.startswith(w) for w in wanted):
                continue
            try:
                wrong = error(name, functools.partial(function, **CASES[name](check).options), check)
                print(f"{name} {label}: largest relative error {wrong:.1e}", flush=True)
                for size in sizes if wrong < 0.02 else ():
                    self.time(name, label, function, static, size, others.get(size, []))
            except (NotImplementedError, ValueError, AssertionError, jax.errors.JaxRuntimeError) as failure:
                print(f"{name} {label}: {type(failure).__name__}: {str(failure)[:400]}", flush=True)

    def time(self, name, label, function, static, size: int, others: list[peers.Peer]) -> None:
        """Times one implementation at one size."""
        case = CASES[name](size)
        call, xla = functools.partial(function, **case.options), label in ("xla", "reference")
        took, running = microseconds(call, case, self.options.repeats, not self.options.no_profile, xla)
        limit = case.moved / self.bandwidth * 1e6
        said = [peers.beside(took, others)] if others else []
        if name.endswith("verify") and (step := self._decode_step(name, size)):
            said.append(f"{running / step:.2f} x the {step:.1f} us of a decode step")
        print(
            f"{name:20s} {size:6d} {label:28s} {took:9.1f} us ({running:.1f} in kernels), "
            f"{case.moved / took / 1e3:6.0f} GB/s, limit {limit:7.1f} us ({limit / took:4.0%})"
            + "".join(f", {x}" for x in said),
            flush=True,
        )
        self.rows.append(
            {
                "op": name,
                "size": size,
                "implementation": label,
                "us": took,
                "kernel_us": running,
                "limit_us": limit,
                "peers": [vars(peer) for peer in others],
            }
        )
        if static is not None and (tuned := catalog.by_name(name).tuned):
            shape = tuned.shape(dict(zip(catalog.by_name(name).operands, case.operands)))
            least = took if np.isnan(running) else running
            self.timed.setdefault(name, []).append((shape, static, least))

    def _decode_step(self, name: str, size: int) -> float | None:
        """What the kernels of a plain step of as many rows took in this run."""
        step = name.replace("verify", "decode")
        for row in self.rows:
            if (row["op"], row["size"], row["implementation"]) == (step, size, "mosaic_gpu"):
                return row["kernel_us"]
        return None

    def table(self, file: Path | None) -> dict[str, Any]:
        """The tuning table in a file, if there is one, with the best variants of this run in it.

        Raises:
          ConfigError: the file holds the table of another GPU.
        """
        where = {"architecture": architecture(), "processors": multiprocessors()}
        device = jax.devices()[0].device_kind
        table: dict[str, Any] = {**where, "measured_on": device, "sources": {}, "ops": {}}
        if file is not None and file.exists():
            table = tuning.read(file)
            if (found := {name: table[name] for name in where}) != where:
                raise ConfigError(f"{file} is of {found}, this run of {where}")
        for name, timed in self.timed.items():
            if tuned := catalog.by_name(name).tuned:
                sizes = ", ".join(str(size) for size in sorted({shape[tuned.along] for shape, _, _ in timed}))
                commit = environment()["commit"]
                table["ops"][tuned.op] = tuning.entries(timed, tuned.along, tuned.exact)
                table["sources"][tuned.op] = f"benchmarks.kernels --tune, {commit}: {sizes} {tuned.along}"
        return table


if __name__ == "__main__":
    sys.exit(main())
