"""Times and memory of single Qwen4Exp layers as serving steps, at the released shapes, random weights.

    python -m benchmarks.qwen4_exp_layers [--kinds gdn,qsa,moe,residual,mtp,head,select] [--smoke]

A program holds several equal layers with weights of their own, one after the other, so that no layer finds
its weights in a cache and launches weigh little. Limits: the bytes that a step must move (weights, states,
keys and values that are read) over the copy rate, or its operations over the matmul rate if that is longer.
"""

import argparse
import concurrent.futures
import dataclasses
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from benchmarks.common import copy_bandwidth, environment, finish, matmul_rate
from benchmarks.profile import kernels
from benchmarks.qwen4_exp_common import (
    decode_batch,
    filled,
    nbytes,
    noise,
    noise_like,
    prefill_batch,
    small_config,
)
from hybridjax.benchmarking.statistics import spread
from hybridjax.configs import Qwen4ExpConfig
from hybridjax.layers import GatedDeltaNet, GatedResidual, IndexedAttention, Linear, SparseMoE
from hybridjax.models.qwen4_exp import MTPHead, Qwen4Exp
from hybridjax.ops import select_index_blocks
from hybridjax.ops.dispatch import override

COPIES = {"gdn": 4, "qsa": 4, "moe": 2, "residual": 12, "mtp": 1, "head": 1}
REFERENCES = ",".join(
    f"{op}=reference"
    for op in (
        "block_attention",
        "select_index_blocks",
        "gated_delta_prefill",
        "gated_delta_decode",
        "experts",
    )
)


class Head(nnx.Module):
    """Final mix and lm_head, as in Qwen4Exp.logits."""

    def __init__(self, config: Qwen4ExpConfig, **shared: Any):
        args = config.hidden_size, config.hc_count, config.hc_lowrank
        self.mix = GatedResidual(*args, eps=config.rms_norm_eps, inject=False, **shared)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, **shared)


@dataclasses.dataclass(frozen=True)
class Case:
    """One line of the table; ``context`` is what is known before (PREFILL) or with (DECODE) the rows."""

    kind: str
    mode: str
    rows: int
    context: int = 0

    @property
    def name(self) -> str:
        where = f" context {self.context:6d}" if self.kind in ("qsa", "mtp", "select") else " " * 15
        return f"{self.kind:8s} {self.mode:7s} rows {self.rows:4d}{where}"


