"""Kernels that users would take instead of ours, on the same operands, as replayed CUDA graphs.

flash-linear-attention (fla-core) runs where it and torch are importable and see a GPU; otherwise RECORDED has
what it took on another day. Its functions know no pool: states are passed in and new ones come out, which
moves the same bytes. Torch and JAX share the GPU: JAX must not have taken all of its memory.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import importlib
import os
import statistics
import traceback
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.recurrent_cases import SIZE, Case, recurrence, results, worst

# Microseconds on one H200; the first name is what ``load`` would run.
RECORDED: Mapping[str, Mapping[int, Mapping[str, float]]] = {
    "simple_gla_decode": {
        size: {"fla 0.6.0": us} for size, us in ((1, 6.5), (8, 13.0), (64, 82.2), (256, 302.8))
    },
    "gated_delta_decode": {
        size: {"fla 0.6.0": us} for size, us in ((1, 4.2), (8, 20.9), (64, 139.5), (256, 546.4))
    },
    "simple_gla_prefill": {
        size: {"fla 0.6.0": us} for size, us in ((2048, 58.5), (8192, 203.8), (32768, 773.5))
    },
    "gated_delta_prefill": {
        size: {"fla 0.6.0": fla, "FlashInfer 0.7.2": cute}
        for size, fla, cute in ((2048, 201.0, 97.6), (8192, 688.0, 363.2), (32768, 2766.0, 1292.0))
    },
}

_FUNCTIONS = {
    "simple_gla_decode": "fla.ops.simple_gla:fused_recurrent_simple_gla",
    "gated_delta_decode": "fla.ops.gated_delta_rule:fused_recurrent_gated_delta_rule",
    "simple_gla_prefill": "fla.ops.simple_gla:chunk_simple_gla",
    "gated_delta_prefill": "fla.ops.gated_delta_rule:chunk_gated_delta_rule",
}
_WRONG = 0.05  # relative error above which a peer is not timed: its outputs are bfloat16
_REPLAYS = 12


@dataclasses.dataclass(frozen=True)
class Library:
    """A peer that runs here.

    Attributes:
      name: with its version.
      functions: by op, with the arguments of ``arguments``.
      put: a JAX array to one of the peer's; get: the way back, to float64.
      time: called as ``time(step, calls)``: microseconds of a call among ``calls``; ``step(state, i)`` is the
        i-th one, from the state of the one before or None, and returns its own.
    """

    name: str
    functions: Mapping[str, Callable[..., tuple[Any, Any]]]
    put: Callable[[jax.Array], Any]
    get: Callable[[Any], np.ndarray]
    time: Callable[[Callable[[Any, int], Any], int], float]


@dataclasses.dataclass(frozen=True)
class Peer:
    """Microseconds of a peer's call; ``where``: "this run" or "recorded"."""

    name: str
    us: float
    where: str


def load(find: Callable[[str], Any] = importlib.import_module) -> tuple[Library | None, str]:
    """The peer, or None and why it does not run here; ``find`` imports a module."""
    os.environ.setdefault(
        "FLA_CACHE_RESULTS", "0"
    )  # what was tuned elsewhere, for another length, is not used
    try:
        torch = find("torch")
        if not torch.cuda.is_available():
            return None, "torch sees no GPU"
        functions = {}
        for op, target in _FUNCTIONS.items():
            module, _, name = target.partition(":")
            functions[op] = getattr(find(module), name)
        name = f"fla {find('fla').__version__}"
    except ImportError as error:
        return None, str(error)
    except Exception:  # whatever a broken or an unfit installation raises
        return None, traceback.format_exc()
    with contextlib.suppress(ImportError, AttributeError):
        _compile_together(find("triton.runtime.autotuner").Autotuner, find("triton").AsyncCompileMode)
    return Library(
        name,
        functions,
        put=lambda x: torch.from_dlpack(jax.block_until_ready(x)).clone(),
        get=lambda x: x.double().cpu().numpy(),
        time=functools.partial(_graph, torch),
    ), ""


def _compile_together(autotuner: type, mode: type) -> None:
    """Has Triton compile all variants that an autotuner is about to time at once, not one by one."""
    prune, pool = autotuner.prune_configs, concurrent.futures.ThreadPoolExecutor(os.cpu_count())

    def compiled(self, kwargs):
        configs = prune(self, kwargs)
        named = {**self.nargs, **{name: x for name, x in kwargs.items() if name != "warmup"}}
        with contextlib.suppress(Exception), mode(pool, ignore_errors=True):  # a variant may not compile
            for config in configs:
                self.fn.warmup(**named, **config.all_kwargs())
        return configs

    autotuner.prune_configs = compiled


