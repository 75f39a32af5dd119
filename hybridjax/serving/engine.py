"""The engine: a model, a tokenizer and a thread that serves requests. ``FrontDoor`` for servers,
``generate`` for programs."""

import atexit
import dataclasses
import functools
import logging
import math
import queue
import random
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hybridjax.configs import EngineConfig
from hybridjax.errors import CheckpointError, ConfigError, RequestError
from hybridjax.serving.api import (
    EngineInfo,
    EngineStats,
    GenerationResult,
    OnOutput,
    Prompt,
    RequestOutput,
    SamplingParams,
)
from hybridjax.serving.grammars import Grammars, grammars_available
from hybridjax.serving.image_inputs import ImageInputs
from hybridjax.serving.live import Entry
from hybridjax.serving.loop import EngineLoop
from hybridjax.serving.output import OutputProcessor, TextSource, generation_result
from hybridjax.serving.plan import Runner
from hybridjax.serving.prompt_images import PromptImages
from hybridjax.serving.request import Limits, make_request
from hybridjax.serving.scheduler import Scheduler

log = logging.getLogger(__name__)

MakeTextSource = Callable[[Any, bool], TextSource]


class Engine:
    """Serves requests until ``shutdown``; every method may be called from any thread.

    Usable as a context manager, which shuts it down at the end.

    Args:
      model_path: checkpoint directory, or the name of a bundled model.
      fields: the other fields of ``EngineConfig``.

    Raises:
      ConfigError: an unknown field, a value that cannot work, or a model that does not fit.
      CheckpointError: the checkpoint cannot be read.
    """

    def __init__(self, model_path: str = "tiny-sala", **fields: Any):
        config = _engine_config(model_path, fields)
        self._set_up(config, **_load(config))

    @classmethod
    def from_config(cls, config: EngineConfig) -> "Engine":
        """An engine for a complete configuration; raises what the constructor raises."""
        engine = cls.__new__(cls)
        engine._set_up(config, **_load(config))
        return engine

    @classmethod
    def from_parts(
        cls,
        config: EngineConfig,
        runner: Runner,
        tokenizer: Any = None,
        info: EngineInfo | None = None,
        *,
        eos_tokens: Sequence[int] = (),
        make_text_source: MakeTextSource | None = None,
        image_inputs: ImageInputs | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> "Engine":
        """An engine around a given runner, which it owns from now on.

        Args:
          config: only fields about scheduling matter.
          runner: see ``plan.Runner``.
          tokenizer: with ``encode``; None serves token ids only.
          info: what ``info`` returns (default: made from the runner).
          eos_tokens: the model's end tokens.
          make_text_source: makes a detokenizer from the tokenizer and skip_special_tokens.
          image_inputs: prepares images; None: the model takes none.
          clock: seconds.
        """
        engine = cls.__new__(cls)
        engine._set_up(
            config,
            runner,
            tokenizer,
            tuple(eos_tokens),
            info,
            make_text_source,
            clock,
            image_inputs=image_inputs,
        )
        return engine

    def _set_up(
        self,
        config: EngineConfig,
        runner: Runner,
        tokenizer: Any,
        eos_tokens: tuple[int, ...],
        info: EngineInfo | None = None,
        make_text_source: MakeTextSource | None = None,
        clock: Callable[[], float] = time.monotonic,
        sampling_defaults: Mapping[str, float] | None = None,
        image_inputs: ImageInputs | None = None,
    ) -> None:
        running = min(runner.max_decode_rows, runner.num_slots - 1)
        running = min(running, config.max_running_requests or running)
        capacity = (runner.num_pages - 1) * runner.page_size
        context = min(runner.context_length, capacity)
        sizes = getattr(runner, "sizes", None)
        self.config = config
        self.tokenizer = tokenizer
        self._limits = Limits(context, runner.vocab_size, eos_tokens)
        self._info = info or EngineInfo(
            model_name=Path(config.model_path).name,
            model_path=config.model_path,
            context_length=context,
            vocab_size=runner.vocab_size,
            max_running_requests=running,
            max_total_tokens=capacity,
            sampling_defaults=sampling_defaults or {},
            images=image_inputs and image_inputs.support,
            bytes_per_token=getattr(sizes, "bytes_per_token", 0.0),
            bytes_per_request=getattr(sizes, "bytes_per_request", 0),
        )
        self._image_inputs = image_inputs
        self._grammars = Grammars(tokenizer, runner.vocab_size, eos_tokens)
        if not config.skip_server_warmup:
            self._grammars.warm()
        self._make_text_source = make_text_source or _detokenizer
        self._clock = clock
        self._seeds = random.Random(config.random_seed)
        self._seed_lock = threading.Lock()
        scheduler = Scheduler(
            num_pages=runner.num_pages,
            num_slots=runner.num_slots,
            page_size=runner.page_size,
            max_running=running,
            max_prefill_tiles=runner.max_prefill_tiles,
            # Left open, the runner's largest prefill bucket decides.
            chunked_prefill_size=config.chunked_prefill_size or -1,
            num_decode_steps=min(config.num_continuous_decode_steps, runner.max_decode_steps),
            prefix_caching=not config.disable_radix_cache,
            prefill_sizes=getattr(runner, "prefill_sizes", ()),
            prefill_share=config.max_prefill_share,
            policy=config.schedule_policy,
            priorities=config.enable_priority_scheduling,
            queue_timeout=config.queue_timeout,
            clock=clock,
        )
        self._loop = EngineLoop(
            scheduler,
            runner,
            overlap=not config.disable_overlap_schedule,
            max_queued=config.max_queued_requests,
            clock=clock,
        )
        self._loop.start()
        # A daemon thread inside a device call would crash an interpreter that forgot to shut down.
        atexit.register(self.shutdown)

    @property
    def info(self) -> EngineInfo:
        """What a server may tell its clients."""
        return self._info

    @property
    def is_healthy(self) -> bool:
        """Whether the engine takes requests."""
        return self._loop.is_healthy

    @property
    def pulse(self) -> int | None:
        """Changes whenever the engine gets on; see ``watchdog.Watched``."""
        return self._loop.pulse

    def give_up(self, why: str) -> None:
        """Ends every request with an error although the engine hangs; see ``watchdog.Watched``."""
        self._loop.give_up(why)

    @property
    def stats(self) -> EngineStats:
        """How busy the engine is, as of its last step."""
        return self._loop.stats

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams,
        on_output: OnOutput,
        *,
        request_id: str | None = None,
        images: Sequence[np.ndarray] = (),
        priority: int = 0,
        cache_salt: str | None = None,
        timeout: float | None = None,
    ) -> str:
        """Queues a request and returns its id; see ``FrontDoor.submit``."""
        self._loop.check_accepts([request_id] if request_id is not None else [])
        entry = self._entry(
            prompt,
            params,
            on_output,
            request_id,
            images,
            priority=priority,
            cache_salt=cache_salt,
            deadline=self._deadline(timeout),
        )
        self._loop.add([entry])
        return entry.request.request_id

    def abort(self, request_id: str) -> None:
        """Ends a request within a step; see ``FrontDoor.abort``."""
        self._loop.abort(request_id)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        request_ids: Sequence[str] | None = None,
        images: Sequence[Sequence[np.ndarray]] | None = None,
    ) -> list[GenerationResult]:
        """Completes one prompt or several and waits for all of them.

        Args:
          prompts: a string, a list of token ids, or a list of such prompts; any number of them.
          params: for all prompts, or one per prompt; default: ``SamplingParams()``.
          request_ids: one per prompt, unique.
          images: of each prompt, uint8[H, W, 3] RGB in the order of its placeholders.

        Returns:
          One result per prompt, in their order. A request that failed on the way has finish_reason
          "error" and what it had generated.

        Raises:
          RequestError: some prompt cannot be served; then none is.
          EngineDeadError: the engine has stopped.
        """
        batch = _prompts(prompts)
        each = _one_per_prompt("params", params or SamplingParams(), SamplingParams, len(batch))
        ids = _one_per_prompt("request_ids", request_ids, type(None), len(batch))
        pictures = _one_per_prompt("images", images, type(None), len(batch))
        finished: queue.SimpleQueue[int] = queue.SimpleQueue()
        events: list[list[RequestOutput]] = [[] for _ in batch]

        def on_output(index: int, event: RequestOutput) -> None:
            events[index].append(event)
            if event.finish_reason is not None:
                finished.put(index)

        entries = [
            self._entry(
                prompt,
                params,
                functools.partial(on_output, i),
                request_id,
                own or (),
                deadline=self._deadline(None),
            )
            for i, (prompt, params, request_id, own) in enumerate(zip(batch, each, ids, pictures))
        ]
        self._loop.add(entries, bounded=False)
        try:
            for _ in entries:
                finished.get()
        except BaseException:
            for entry in entries:
                self.abort(entry.request.request_id)
            raise
        return [generation_result(entry.request, list_) for entry, list_ in zip(entries, events)]

    def check_integrity(self) -> None:
        """Raises PoolError unless the queues, lengths and pools agree with each other."""
        self._loop.check_integrity()

    def flush_cache(self) -> None:
        """Forgets every cached prefix; running requests are untouched."""
        self._loop.flush_cache()

    def shutdown(self) -> None:
        """Aborts every request, ends the thread and frees the device's memory; idempotent."""
        atexit.unregister(self.shutdown)
        self._loop.stop()
        self._grammars.close()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()

    def _entry(
        self,
        prompt: Prompt,
        params: SamplingParams,
        on_output: OnOutput,
        request_id: str | None,
        images: Sequence[np.ndarray] = (),
        **scheduling: Any,
    ) -> Entry:
        """Checks a request and makes what the loop needs to run it."""
        if not isinstance(prompt, str):
            ids = prompt
        elif not prompt:
            raise RequestError("the prompt is empty; it must have at least one character", param="prompt")
        elif self.tokenizer is None:
            raise RequestError(
                "this engine has no tokenizer; the prompt must be a list of token ids", param="prompt"
            )
        else:
            ids = self.tokenizer.encode(prompt)
        if self.tokenizer is None and params.stop:
            raise RequestError("stop strings need a tokenizer, which this engine has not", param="stop")
        ids, prompt_images = self._with_images(ids, images)
        request = make_request(
            f"req-{uuid.uuid4().hex}" if request_id is None else request_id,
            ids,
            params,
            self._limits,
            seed=self._next_seed(),
            arrival=self._clock(),
            images=prompt_images,
            **scheduling,
        )
        request.matcher = self._grammars.matcher(params)
        text_source = None
        if self.tokenizer is not None:
            text_source = self._make_text_source(self.tokenizer, params.skip_special_tokens)
        return Entry(request, OutputProcessor(request, text_source), on_output)

    def _with_images(self, ids: Any, images: Sequence[np.ndarray]) -> tuple[Any, PromptImages | None]:
        """The ids with placeholders expanded, and what a request carries of its images."""
        if self._image_inputs is not None:
            return self._image_inputs.prepare(ids, images, self._limits)
        if images:
            raise RequestError(
                "the prompt has images; this model takes text only",
                param="messages",
                code="images_not_supported",
            )
        return ids, None

    def _deadline(self, timeout: float | None) -> float | None:
        """When a request ends by its own or the operator's limit, on the engine's clock."""
        if timeout is not None and not (type(timeout) in (int, float) and 0 < timeout < math.inf):
            raise RequestError(
                f"timeout is {timeout!r}; it must be a number of seconds above 0", param="timeout"
            )
        limits = [s for s in (timeout, self.config.request_timeout) if s is not None]
        return self._clock() + min(limits) if limits else None

    def _next_seed(self) -> int:
        with self._seed_lock:
            return self._seeds.getrandbits(63)


