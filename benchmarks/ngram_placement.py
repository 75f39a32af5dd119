"""What the placement of the n-gram table costs in decoding: on the device, in host memory, in a mapped file.

"host" is memory that the device reads in place; "looked up" is the same table looked up by the host between
two programs, as for files, "mmap".

    python -m benchmarks.ngram_placement [--rows 1,8,64] [--host-gib 48] [--mmap-gib 10] [--smoke]

A model of the released depth and widths, and so with as many arrays to launch, decodes through ModelRunner,
launch n+1 before n is read, as the engine's loop does. It has fewer experts than the release, as many as fit
into one device: a step reads no more of them than the release does, so it takes less time, and the shares
printed are too large if anything. The cost is the difference between the steps of two placements.
"""

import argparse
import collections
import concurrent.futures
import dataclasses
import math
import mmap
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx

from benchmarks.common import copy_bandwidth, environment, finish
from benchmarks.profile import kernels
from benchmarks.qwen4_exp_common import filled, small_config
from hybridjax.benchmarking.statistics import spread
from hybridjax.configs import EngineConfig, Qwen4ExpConfig
from hybridjax.configs.qwen4_exp import INDEXED, LINEAR
from hybridjax.host_table import HostTable, aligned_empty
from hybridjax.models.qwen4_exp import Qwen4Exp
from hybridjax.ops.ngram_hash import NgramHash
from hybridjax.serving.api import SamplingParams
from hybridjax.serving.decode_parts import DecodeParts
from hybridjax.serving.ngram_rows import NgramRows
from hybridjax.serving.plan import DecodePlan, DecodeRow, PrefillPlan, PrefillRow
from hybridjax.serving.request import Request
from hybridjax.serving.runner import ModelRunner, enable_compilation_cache
from hybridjax.serving.sizing import PoolSizes

CONTEXT = 512  # tokens of each request when measuring begins
LONGEST = 2048


def stack(config: Qwen4ExpConfig, layers: int, base: int) -> Qwen4ExpConfig:
    """The first ``layers`` layers, with n-gram heads of about ``base`` rows."""
    kinds = tuple(INDEXED if i % 4 == 3 else LINEAR for i in range(layers))
    return dataclasses.replace(
        config,
        num_hidden_layers=layers,
        layer_types=kinds,
        mtp_num_hidden_layers=0,
        ngram_vocab_size_base=base,
    )


def base_rows(config: Qwen4ExpConfig, gib: float, itemsize: int) -> int:
    """Rows per head of a table of about this size; the released number at most."""
    return max(16, min(config.ngram_vocab_size_base, int(gib * 2**30 / itemsize / config.ple_embed_dim)))


def build(config: Qwen4ExpConfig, placement: str, dtype: Any, known: dict) -> Any:
    where = "device" if placement == "device" else "host"
    return filled(lambda: Qwen4Exp(config, dtype=dtype, rngs=nnx.Rngs(0), ngram_table=where), 1, known)