def _graph(torch, step: Callable[[Any, int], Any], calls: int) -> float:
    """Median time of a call in replays of a CUDA graph of ``calls``."""

    def run() -> None:
        state = None
        for i in range(calls):
            state = step(state, i)

    with torch.no_grad():
        step(step(None, 0), 1)  # compiles, tunes and fills caches, none of which may be captured
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # JAX has threads of its own
            run()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        samples = []
        for _ in range(_REPLAYS):
            graph.replay()  # while it runs, the host has the timed one ready
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            samples.append(start.elapsed_time(end) * 1e3 / calls)
    del graph
    torch.cuda.empty_cache()
    return statistics.median(samples)


def arguments(op: str, case: Case) -> dict[str, Any]:
    """Keyword arguments of fla's function for an op: arrays [B, T, ...] and numbers.

    A row of decoding is a sequence of one token, a prompt one sequence that starts from a zero state.
    """
    decoding = op.endswith("decode")
    own = case.operands[: 3 if op.startswith("simple_gla") else 5]
    names = ("q", "k", "v", "g", "beta")
    given: dict[str, Any] = {name: x[:, None] if decoding else x[None] for name, x in zip(names, own)}
    if op.startswith("simple_gla"):
        given |= {"g_gamma": -case.operands[3], "scale": case.options["scale"]}
    else:
        given |= {"scale": SIZE**-0.5, "use_qk_l2norm_in_kernel": True}
    state = case.operands[case.pool][case.operands[case.pool + 1]]
    return {
        **given,
        "initial_state": state if decoding else jnp.zeros_like(state),
        "output_final_state": True,
    }


def _given(op: str, case: Case, library: Library) -> dict[str, Any]:
    return {
        name: library.put(x) if isinstance(x, jax.Array) else x for name, x in arguments(op, case).items()
    }


def error(op: str, case: Case, library: Library) -> float:
    """Largest relative error of a peer, as ``recurrent_cases.worst`` has it."""
    out, state = (library.get(x) for x in library.functions[op](**_given(op, case, library)))
    pool = np.asarray(case.operands[case.pool], np.float64).copy()
    pool[np.asarray(case.operands[case.pool + 1])] = state
    want = results(case, tuple(recurrence(op, case)))
    return worst(results(case, (out.reshape(want[0].shape), pool)), want)


def microseconds(op: str, case: Case, library: Library, calls: int, sets: int) -> float:
    """Time of a peer's call, from state to state, with ``sets`` copies of q, k and v in turn."""
    given = _given(op, case, library)
    turns = [{name: given[name] if i == 0 else given[name] * 1 for name in "qkv"} for i in range(sets)]

    def step(state, i):
        start = given["initial_state"] if state is None else state
        return library.functions[op](**{**given, **turns[i % sets], "initial_state": start})[1]

    return library.time(step, calls)


def measure(
    op: str, check: Case, cases: Iterable[tuple[int, Case, int, int]], library: Library | None
) -> dict[int, list[Peer]]:
    """What a call takes elsewhere, by size: measured where ``library`` is right, else as recorded.

    Args:
      op: name of an op; those without peers give nothing.
      check: a small case to be compared with the definition.
      cases: size, case, calls of a program and copies of q, k and v. The first one is what the peer is tuned
        for: Triton tunes at the first call and keeps the result for other lengths.
    """
    recorded = RECORDED.get(op, {})
    found = {size: [Peer(name, us, "recorded") for name, us in by.items()] for size, by in recorded.items()}
    if library is None or op not in library.functions:
        return found
    wrong = None
    try:
        for size, case, calls, sets in cases:
            if wrong is None:
                library.functions[op](**_given(op, case, library))
                wrong = error(op, check, library)
                print(f"{op} {library.name}: largest relative error {wrong:.1e}", flush=True)
            if not wrong < _WRONG:
                break
            us = microseconds(op, case, library, calls, sets)
            print(f"{op:20s} {size:6d} {library.name:28s} {us:9.1f} us", flush=True)
            others = [peer for peer in found.get(size, []) if peer.name.split()[0] != library.name.split()[0]]
            found[size] = [Peer(library.name, us, "this run"), *others]
    except Exception:  # ours are timed all the same
        print(f"{op} {library.name}: {traceback.format_exc()}", flush=True)
    return found


def beside(took: float, peers: list[Peer]) -> str:
    """ "0.61 x 58.5 us of fla 0.6.0 (this run)" and so on."""
    return ", ".join(
        f"{took / peer.us:.2f} x {peer.us:.1f} us of {peer.name} ({peer.where})" for peer in peers
    )