class Bench:
    """Layers of every kind, their caches and the programs over them."""

    def __init__(self, config: Qwen4ExpConfig, dtype: Any, kinds: list[str], cases: list[Case], pool: int):
        self.config, self.dtype, self.pool = config, jnp.dtype(dtype), pool

        def shared() -> dict[str, Any]:
            return {"init": nnx.initializers.zeros, "dtype": self.dtype, "rngs": nnx.Rngs(0)}

        residual = config.hidden_size, config.hc_count, config.hc_lowrank
        makers = {
            "gdn": lambda: GatedDeltaNet(config, **shared()),
            "qsa": lambda: IndexedAttention(config, **shared()),
            "moe": lambda: SparseMoE(config, **shared()),
            "residual": lambda: GatedResidual(*residual, eps=config.rms_norm_eps, **shared()),
            "mtp": lambda: MTPHead(config, **shared()),
            "head": lambda: Head(config, **shared()),
        }
        self.copies = {kind: COPIES[kind] for kind in kinds}
        self.graphs, self.parameters, self.structure, self.caches = {}, {}, {}, {}
        slots = 2 + max(case.rows for case in cases if case.mode == "decode")
        for number, kind in enumerate(kinds):
            models = [filled(makers[kind], 100 * number + i) for i in range(self.copies[kind])]
            split = [nnx.split(model) for model in models]
            self.graphs[kind] = split[0][0]
            self.structure[kind] = jax.tree.structure(split[0][1])
            self.parameters[kind] = [jax.tree.leaves(state) for _, state in split]
            self.caches[kind] = self._caches(kind, slots)

    def _caches(self, kind: str, slots: int) -> tuple:
        """A cache per copy; all indexed attention shares one pool, at other pages (see batches)."""
        one = dataclasses.replace(
            self.config, num_hidden_layers=1, layer_types=("linear_attention",), ple_layer_ids=()
        )
        model = nnx.eval_shape(lambda: Qwen4Exp(one, dtype=self.dtype, rngs=nnx.Rngs(0)))
        if kind == "gdn":
            shape = jax.eval_shape(lambda: model.init_state(1, slots)[0])
            return tuple(noise_like(shape, 0.1, 7 + i) for i in range(self.copies[kind]))
        if kind in ("qsa", "mtp"):
            pages = self.pool if kind == "qsa" else min(self.pool, 2**16)
            return (
                noise_like(jax.eval_shape(lambda: model.init_draft_cache(pages, slots)), 1.0, 50 + len(kind)),
            )
        return ()

    def batches(self, case: Case) -> tuple:
        """A batch per copy, each with its own pages."""
        pages = self.caches[case.kind][0].keys.shape[0] if case.kind in ("qsa", "mtp") else 2**20
        paged = case.kind in ("qsa", "mtp")
        out = []
        for i in range(self.copies[case.kind]):
            if case.mode == "decode":
                context = case.context if paged else 64
                out.append(decode_batch(case.rows, context, pages, i * case.rows * -(-context // 64)))
            else:
                out.append(
                    prefill_batch(case.rows, case.context, pages, i * (case.rows + case.context) // 64)
                )
        return tuple(out)

    def inputs(self, case: Case) -> jax.Array:
        """x [N, hidden], or streams [N, C * hidden] where the layer works on them."""
        wide = case.kind in ("residual", "mtp", "head")
        width = self.config.hidden_size * (self.config.hc_count if wide else 1)
        return noise((case.rows, width), self.dtype, 1.0, 3)

    def step(self, kind: str, copies: int) -> Callable:
        """run(parameters, caches, x, batches) -> (result, caches): the copies one after the other."""
        graph, structure = self.graphs[kind], self.structure[kind]

        def run(parameters, caches, x, batches):
            caches, paged = list(caches), kind in ("qsa", "mtp")
            for i in range(copies):
                layer = nnx.merge(graph, jax.tree.unflatten(structure, parameters[i]))
                cache = caches[0 if paged else i] if caches else None
                batch = batches[i]
                if kind == "moe":
                    y = layer(x, batch)
                elif kind == "residual":
                    y, normed = layer.mix(x)
                    x, y = layer.combine(x, normed, y), None
                elif kind == "mtp":
                    x, cache = layer(x[:, : self.config.hidden_size], x, batch, cache)
                    y = None
                elif kind == "head":
                    return layer.lm_head(layer.mix.mix(x)[0], jnp.dtype(jnp.float32)), ()
                else:
                    y, cache = layer(x, batch, cache)
                if caches:
                    caches[0 if paged else i] = cache
                x = x if y is None else (x + y).astype(x.dtype)
            return x, tuple(caches)

        return run

    def compile(self, case: Case, copies: int | None = None, references: bool = False) -> Any:
        copies = self.copies[case.kind] if copies is None else copies
        program = jax.jit(self.step(case.kind, copies), donate_argnums=1)
        args = (
            self.parameters[case.kind],
            self.caches[case.kind],
            self.inputs(case),
            self.batches(case),
        )
        with override(REFERENCES if references else None):
            lowered = program.lower(*jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), args))
        return lowered.compile

    def run(self, case: Case, compiled: Any, x: jax.Array, batches: tuple) -> jax.Array:
        """One launch; the caches live on."""
        out, self.caches[case.kind] = compiled(self.parameters[case.kind], self.caches[case.kind], x, batches)
        return out

    def limit(self, case: Case, bandwidth: float, rate: float) -> dict[str, float]:
        """Bytes and operations that one layer's step needs at least."""
        c, n = self.config, case.rows
        item = self.dtype.itemsize
        matrices = [p for p in self.parameters[case.kind][0] if p.ndim == 2]
        moved, flops = float(sum(p.nbytes for p in matrices)), 2.0 * n * sum(p.size for p in matrices)
        sequences = n if case.mode == "decode" else 1
        if case.kind == "gdn":
            heads = c.linear_num_value_heads
            size = heads * c.linear_key_head_dim * c.linear_value_head_dim
            moved += 8.0 * sequences * size
            flops += 6.0 * n * size
        if case.kind in ("qsa", "mtp"):
            total = case.context + (0 if case.mode == "decode" else n)
            seen = total if case.mode == "decode" else case.context + n / 2
            listed = min(seen, c.indexer_budget + c.indexer_compress_ratio)
            read = listed if case.mode == "decode" else total
            moved += sequences * read * 2 * c.num_key_value_heads * c.head_dim * item
            flops += 4.0 * n * listed * c.num_attention_heads * c.head_dim
            if total > c.indexer_budget:
                moved += sequences * total / c.indexer_compress_ratio * c.indexer_head_dim * item
                keys = seen / c.indexer_compress_ratio
                flops += 2.0 * n * keys * c.indexer_n_heads * c.indexer_head_dim
        if case.kind in ("moe", "mtp"):
            share = c.num_experts_per_tok / c.num_experts
            touched = c.num_experts * (1 - (1 - share) ** n)
            each = 3 * c.hidden_size * c.moe_intermediate_size
            moved += touched * each * item
            flops += 2.0 * n * c.num_experts_per_tok * each
        if case.kind in ("residual", "mtp"):
            moved += (2 if case.kind == "residual" else 6) * n * c.hc_count * c.hidden_size * item
        if case.kind == "head":
            moved += 4.0 * n * c.vocab_size
        seconds = max(moved / bandwidth, flops / rate)
        return {"bytes": moved, "flops": flops, "limit_seconds": seconds}


def relative(got: jax.Array, want: jax.Array) -> float:
    got, want = got.astype(jnp.float32), want.astype(jnp.float32)
    return float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want))