def make_runner(model: Qwen4Exp, rows: int, steps: int) -> ModelRunner:
    sizes = PoolSizes(rows * LONGEST // 64 + 1, 64, rows + 1, rows, LONGEST, 0, 0)
    engine = EngineConfig(
        chunked_prefill_size=256, skip_server_warmup=True, num_continuous_decode_steps=steps
    )
    return ModelRunner(model, engine, sizes)


def requests(rows: int, vocab: int, length: int) -> list[Request]:
    made = []
    for i in range(rows):
        ids = np.random.default_rng(i).integers(4, min(vocab, 240000), length).astype(np.int32)
        params = SamplingParams(temperature=0, max_tokens=LONGEST - length, ignore_eos=True)
        one = Request(str(i), ids, params, LONGEST - length, 0)
        one.slot, one.pages = i + 1, list(range(1 + i * LONGEST // 64, 1 + (i + 1) * LONGEST // 64))
        made.append(one)
    return made


def decode(runner: ModelRunner, batch: list[Request], position: int, launches: int, steps: int) -> list:
    """Tokens [launches * steps][rows] of steady decoding; at most two launches are under way."""
    waiting: collections.deque[Any] = collections.deque()
    tokens = []
    for i in range(launches):
        rows = tuple(DecodeRow(r, position + i * steps, steps) for r in batch)
        waiting.append(runner.launch(DecodePlan(rows, steps)))
        if len(waiting) > 1:
            tokens += runner.read(waiting.popleft()).tokens.tolist()
    while waiting:
        tokens += runner.read(waiting.popleft()).tokens.tolist()
    return tokens


def check() -> bool:
    """Whether all placements decode the same tokens: small shapes, float32, prompts included."""
    config, known = stack(small_config(), 6, 1000), {}
    found = {}
    batch = requests(2, config.vocab_size, 70)

    def run(runner: ModelRunner) -> list:
        first = runner.launch(PrefillPlan(tuple(PrefillRow(r, 0, 70, True) for r in batch)))
        return runner.read(first).tokens.tolist() + decode(runner, batch, 70, 24, 1)

    model = build(config, "device", jnp.float32, known)
    found["device"] = run(make_runner(model, 2, 1))
    table = np.asarray(model.layers[1].ple.table.weight.value[...])
    model = build(config, "host", jnp.float32, known)
    model.host_tables = [HostTable([table], None, np.float32).to_ram()]
    found["host"] = run(make_runner(model, 2, 1))
    model = build(config, "host", jnp.float32, known)
    model.host_tables = [HostTable([table], None, np.float32)]
    runner = make_runner(model, 2, 1)
    found["looked up"] = run(runner)
    with tempfile.TemporaryDirectory() as directory:
        np.save(Path(directory) / "table.npy", table)
        mapped = np.load(Path(directory) / "table.npy", mmap_mode="r")
        shards = HostTable(np.array_split(mapped, 8), None, np.float32)
        runner._ngrams = NgramRows(model.ngram_hashes, [shards], runner.num_slots)
        found["mmap"] = run(runner)
    different = {str(tokens) for tokens in found.values()}
    distinct = len({token for step in found["device"] for token in step})
    print(f"tokens of all placements are {'equal' if len(different) == 1 else found}, {distinct} distinct")
    return len(different) == 1 and distinct > 4


def fill(codes: np.ndarray) -> None:
    """Random float8 codes, no NaN; one block again and again, by several threads."""
    flat = codes.reshape(-1)
    size = min(flat.size, 2**26 + 160)  # no power of two, so that repetitions do not share cache sets
    block = np.random.default_rng(0).integers(0, 127, size, np.uint8)

    def copy(start: int) -> None:
        part = flat[start : start + size]
        part[:] = block[: len(part)]

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        list(pool.map(copy, range(0, flat.size, size)))


def written(path: Path, rows: int, width: int, seconds: float) -> int:
    """Writes float8 rows to a file, as many as fit into the time; returns how many whole rows it has."""
    size = min(rows * width, 2**26 + 160)
    block = np.random.default_rng(0).integers(0, 127, size, np.uint8).tobytes()
    done, start = 0, time.perf_counter()
    with path.open("wb", buffering=0) as file:
        while done < rows * width and time.perf_counter() - start < seconds:
            done += file.write(block[: rows * width - done])
        os.fsync(file.fileno())
    took = time.perf_counter() - start
    print(f"wrote {done / 2**30:.1f} GiB in {took:.1f} s, {done / took / 2**30:.2f} GiB/s", flush=True)
    return done // width


def drop_cache(path: Path) -> None:
    """Asks the kernel to forget what it holds of a file."""
    handle = os.open(path, os.O_RDONLY)
    os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(handle)


def float8_table(codes: np.ndarray, shards: int) -> HostTable:
    """Of one shard, a table that the device can read in place."""
    wide = codes.view(ml_dtypes.float8_e4m3fn)
    parts = np.array_split(wide, shards) if shards > 1 else [wide]
    return HostTable(parts, 2e-4, ml_dtypes.bfloat16, in_ram=shards == 1)


class HostWork:
    """Seconds of the host's work in each step with the table on the host."""

    def __init__(self, runner: ModelRunner, bucket: Any):
        self.seconds = collections.defaultdict(list)
        self._runner, self._bucket = runner, bucket
        self._programs = runner._programs[bucket]
        self._ngrams: Any = runner._ngrams
        assert runner._parts is not None
        runner._programs[bucket] = tuple(
            self._timed(f"launch of layers {part.start}-{part.stop - 1}", program)
            for part, program in zip(runner._parts.parts, self._programs)
        )
        ngrams = self._ngrams
        ngrams._resolve = self._timed("wait for tokens", ngrams._resolve)
        ngrams.decode = self._timed("tokens to rows on the device, waiting included", ngrams.decode)

    def _timed(self, name, call):
        def run(*args):
            start = time.perf_counter()
            out = call(*args)
            self.seconds[name].append(time.perf_counter() - start)
            return out

        return run

    def finish(self) -> dict[str, float]:
        """Puts everything back; median seconds by name."""
        self._runner._programs[self._bucket] = self._programs
        del self._ngrams._resolve, self._ngrams.decode
        return {name: float(np.median(values)) for name, values in self.seconds.items()}


def compiled(runner: ModelRunner, rows: int) -> None:
    runner._compile(runner._bucket("decode", rows, LONGEST // 64))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", default="1,8,64")
    parser.add_argument(
        "--cuts", default="", help="layers at which other parts of a step than the first begin"
    )
    parser.add_argument("--profile", action="store_true", help="print the kernels of a step on the host")
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--experts", type=int, default=128, help="per layer; the release has 512")
    parser.add_argument("--device-gib", type=float, default=8.0, help="table in bfloat16")
    parser.add_argument("--host-gib", type=float, default=48.0, help="table in float8; 48: the whole")
    parser.add_argument("--mmap-gib", type=float, default=10.0, help="table in float8")
    parser.add_argument(
        "--directory", default=None, help="for the mapped file (default: for temporary files)"
    )
    parser.add_argument("--write-seconds", type=float, default=30.0, help="most time to write that file")
    parser.add_argument("--launches", type=int, default=60)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--cache", default="", help="compilation cache directory")
    parser.add_argument("--smoke", action="store_true", help="small shapes, for any machine")
    args = parser.parse_args()
    enable_compilation_cache(args.cache)
    started = time.perf_counter()

    def report(what: str) -> None:
        print(f"{what} after {time.perf_counter() - started:.0f} s", flush=True)

    full = small_config() if args.smoke else dataclasses.replace(Qwen4ExpConfig(), num_experts=args.experts)
    if args.smoke:
        args.rows, args.cuts, args.launches, args.repeats, args.layers = "2", "1,3", 10, 2, 6
        args.device_gib = args.host_gib = args.mmap_gib = 0.001
    cpu = jax.default_backend() == "cpu"
    dtype = jnp.float32 if cpu else jnp.bfloat16
    rows, cuts = ([int(n) for n in text.split(",") if n] for text in (args.rows, args.cuts))
    bandwidth = copy_bandwidth(2**24 if cpu else 2**31)
    print(f"{environment()}\ncopy {bandwidth / 1e12:.2f} TB/s", flush=True)

    known: dict = {}
    width = full.ple_embed_dim // ((full.ngram_size - 1) * full.heads_per_ngram)
    stored = stack(full, args.layers, base_rows(full, args.device_gib, jnp.dtype(dtype).itemsize))
    hosted = stack(full, args.layers, base_rows(full, args.host_gib, 1))
    mapped = stack(full, args.layers, base_rows(full, args.mmap_gib, 1))
    codes = aligned_empty((NgramHash.from_config(hosted, 0).rows, width), np.uint8)
    fill(codes)
    report("table in host memory filled")
    host_table = float8_table(codes, 2)
    model = build(hosted, "host", dtype, known)
    model.host_tables = [host_table]
    most = max(rows)
    on_device = make_runner(build(stored, "device", dtype, known), most, 4)
    runners = {"looked up": make_runner(model, most, 1)}
    on_host = runners["looked up"]
    reading = build(hosted, "host", dtype, known)
    reading.host_tables = [float8_table(codes, 1)]
    in_place = make_runner(reading, most, 4)
    assert in_place._ngrams is None, "the device cannot read the table in place"
    report("and read in place")
    if cuts:
        cut = make_runner(model, most, 1)
        edges = [0, *cuts, args.layers]
        cut._parts = DecodeParts(model, cut._graph, cut._structure, list(zip(edges, edges[1:])))
        runners[f"looked up, {len(cuts) + 1} parts"] = cut
    jax.block_until_ready(list(known.values()))
    arrays = len(jax.tree.leaves((on_host._parameters, on_host._state)))
    report(f"{arrays} arrays made")
    with tempfile.TemporaryDirectory(dir=args.directory) as directory:
        path = Path(directory) / "table"
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            all_runners = (on_device, in_place, *runners.values())
            jobs = [pool.submit(compiled, r, n) for n in rows for r in all_runners]
            write = pool.submit(
                written, path, NgramHash.from_config(mapped, 0).rows, width, args.write_seconds
            )
            correct = pool.submit(check)
            for job in jobs:
                job.result()
            file_rows = write.result()
            report("compiled, tables filled")
            if not correct.result():
                print("the check failed; no times are printed")
                return 1
        heads = (full.ngram_size - 1) * full.heads_per_ngram
        base = min(mapped.ngram_vocab_size_base, math.floor(file_rows / heads * 0.99))
        hash = NgramHash.from_config(dataclasses.replace(mapped, ngram_vocab_size_base=base), 0)
        table_size = {
            "device": NgramHash.from_config(stored, 0).rows * width * jnp.dtype(dtype).itemsize,
            "host": codes.nbytes,
            "looked up": codes.nbytes,
            "mmap": hash.rows * width,
        }
        out: list[dict[str, Any]] = []
        device_step: dict[tuple[int, int], float] = {}

        def measure(placement: str, runner: ModelRunner, count: int, steps: int, repeats: int) -> dict:
            batch, position = requests(count, full.vocab_size, CONTEXT), CONTEXT
            launches = max(2, args.launches // steps)
            samples = []
            for i in range(repeats + 1):
                start = time.perf_counter()
                decode(runner, batch, position, launches, steps)
                if i:
                    samples.append((time.perf_counter() - start) / launches / steps)
                position += launches * steps
            took = spread(samples)
            row = {
                "placement": placement,
                "rows": count,
                "steps_per_launch": steps,
                "seconds": took,
                "table_bytes": table_size[placement.split(",")[0]],
            }
            text = ""
            if placement == "device":
                device_step[count, steps] = took["median"]
            else:
                row |= {f"share_against_{n}": took["median"] / device_step[count, n] - 1 for n in (1, 4)}
                text = (
                    f"; costs {(took['median'] - device_step[count, steps]) * 1e6:.0f} us, "
                    f"{row['share_against_1']:.1%} of a step with the table on the device and 1 per launch, "
                    f"{row['share_against_4']:.1%} of one at 4 per launch"
                )
            out.append(row)
            print(
                f"{placement:18s} rows {count:3d}, {steps} per launch: "
                f"{took['median'] * 1e6:8.0f} us [{took['q1'] * 1e6:.0f}, {took['q3'] * 1e6:.0f}]{text}",
                flush=True,
            )
            return row

        def host_work(runner: ModelRunner, count: int) -> dict[str, float]:
            """Medians of what the host does in a step, and of hashing and gathering alone."""
            work = HostWork(runner, runner._bucket("decode", count, LONGEST // 64))
            decode(runner, requests(count, full.vocab_size, CONTEXT), CONTEXT, args.launches, 1)
            found = work.finish()
            of_model = model.ngram_hashes[0]
            windows = np.random.default_rng(1).integers(0, full.vocab_size, (100, count, full.ngram_size))
            start = time.perf_counter()
            indices = [of_model.window_rows_numpy(w) for w in windows]
            middle = time.perf_counter()
            for one in indices:
                host_table.gather(one)
            found |= {"hash": (middle - start) / 100, "gather": (time.perf_counter() - middle) / 100}
            print("   ", ", ".join(f"{name} {took * 1e6:.0f} us" for name, took in found.items()), flush=True)
            return found

        for count in rows:
            for steps in (1, 4):
                measure("device", on_device, count, steps, args.repeats)
                if steps == 4:
                    measure("host", in_place, count, 1, args.repeats)
                    measure("host", in_place, count, 4, args.repeats)
            for placement, runner in runners.items():
                row = measure(placement, runner, count, 1, args.repeats)
                row["host_work"] = host_work(runner, count)
                if args.profile:
                    batch = requests(count, full.vocab_size, CONTEXT)
                    kernels(lambda r=runner, b=batch: decode(r, b, CONTEXT, 1, 1), 12)

        for state in ("cold", "cold, random", "warm"):
            for count in rows:
                if state != "warm":
                    drop_cache(path)
                view: Any = np.memmap(path, np.uint8, "r", shape=(hash.rows, width))
                if state != "cold":
                    view._mmap.madvise(mmap.MADV_RANDOM)
                if state == "warm":
                    view[:: max(1, 4096 // width)].max()
                on_host._ngrams = NgramRows([hash], [float8_table(view, 128)], most + 1)
                measure(f"mmap, {state}", on_host, count, 1, 2)
                on_host._ngrams, view = None, None
    report("done")
    finish("ngram_placement", out, copy_bytes_per_second=bandwidth, arrays=arrays)
    return 0


if __name__ == "__main__":
    sys.exit(main())