def _engine_config(model_path: str, fields: dict[str, Any]) -> EngineConfig:
    known = [field.name for field in dataclasses.fields(EngineConfig)]
    unknown = [name for name in fields if name not in known]
    if unknown:
        raise ConfigError(f"unknown engine setting {unknown[0]!r}; known: {', '.join(known)}")
    return EngineConfig(model_path=model_path, **fields)


def _load(config: EngineConfig) -> dict[str, Any]:
    """What ``_set_up`` needs from a checkpoint directory; everything small is read before the weights."""
    import jax

    from hybridjax.checkpoints import generation_config, load_config, load_model, resolve
    from hybridjax.ops import parse_override
    from hybridjax.serving.quantized import check_quantization, prepare
    from hybridjax.serving.runner import ModelRunner, enable_compilation_cache
    from hybridjax.serving.sizing import ngram_layers, ngram_table_placement, pool_sizes
    from hybridjax.text import load_tokenizer

    directory = resolve(config.model_path)
    parse_override(config.implementation)  # names that do not exist are told before anything is loaded
    generation = generation_config(directory)
    sampling_defaults = _sampling_defaults(directory, generation)
    architecture = load_config(directory)
    if getattr(architecture, "dense_switch", "position") != "position":
        raise ConfigError(
            f"dense_switch is {architecture.dense_switch!r}; it must be 'position' for serving: under the "
            "call rule tokens depend on how a prompt is cut"
        )
    tokenizer = None
    if config.skip_tokenizer_init:
        pass
    elif config.tokenizer_path is not None or (directory / "tokenizer.json").exists():
        tokenizer = load_tokenizer(config.tokenizer_path or directory)
    else:
        log.warning("%s has no tokenizer.json: only token ids are served", directory)
    on_cpu = jax.default_backend() == "cpu"
    dtype = "float32" if config.dtype == "auto" and on_cpu else config.dtype
    placement = ngram_table_placement(config, architecture)
    if config.ple_offload != "auto" and not ngram_layers(architecture):
        log.warning("ple_offload is %s, but %s has no n-gram table", config.ple_offload, directory.name)
    check_quantization(config, directory)
    model = load_model(directory, dtype, ple_offload=placement)
    prepare(config, model)
    enable_compilation_cache(config.compilation_cache_dir)
    vocab_limit = None
    if tokenizer is not None and tokenizer.id_limit < architecture.vocab_size:
        vocab_limit = tokenizer.id_limit
    named = generation.eos_token_id
    eos_tokens = model.config.eos_token_id if named is None else named
    grammars = grammars_available(tokenizer, architecture.vocab_size, eos_tokens)
    sizes = pool_sizes(config, model)
    log.info("%s", sizes.summary)
    runner = ModelRunner(model, config, sizes, vocab_limit=vocab_limit, grammars=grammars)
    image_inputs = None
    if hasattr(architecture, "vision_config"):
        image_inputs = ImageInputs.load(directory, architecture, config)
    return {
        "image_inputs": image_inputs,
        "runner": runner,
        "tokenizer": tokenizer,
        "eos_tokens": eos_tokens,
        "sampling_defaults": sampling_defaults,
    }


def _sampling_defaults(directory: Path, generation: Any) -> dict[str, float]:
    """What the checkpoint recommends for the fields that it names, as vLLM and SGLang read it."""
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    found = {name: value for name in names if (value := getattr(generation, name)) is not None}
    try:
        SamplingParams(**found)
    except RequestError as error:
        raise CheckpointError(f"{directory}: generation_config.json: {error}") from None
    return found


def _detokenizer(tokenizer: Any, skip_special_tokens: bool) -> TextSource:
    from hybridjax.text import Detokenizer

    return Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens)


def _prompts(prompts: Any) -> list[Any]:
    """A list of prompts from one prompt or several; a list that starts with a number is one prompt."""
    if isinstance(prompts, str) or (isinstance(prompts, np.ndarray) and prompts.ndim == 1):
        return [prompts]
    prompts = list(prompts)
    if prompts and isinstance(prompts[0], int | np.integer):
        return [prompts]
    return prompts


def _one_per_prompt(name: str, value: Any, single: type, count: int) -> list[Any]:
    if isinstance(value, single):
        return [value] * count
    values = list(value)
    if len(values) != count:
        raise RequestError(f"{name} has {len(values)} entries for {count} prompts", param=name)
    return values