def gate_cases(kinds: list[str], budget: int) -> list[Case]:
    """Small steps whose results are compared with those of the definitions."""
    long = 2 * budget
    cases = []
    for kind in kinds:
        if kind in ("gdn", "qsa", "moe"):
            cases += [Case(kind, "decode", 8, long - 1), Case(kind, "prefill", 128, long)]
    return cases


def timed(launch: Callable[[], jax.Array], copies: int, repeats: int) -> tuple[dict, float]:
    """Seconds per layer, launches queued back to back; and the share of it the host spent launching."""
    jax.block_until_ready(launch())
    start = time.perf_counter()
    jax.block_until_ready(launch())
    once = time.perf_counter() - start
    count = max(1, min(20, int(0.02 / once)))
    samples, queued = [], []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(count):
            out = launch()
        queued.append(time.perf_counter() - start)
        jax.block_until_ready(out)
        samples.append((time.perf_counter() - start) / count / copies)
    return spread(samples), sum(queued) / (sum(samples) * count * copies)


def all_compiled(jobs: dict[Any, Callable[[], Any]]) -> dict[Any, Any]:
    """Runs the compilations on all cores."""
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        futures = {key: pool.submit(job) for key, job in jobs.items()}
        return {key: future.result() for key, future in futures.items()}


def selection_cases(rows: list[int], contexts: list[int], chunk: int, starts: list[int]) -> list[Case]:
    cases = [Case("select", "decode", n, c) for c in contexts for n in rows]
    return cases + [Case("select", "prefill", chunk, start) for start in starts]


