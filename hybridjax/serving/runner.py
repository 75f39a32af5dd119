"""The device side of the engine: from plans to launched programs, from outputs to results."""

import concurrent.futures
import contextlib
import dataclasses
import functools
import logging
import os
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tqdm import tqdm

from hybridjax.batch import TILE, RecurrentCache
from hybridjax.configs import EngineConfig
from hybridjax.ops.dispatch import override
from hybridjax.ops.sampling import init_sampler_state, neutral_rows, reset_slot, seed_words
from hybridjax.serving.api import MAX_LOGIT_BIAS
from hybridjax.serving.compiling import Programs, abstract
from hybridjax.serving.decode_parts import DecodeParts
from hybridjax.serving.image_features import ImageFeatures
from hybridjax.serving.mapped_tables import map_tables
from hybridjax.serving.ngram_rows import NgramRows
from hybridjax.serving.plan import (
    DecodeRow,
    NotLaunchedError,
    PrefillPlan,
    PrefillRow,
    PromptScores,
    StepResult,
)
from hybridjax.serving.programs import (
    STEPS,
    Bucket,
    DeviceState,
    Extras,
    StepOutput,
)
from hybridjax.serving.request import Request
from hybridjax.serving.sizing import PoolSizes, buckets, mask_counts, prefill_tiles
from hybridjax.serving.token_masks import TokenMasks, row_masks

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Launched:
    """A step under way: its output on the device and how to read it.

    ``scored``: by column, a chunk's start, its first row in the step, and how many of its rows are scored.
    """

    output: StepOutput
    rows: int
    num_steps: int
    wants_top: bool
    scored: dict[int, tuple[int, int, int]] = dataclasses.field(default_factory=dict)