def selection(bench: Bench, case: Case, implementation: str, steps: int = 4):
    """A program of several selections, and its inputs."""
    c, keys = bench.config, bench.caches["qsa"][0].index_keys
    made = [
        decode_batch(case.rows, case.context, keys.shape[0], i * case.rows * -(-case.context // 64))
        if case.mode == "decode"
        else prefill_batch(case.rows, case.context, keys.shape[0], i * 512)
        for i in range(steps)
    ]
    shape = steps, case.rows, c.indexer_n_heads, c.indexer_head_dim
    inputs = noise(shape, bench.dtype, 1.0, 5), jnp.stack([b.page_table for b in made])
    sequence, positions = made[0].row_sequence, made[0].positions
    ratio = c.indexer_compress_ratio

    def run(keys, inputs):
        def one(_, item):
            q, table = item
            return None, select_index_blocks(
                q,
                keys,
                table,
                sequence,
                positions,
                block_size=ratio,
                top_k=c.indexer_budget // ratio,
                tiled=case.mode == "prefill",
                implementation=implementation,
            )

        return jax.lax.scan(one, None, inputs)[1]

    return jax.jit(run).lower(keys, inputs).compile, inputs


def compare_selections(bench: Bench, cases: list[Case], repeats: int, bandwidth: float) -> list[dict]:
    """Times of each implementation of select_index_blocks; none where its choice is another."""
    names = list(select_index_blocks.names)
    wanted = {}
    for case in cases:
        for name in names:
            if name == "reference" and case.mode == "prefill" and case.context > 2**16:
                continue  # it gathers the whole context for every row
            try:
                wanted[case, name] = selection(bench, case, name)
            except NotImplementedError:
                continue
    programs = all_compiled({key: job for key, (job, _) in wanted.items()})
    rows, first = [], {}
    c = bench.config
    for (case, name), program in programs.items():
        keys, inputs = bench.caches["qsa"][0].index_keys, wanted[case, name][1]
        chosen = program(keys, inputs)
        # Scores of differently shaped products may differ by a rounding, and with it the last choice.
        other = float(jnp.mean(chosen != first.setdefault(case, chosen)))
        if other > 0.02:
            print(f"{case.name} {name}: {other:.1%} of the choices are others; no times are printed")
            continue
        took, _ = timed(lambda p=program, k=keys, i=inputs: p(k, i), 4, repeats)
        sequences = case.rows if case.mode == "decode" else 1
        total = case.context + (0 if case.mode == "decode" else case.rows)
        moved = sequences * total / c.indexer_compress_ratio * c.indexer_head_dim * bench.dtype.itemsize
        row = {
            "kind": "select",
            "mode": case.mode,
            "rows": case.rows,
            "context": case.context,
            "implementation": name,
            "seconds": took,
            "limit_seconds": moved / bandwidth,
            "differing": other,
            "temporary_bytes": program.memory_analysis().temp_size_in_bytes,
        }
        rows.append(row)
        print(
            f"{case.name:37s} {name:14s} {took['median'] * 1e6:9.1f} us "
            f"[{took['q1'] * 1e6:.1f}, {took['q3'] * 1e6:.1f}], keys alone {moved / bandwidth * 1e6:.1f} us, "
            f"temporary {row['temporary_bytes'] / 2**20:.0f} MiB",
            flush=True,
        )
    return rows


def measure(bench: Bench, case: Case, compiled: Any, rates: tuple[float, float], args: Any) -> dict:
    """Times one case, prints its line and returns its row."""
    x, batches, copies = bench.inputs(case), bench.batches(case), bench.copies[case.kind]
    took, launching = timed(lambda: bench.run(case, compiled, x, batches), copies, args.repeats)
    limit = bench.limit(case, *rates)
    temporary = compiled.memory_analysis().temp_size_in_bytes
    parameters, cache = nbytes(bench.parameters[case.kind][0]), nbytes(bench.caches[case.kind])
    row = {
        **dataclasses.asdict(case),
        "seconds": took,
        **limit,
        "times_limit": took["median"] / limit["limit_seconds"],
        "launching_share": launching,
        "parameter_bytes": parameters,
        "cache_bytes": cache // (1 if case.kind in ("qsa", "mtp") else copies),
        "temporary_bytes": temporary,
    }
    print(
        f"{case.name} {took['median'] * 1e6:9.1f} us [{took['q1'] * 1e6:.1f}, {took['q3'] * 1e6:.1f}], "
        f"limit {limit['limit_seconds'] * 1e6:8.1f} us, {row['times_limit']:5.1f} x; parameters "
        f"{parameters / 2**20:.0f} MiB, caches {row['cache_bytes'] / 2**20:.0f} MiB, "
        f"temporary {temporary / 2**20:.0f} MiB" + ("; bound by launches" if launching > 0.9 else ""),
        flush=True,
    )
    if args.profile and (case.mode == "prefill" or case.rows == 8):
        kernels(lambda: jax.block_until_ready(bench.run(case, compiled, x, batches)), 10)
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kinds", default="gdn,qsa,moe,residual,mtp,head,select")
    parser.add_argument("--rows", default="1,8,64")
    parser.add_argument("--contexts", default="1024,32768,262144")
    parser.add_argument("--chunk", type=int, default=2048)
    parser.add_argument("--starts", default="0,30720")
    parser.add_argument("--pool-gib", type=float, default=36.0, help="most K/V in the shared pool")
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--profile", action="store_true", help="print the kernels of each prefill line")
    parser.add_argument("--smoke", action="store_true", help="small shapes, for any machine")
    args = parser.parse_args()
    if args.smoke:
        args.contexts, args.starts, args.chunk, args.rows = "64,256", "256", 128, "2"
        COPIES.update(dict.fromkeys(COPIES, 1))
        args.pool_gib, args.repeats = 0.01, 2
    started = time.perf_counter()
    config = small_config() if args.smoke else Qwen4ExpConfig()
    dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
    kinds = args.kinds.split(",")
    rows, contexts, starts = (
        [int(x) for x in text.split(",")] for text in (args.rows, args.contexts, args.starts)
    )
    layers = [kind for kind in kinds if kind != "select"]
    if "select" in kinds and "qsa" not in layers:
        layers.append("qsa")
    cases = []
    for kind in layers:
        if kind not in kinds:
            continue
        own = contexts if kind == "qsa" else [contexts[min(1, len(contexts) - 1)]] if kind == "mtp" else [0]
        cases += [Case(kind, "decode", n, context) for context in own for n in rows]
        if kind != "head":
            own = starts if kind == "qsa" else [starts[-1]] if kind == "mtp" else [0]
            cases += [Case(kind, "prefill", args.chunk, start) for start in own]
    page = 2 * config.num_key_value_heads * 64 * config.head_dim * jnp.dtype(dtype).itemsize
    pool = 1 + min(int(args.pool_gib * 2**30) // page, max(rows) * max(contexts) // 64)
    pool = max(pool, 1 + (max(starts) + args.chunk) // 64 + 2 * config.indexer_budget // 64 * 8)
    large = jax.default_backend() != "cpu"
    bandwidth = copy_bandwidth(2**31 if large else 2**24)
    rate = matmul_rate(8192 if large else 512, dtype)
    print(f"{environment()}\ncopy {bandwidth / 1e12:.2f} TB/s, matmul {rate / 1e12:.1f} TFLOP/s", flush=True)
    checks = gate_cases(layers, config.indexer_budget)
    bench = Bench(config, dtype, layers, [*cases, *checks], pool)

    jobs: dict[Any, Any] = {}
    for case in checks:
        jobs[case, "check"] = bench.compile(case, 1)
        jobs[case, "reference"] = bench.compile(case, 1, references=True)
    for case in cases:
        jobs[case] = bench.compile(case)
    programs = all_compiled(jobs)
    print(f"{len(programs)} programs after {time.perf_counter() - started:.0f} s", flush=True)

    errors, wrong = {}, set()
    for case in checks:
        x, batches = bench.inputs(case), bench.batches(case)
        if case.kind == "gdn":
            saved = jax.tree.map(jnp.copy, bench.caches["gdn"])
        want = bench.run(case, programs[case, "reference"], x, batches) - x
        if case.kind == "gdn":
            bench.caches["gdn"] = saved
        got = bench.run(case, programs[case, "check"], x, batches) - x
        error = errors[f"{case.kind} {case.mode}"] = relative(got, want)
        print(f"{case.kind} {case.mode}: relative error against the definitions {error:.1e}")
        if not error < 0.02:
            wrong.add(case.kind)
    out = []
    for case in cases:
        if case.kind in wrong:
            print(f"{case.name}: wrong; no times are printed")
        else:
            out.append(measure(bench, case, programs[case], (bandwidth, rate), args))
    if "select" in kinds:
        active = [c for c in contexts if c > config.indexer_budget]
        longer = [*starts, max(contexts) - args.chunk]
        chosen = selection_cases(rows, active, args.chunk, [s for s in longer if s > config.indexer_budget])
        out += compare_selections(bench, chosen, args.repeats, bandwidth)
    device = jax.local_devices()[0]
    stats = (device.memory_stats() or {}) if large else {}
    peak = stats.get("peak_bytes_in_use", 0)
    print(f"peak {peak / 2**30:.1f} GiB in use on the device; {time.perf_counter() - started:.0f} s in all")
    finish(
        "qwen4_exp_layers",
        out,
        errors=errors,
        copy_bytes_per_second=bandwidth,
        matmul_flops=rate,
        peak_bytes=peak,
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