class ModelRunner:
    """Runs a model for the engine. Implements plan.Runner; called from one thread only.

    Owns the parameters (split off the module once) and the ``DeviceState``, which every launch donates
    and replaces. A launch returns before the device has finished; results are copied to the host in
    the background and read later.

    Args:
      model: a CausalLM.
      config: engine settings.
      sizes: pool sizes.
      progress: show a progress bar while compiling.
      vocab_limit: ids from here on are never sampled: rows of lm_head that no token stands for.
      grammars: whether requests may have grammars: their programs are compiled at start, too.
    """

    def __init__(
        self,
        model: Any,
        config: EngineConfig,
        sizes: PoolSizes,
        *,
        progress: bool | None = None,
        vocab_limit: int | None = None,
        grammars: bool = False,
    ):
        self.config = config
        self.sizes = sizes
        self.num_pages, self.num_slots = sizes.num_pages, sizes.num_slots
        self.page_size = sizes.page_size
        self.max_decode_rows = sizes.max_running_requests
        self.max_prefill_tiles = prefill_tiles(config, sizes)
        self.vocab_size = model.config.vocab_size
        self.context_length = sizes.context_length
        self._ngrams = None
        self._mapped = map_tables(model)
        if getattr(model, "host_tables", None):
            self._ngrams = NgramRows(model.ngram_hashes, model.host_tables, sizes.num_slots)
        # Without the tokens of one step the host cannot look up the n-grams of the next.
        self.max_decode_steps = 1 if self._ngrams else config.num_continuous_decode_steps
        self._graph, parameters = nnx.split(model, nnx.Param)
        # Launches take a plain list: flattening nnx's containers costs more than launching a thousand arrays.
        self._parameters, self._structure = jax.tree.flatten(parameters)
        self._parts = DecodeParts(model, self._graph, self._structure) if self._ngrams else None
        self._programs = Programs()
        self._images = None
        if hasattr(model, "visual"):
            self._images = ImageFeatures(self._graph, parameters, model.config, model.dtype, self._programs)
        self._init_caches = functools.partial(model.init_state, sizes.num_pages, sizes.num_slots)
        self._make_state = jax.jit(self._new_state)
        self._state: DeviceState | None = self._make_state()
        self._buckets = buckets(
            config,
            sizes,
            steps=self.max_decode_steps,
            images=self._images is not None,
            vocab_limit=vocab_limit,
        )
        self.prefill_sizes = tuple(sorted({b.rows for b in self._buckets if b.mode == "prefill"}))
        self._reset = jax.jit(reset_slot, donate_argnums=0)
        self._token_masks = TokenMasks(self.vocab_size, mask_counts(sizes), self._programs)
        if not config.skip_server_warmup:
            self._compile_all(progress)
            self._reset_slot(0, np.zeros(0, np.int32), {})
            if grammars:
                state = self._live_state()
                self._state = DeviceState(state.caches, self._token_masks.warm(state.sampler))

    def admit(self, request: Request) -> None:
        """Prepares the slot's penalty counts and bias; see plan.Runner."""
        if not request.needs_sampler_reset:
            return
        self._reset_slot(request.slot, request.prompt_ids, request.params.logit_bias)

    @property
    def is_compiling(self) -> bool:
        """Whether a program is being compiled at its first use; for the watchdog, from any thread."""
        return self._programs.is_compiling

    def launch(self, plan: Any) -> Launched:
        """Dispatches a step; see plan.Runner."""
        try:
            prepare = self._prefill_inputs if isinstance(plan, PrefillPlan) else self._decode_inputs
            bucket, fields, extras = prepare(plan)
            masks = row_masks(plan.rows)
            fields["use_mask"][list(masks)] = True
            program = self._programs.late(bucket, lambda: self._compile(bucket))
        except NotLaunchedError:
            raise
        except Exception as error:
            raise NotLaunchedError(f"the step could not be prepared: {error}") from error
        state, self._state = self._live_state(), None
        if masks:
            by_slot = {plan.rows[column].request.slot: mask for column, mask in masks.items()}
            state = DeviceState(state.caches, self._token_masks.write(state.sampler, by_slot))
        if self._ngrams is not None and not isinstance(plan, PrefillPlan):
            assert self._parts is not None
            output, self._state = self._parts.launch(
                program,
                self._parameters,
                state,
                fields[""],
                functools.partial(self._ngrams.decode, plan.rows, bucket.rows),
            )
        else:
            output, self._state = program(self._parameters, state, fields[""], extras)
        if self._ngrams is not None:
            self._ngrams.sampled(output.tokens, plan.rows)
        wants_top = any(row.request.wants_top_logprobs for row in plan.rows)
        output.tokens.copy_to_host_async()
        output.logprobs.copy_to_host_async()
        scored = _scored(plan) if isinstance(plan, PrefillPlan) else {}
        for array in jax.tree.leaves(output.prompt) if scored else ():
            array.copy_to_host_async()
        return Launched(output, len(plan.rows), plan.num_steps, wants_top, scored)

    def read(self, handle: Launched) -> StepResult:
        """Blocks until the step is done; see plan.Runner."""
        out, pick = handle.output, np.s_[: handle.num_steps, : handle.rows]
        top = (None, None)
        if handle.wants_top:
            top = np.asarray(out.top_ids)[pick], np.asarray(out.top_logprobs)[pick]
        scores = {}
        if handle.scored:
            prompt = out.prompt
            assert prompt is not None
            whole = [np.asarray(x) for x in (prompt.sampled, prompt.top_ids, prompt.top_logprobs)]
            for column, (start, begin, count) in handle.scored.items():
                scores[column] = PromptScores(start, *(x[begin : begin + count].copy() for x in whole))
        return StepResult(np.asarray(out.tokens)[pick], np.asarray(out.logprobs)[pick], *top, scores)

    def recover(self) -> bool:
        """Makes new, empty state after a failed step; see plan.Runner."""
        try:
            self._drop_state()
            if self._ngrams is not None:
                self._ngrams.forget()
            self._state = jax.block_until_ready(self._make_state())
        except Exception:
            logger.exception("the device state could not be made anew")
            return False
        return True

    def close(self) -> None:
        """Frees the device arrays; idempotent."""
        if self._mapped and self._state is not None:
            with contextlib.suppress(Exception):  # a step that has failed has said so already
                jax.block_until_ready(self._state)  # no step may still read the memory
        self._drop_state()
        for leaf in jax.tree.leaves(self._parameters):
            if not leaf.is_deleted():
                leaf.delete()
        for memory in self._mapped:
            memory.close()
        self._programs.clear()

    def slot_state(self, slot: int) -> list[np.ndarray]:
        """Copies of a slot's recurrent states, one per linear layer, for tests and notebooks."""
        caches = self._live_state().caches
        return [np.asarray(c.state[slot]) for c in caches if isinstance(c, RecurrentCache)]

    def _new_state(self) -> DeviceState:
        return DeviceState(self._init_caches(), init_sampler_state(self.num_slots, self.vocab_size))

    def _live_state(self) -> DeviceState:
        if self._state is None:
            raise RuntimeError("the device state was lost in a failed step")
        return self._state

    def _drop_state(self) -> None:
        for leaf in jax.tree.leaves(self._state):
            if not leaf.is_deleted():
                leaf.delete()
        self._state = None

    def _bucket(self, mode: str, rows: int, pages: int) -> Bucket:
        """The smallest compiled shape that holds this many tiles or rows and page columns."""
        return next(b for b in self._buckets if b.mode == mode and b.rows >= rows and b.pages >= pages)

    def _prefill_inputs(self, plan: PrefillPlan) -> tuple[Bucket, dict[str, np.ndarray], Extras]:
        tiles = [-(-(row.end - row.start) // TILE) for row in plan.rows]
        pages = max(-(-row.end // self.page_size) for row in plan.rows)
        bucket = self._bucket("prefill", sum(tiles), pages)
        fields = bucket.layout.empty()
        _fill_sampling(fields, plan.rows)
        fields["positions"][:] = -1
        fields["tile_sequence"][sum(tiles) :] = bucket.rows - 1
        fields["targets"][:] = -1
        first, begins = 0, []
        for i, (row, count) in enumerate(zip(plan.rows, tiles)):
            begins.append(first * TILE)
            begin, length = first * TILE, row.end - row.start
            fields["tokens"][begin : begin + length] = row.request.prompt_ids[row.start : row.end]
            fields["positions"][begin : begin + length] = np.arange(row.start, row.end)
            fields["tile_sequence"][first : first + count] = i
            fields["logit_rows"][i] = begin + length - 1
            fields["emits"][i] = row.is_last
            fields["context_length"][i] = row.end
            fields["initial_slot"][i] = row.initial_slot
            for position, slot in row.snapshots:
                fields["snapshot_slot"][first + (position - row.start) // TILE - 1] = slot
            _fill_pages(fields, i, row.request, -(-row.end // self.page_size))
            if row.wants_scores:
                following = row.request.prompt_ids[row.start + 1 : row.end + 1]
                fields["targets"][begin : begin + len(following)] = following
                fields["scored_tiles"][...] = first + count
            first += count
        chunks = list(zip(plan.rows, begins))
        features = self._images.fill(fields, chunks) if self._images is not None else None
        rows = self._ngrams.prefill(chunks, bucket.rows * TILE) if self._ngrams is not None else None
        return bucket, fields, Extras(rows, features)

    def _decode_inputs(self, plan: Any) -> tuple[Bucket, dict[str, np.ndarray], Extras]:
        pages = max(-(-(row.position + row.steps) // self.page_size) for row in plan.rows)
        bucket = self._bucket("decode", len(plan.rows), pages)
        fields = bucket.layout.empty()
        _fill_sampling(fields, plan.rows)
        fields["positions"][:] = -1
        fields["num_steps"][...] = plan.num_steps
        for i, row in enumerate(plan.rows):
            fields["positions"][i] = row.position
            fields["steps"][i] = row.steps
            if self._images is not None:
                fields["rope_delta"][i] = row.request.rope_delta
            _fill_pages(fields, i, row.request, -(-(row.position + row.steps) // self.page_size))
        return bucket, fields, Extras()

    def _reset_slot(self, slot: int, prompt_ids: np.ndarray, bias: Mapping[int, float]) -> None:
        state = self._live_state()
        prompt = np.full(self.vocab_size, -1, np.int32)
        seen = np.unique(prompt_ids)
        prompt[: len(seen)] = seen
        ids, values = np.full(MAX_LOGIT_BIAS, -1, np.int32), np.zeros(MAX_LOGIT_BIAS, np.float32)
        ids[: len(bias)] = list(bias)
        values[: len(bias)] = list(bias.values())
        inputs = state.sampler, np.int32(slot), prompt, ids, values
        reset = self._programs.late("reset", lambda: self._reset.lower(*abstract(inputs)).compile())
        self._state = DeviceState(state.caches, reset(*inputs))

    def _compile(self, bucket: Bucket) -> Any:
        """The bucket's program, or those of a decode step with tables on the host."""
        parameters, state = abstract((self._parameters, self._live_state()))
        buffer = jax.ShapeDtypeStruct((bucket.layout.size,), jnp.int32)

        def run(leaves: Any, *inputs: Any) -> Any:
            model = jax.tree.unflatten(self._structure, leaves)
            return STEPS[bucket.mode](self._graph, bucket, model, *inputs)

        with override(self.config.implementation):
            if bucket.mode == "decode" and self._parts is not None and self._ngrams is not None:
                rows = self._ngrams.shapes(bucket.rows)
                program = self._parts.compile(bucket, parameters, state, rows)
            else:
                step = jax.jit(run, donate_argnums=1)
                program = step.lower(parameters, state, buffer, self._extras(bucket)).compile()
        self._programs[bucket] = program
        return program

    def _extras(self, bucket: Bucket) -> Extras:
        """Shapes of the large inputs of a bucket's single program."""
        if bucket.mode == "decode":
            return Extras()
        rows = bucket.rows * TILE
        return Extras(
            ngram_rows=self._ngrams.shapes(rows) if self._ngrams is not None else None,
            features=self._images.shape(rows) if self._images is not None else None,
        )

    def _compile_all(self, progress: bool | None) -> None:
        hidden = not sys.stderr.isatty() if progress is None else not progress
        start = time.monotonic()
        logger.info("compiling %d programs", len(self._buckets))
        workers = min(len(self._buckets), os.cpu_count() or 1)
        pool = concurrent.futures.ThreadPoolExecutor(workers)
        try:
            jobs = [pool.submit(self._compile, bucket) for bucket in self._buckets]
            done: Iterable[Any] = concurrent.futures.as_completed(jobs)
            for job in tqdm(done, total=len(jobs), desc="compiling", unit="program", disable=hidden):
                job.result()
        finally:
            # An interrupt or an error waits for the programs being compiled, not for all that are queued.
            pool.shutdown(cancel_futures=True)
        logger.info("compiled after %.1f s", time.monotonic() - start)


def enable_compilation_cache(directory: str | None) -> None:
    """Keeps compiled programs between starts; None: ~/.cache/hybridjax, '': nowhere."""
    if directory == "":
        return
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    path = Path(directory) if directory else base / "hybridjax" / "xla"
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def _scored(plan: PrefillPlan) -> dict[int, tuple[int, int, int]]:
    """See Launched.scored; the prompt's last token predicts none of its own."""
    found, first = {}, 0
    for column, row in enumerate(plan.rows):
        if row.wants_scores:
            found[column] = row.start, first * TILE, row.end - row.start - row.is_last
        first += row.tiles
    return found


def _fill_pages(fields: dict[str, np.ndarray], row: int, request: Request, count: int) -> None:
    fields["page_table"][row, :count] = request.pages[:count]


def _fill_sampling(fields: dict[str, np.ndarray], rows: Sequence[PrefillRow | DecodeRow]) -> None:
    """Slots, stop tokens and sampling settings of each row; neutral settings for padding."""
    for name, value in _neutral(len(fields["slot"])).items():
        fields[name][:] = value
    fields["stop_tokens"][:] = -1
    fields["forced"][:] = -1
    for i, row in enumerate(rows):
        try:
            _fill_row(fields, i, row.request)
        except Exception as error:
            message = f"settings that the device cannot take: {error}"
            raise NotLaunchedError(message, [row.request]) from error
        fields["forced"][i, : len(row.forced)] = row.forced


def _fill_row(fields: dict[str, np.ndarray], i: int, request: Request) -> None:
    params, stops = request.params, request.device_stop_tokens
    fields["slot"][i] = request.slot
    fields["stop_tokens"][i, : len(stops)] = stops
    fields["min_position"][i] = request.min_position
    fields["seed"][i] = seed_words(request.seed)
    fields["use_bias"][i] = bool(params.logit_bias)
    fields["want_top"][i] = request.wants_top_logprobs
    for name in _SETTINGS:
        fields[name][i] = getattr(params, name)


_SETTINGS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)


@functools.lru_cache(maxsize=64)
def _neutral(rows: int) -> dict[str, np.ndarray]:
    settings = neutral_rows(rows)
    return {f.name: np.asarray(getattr(settings, f.name)) for f in dataclasses.fields(settings)}
