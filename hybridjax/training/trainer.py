"""The training loop: steps, metrics, evaluations, checkpoints, and a clean stop at any of them."""

import contextlib
import dataclasses
import json
import logging
import math
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tqdm import tqdm

from hybridjax.errors import ConfigError, HybridJaxError
from hybridjax.models import ARCHITECTURES
from hybridjax.ops import dispatch
from hybridjax.training.config import ExperimentConfig
from hybridjax.training.data import PreparedData, batch_at
from hybridjax.training.evaluation import Evaluator
from hybridjax.training.optimizers import make_optimizer
from hybridjax.training.parameters import ParameterLayout, Tensors
from hybridjax.training.step import DataParallel, make_row_nats, make_train_step, split_batch

log = logging.getLogger(__name__)


class TrainingError(HybridJaxError):
    """Training cannot go on: the loss or the gradients are no longer finite."""


class Checkpoints(Protocol):
    """What the trainer needs of ``hybridjax.checkpoints.orbax_checkpoints.TrainingCheckpoints``."""

    def save(self, step: int, state: Any) -> None: ...

    def latest_step(self) -> int | None: ...

    def restore(self, step: int, like: Any) -> Any: ...

    def close(self) -> None: ...


class StopFlag(Protocol):
    """A threading.Event, for instance."""

    def is_set(self) -> bool: ...


@dataclasses.dataclass(frozen=True)
class TrainResult:
    """Where a run stands.

    Attributes:
      steps: completed updates.
      finished: whether these are all; otherwise the run can be resumed.
      tensors: float32 parameters by checkpoint name.
      tokens: targets trained on.
      seconds: time spent in training steps, over all resumes.
    """

    steps: int
    finished: bool
    tensors: Tensors
    tokens: int
    seconds: float


def build_model(config: ExperimentConfig) -> nnx.Module:
    """The experiment's model with random float32 parameters."""
    architecture = ARCHITECTURES[config.model.architecture]
    return architecture.model(config.model, dtype=jnp.float32, rngs=nnx.Rngs(config.seed))


def open_checkpoints(directory: Path, keep: int, config: dict[str, Any]) -> Checkpoints:
    """The project's Orbax checkpoints; ``config`` must be that of the run that is there already."""
    # Orbax takes seconds to import and only training needs it.
    from hybridjax.checkpoints.orbax_checkpoints import TrainingCheckpoints

    return TrainingCheckpoints(directory, keep, config=config)


class Trainer:
    """One experiment: compiled once, run in as many directories as need be.

    Args:
      config: the experiment.
      data: prepared token files; their vocabulary must be the model's.
      model: makes the model; default: by the architecture's name.
      checkpoints: opens the checkpoint directory.
      devices: default: all.
      clock: seconds, for the time limit and the speed.

    Raises:
      ConfigError: model and data do not fit together, or ``implementation`` names none.
    """

    def __init__(
        self,
        config: ExperimentConfig,
        data: PreparedData,
        *,
        model: Callable[[ExperimentConfig], Any] = build_model,
        checkpoints: Callable[[Path, int, dict[str, Any]], Checkpoints] = open_checkpoints,
        devices: Sequence[Any] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        if data.vocab_size > config.model.vocab_size:
            raise ConfigError(
                f"model.vocab_size is {config.model.vocab_size}; "
                f"the prepared data needs at least {data.vocab_size}"
            )
        dispatch.parse_override(config.implementation)
        self.config, self.data, self._clock = config, data, clock
        self.parallel = DataParallel(devices)
        module = model(config)
        if config.remat:
            module.remat = True
        self.layout = ParameterLayout.of(module, config.quantize_weights)
        self._initial = jax.device_put(self.layout.tensors(module), self.parallel.replicated)
        self._optimizer = make_optimizer(config, self._initial)
        self._step = make_train_step(self.layout, self._optimizer, config, self.parallel)
        self._row_nats = make_row_nats(
            self.layout, config.compute_dtype, self.parallel, config.implementation
        )
        self._open_checkpoints = checkpoints
        settings = config.data
        self._evaluator = Evaluator(
            data,
            length=settings.evaluation_length,
            batch=-(-settings.evaluation_batch // self.parallel.size) * self.parallel.size,
            limit=settings.evaluation_documents,
        )

    def evaluate(self, tensors: Tensors, *, per_document: bool = False) -> dict[str, Any]:
        """The held-out report (see Evaluator) of these parameters, computed in ``compute_dtype``."""
        return self._evaluator(lambda *rows: self._row_nats(tensors, *rows), per_document=per_document)

    def run(
        self,
        directory: Path,
        *,
        resume: bool = False,
        max_seconds: float | None = None,
        stop: StopFlag | None = None,
    ) -> TrainResult:
        """Trains to the end, or until the time is up or ``stop`` is set, and leaves a checkpoint.

        The directory receives ``metrics.jsonl`` (one object per logged step or evaluation) and
        ``checkpoints/`` with the settings that decide the result.

        Args:
          directory: of the run.
          resume: continue from the newest checkpoint, if there is one. Where the device computes the
            same program to the same bits (a CPU; GPUs under --xla_gpu_deterministic_ops), the result
            is that of a run that was never interrupted.
          max_seconds: of this call, before which the last step is started.
          stop: checked between steps.

        Raises:
          CheckpointError: the directory holds another experiment's run.
          ConfigError: it holds a run, and ``resume`` is False.
          TrainingError: a loss or gradient norm is not finite.
        """
        begin = self._clock()
        settings = {**deciding_settings(self.config), "train.bin": self.data.info["sha256"]["train.bin"]}
        directory.mkdir(parents=True, exist_ok=True)

        def must_stop() -> bool:
            late = max_seconds is not None and self._clock() - begin >= max_seconds
            return late or (stop is not None and stop.is_set())

        with contextlib.closing(
            self._open_checkpoints(directory / "checkpoints", self.config.keep_checkpoints, settings)
        ) as checkpoints:
            return self._run(directory, checkpoints, resume, must_stop)

    def _run(
        self, directory: Path, checkpoints: Checkpoints, resume: bool, must_stop: Callable[[], bool]
    ) -> TrainResult:
        progress = _Progress(*jax.device_put(self._start(), self.parallel.replicated))
        latest = checkpoints.latest_step()
        if latest is not None and not resume:
            raise ConfigError(f"{directory} holds a run that stands at step {latest}; resume or remove it")
        if latest is not None:
            progress.load(checkpoints.restore(latest, progress.tree()), latest)
            log.info("resuming %s at step %d of %d", self.config.name, latest, self.config.steps)
        metrics = _MetricsFile(directory / "metrics.jsonl", keep_to=progress.step)
        bar = tqdm(total=self.config.steps, initial=progress.step, unit="step", disable=None)
        saved = latest
        with contextlib.closing(bar):
            while progress.step < self.config.steps and not must_stop():
                self._advance(progress, bar, metrics)
                if self._due(progress.step, self.config.checkpoint_every):
                    checkpoints.save(progress.step, progress.tree())
                    saved = progress.step
        if saved != progress.step and progress.step:
            self._report(progress, bar, metrics)
            checkpoints.save(progress.step, progress.tree())
        finished = progress.step >= self.config.steps
        if not finished:
            log.warning("stopped at step %d of %d; --resume continues", progress.step, self.config.steps)
        return TrainResult(progress.step, finished, progress.tensors, progress.tokens, progress.seconds)

    def _start(self) -> tuple[Tensors, Any]:
        # The first step donates its inputs; the initial values stay for another run.
        tensors = jax.tree.map(jnp.copy, self._initial)
        return tensors, self._optimizer.init(tensors)

    def _advance(self, progress: "_Progress", bar: tqdm, metrics: "_MetricsFile") -> None:
        config, index = self.config, progress.step
        rows, length = config.shape_at(index)
        batch = batch_at(self.data.train, seed=config.seed, step=index, batch_size=rows, length=length)
        arrays = self.parallel.put(*split_batch(batch, config.microbatches), axis=1)
        progress.start(self._clock())
        progress.tensors, progress.opt_state, found = self._step(
            progress.tensors, progress.opt_state, np.int32(index), *arrays
        )
        progress.count(found, int(batch.mask.sum()))
        bar.update()
        step = progress.step
        evaluates = self._due(step, config.eval_every)
        if step % config.log_every == 0 or evaluates or self._due(step, config.checkpoint_every):
            self._report(progress, bar, metrics)
        if evaluates:
            report = self.evaluate(progress.tensors)
            metrics.write({"step": step, "evaluation": report})
            log.info("step %d: held-out %s", step, headline(report))

    def _due(self, step: int, every: int) -> bool:
        return step == self.config.steps or (every > 0 and step % every == 0)

    def _report(self, progress: "_Progress", bar: tqdm, metrics: "_MetricsFile") -> None:
        """Waits for the steps since the last report, checks them and writes their mean."""
        first = progress.step - len(progress.pending) + 1
        found = jax.device_get(progress.pending)
        if not found:
            return
        for step, one in enumerate(found, first):
            if not (math.isfinite(one["loss"]) and math.isfinite(one["grad_norm"])):
                raise TrainingError(
                    f"step {step}: loss {one['loss']}, gradient norm {one['grad_norm']}; "
                    "lower optimizer.learning_rate or optimizer.grad_clip and resume from the last checkpoint"
                )
        speed = progress.settle(self._clock())
        loss = float(np.mean([one["loss"] for one in found]))
        line = {
            "step": progress.step,
            "loss": loss,
            "bits_per_byte": loss / math.log(2) / self.data.bytes_per_token,
            "lr": float(found[-1]["lr"]),
            "grad_norm": float(np.mean([one["grad_norm"] for one in found])),
            "tokens": progress.tokens,
            "tokens_per_second": speed,
            **{name: float(np.mean([one[name] for one in found])) for name in self.layout.losses},
        }
        metrics.write(line)
        bar.set_postfix_str(f"loss {loss:.3f}, {speed:,.0f} tokens/s")


class _Progress:
    """What a checkpoint holds, and the metrics that were not waited for yet."""

    def __init__(self, tensors: Tensors, opt_state: Any):
        self.tensors, self.opt_state = tensors, opt_state
        self.step = self.tokens = 0
        self.seconds = 0.0
        self.pending: list[dict[str, jax.Array]] = []
        self._unreported = 0
        self._since: float | None = None

    def start(self, now: float) -> None:
        if self._since is None:
            self._since = now

    def count(self, metrics: dict[str, jax.Array], tokens: int) -> None:
        self.pending.append(metrics)
        self.step += 1
        self.tokens += tokens
        self._unreported += tokens

    def settle(self, now: float) -> float:
        """Closes the interval since the first unreported step; returns its tokens per second."""
        elapsed = max(now - self._since, 1e-9) if self._since is not None else 1e-9
        speed = self._unreported / elapsed
        self.seconds += elapsed
        self.pending, self._unreported, self._since = [], 0, None
        return speed

    def tree(self) -> dict[str, Any]:
        extra = {"tokens": self.tokens, "seconds": self.seconds}
        return {"params": self.tensors, "opt_state": self.opt_state, "extra": extra}

    def load(self, tree: dict[str, Any], step: int) -> None:
        self.tensors, self.opt_state, self.step = tree["params"], tree["opt_state"], step
        self.tokens, self.seconds = tree["extra"]["tokens"], tree["extra"]["seconds"]


class _MetricsFile:
    """JSON lines; lines of steps that are about to be repeated are removed first."""

    def __init__(self, path: Path, keep_to: int):
        self._path = path
        if path.exists():
            lines = path.read_text().splitlines(keepends=True)
            path.write_text("".join(x for x in lines if json.loads(x)["step"] <= keep_to))

    def write(self, record: dict[str, Any]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(record) + "\n")


@contextlib.contextmanager
def stop_on_signals() -> Iterator[threading.Event]:
    """An event that the first SIGTERM or SIGINT sets; a second SIGINT interrupts as usual."""
    event = threading.Event()

    def handle(number: int, frame: Any) -> None:
        event.set()
        signal.signal(number, before[signal.Signals(number)])

    numbers = (signal.SIGTERM, signal.SIGINT)
    before = {number: signal.getsignal(number) for number in numbers}
    for number in numbers:
        signal.signal(number, handle)
    try:
        yield event
    finally:
        for number in numbers:
            signal.signal(number, before[number])


def headline(report: dict[str, Any]) -> str:
    """Bits per byte by source beside xz's, in one line."""
    parts = (
        f"{name} {figures['bits_per_byte']:.4f} (xz {figures['xz_bits_per_byte']:.4f})"
        for name, figures in report.items()
        if name != "documents"
    )
    return "bits per byte: " + ", ".join(parts)


def deciding_settings(config: ExperimentConfig) -> dict[str, Any]:
    """The settings by dotted name, without those that only observe a run or say where data lies."""
    flat: dict[str, Any] = {}

    def walk(prefix: str, node: dict[str, Any]) -> None:
        for name, value in node.items():
            if isinstance(value, dict):
                walk(f"{prefix}{name}.", value)
            elif prefix != "data." and name not in _OBSERVING:
                flat[prefix + name] = value

    walk("", dataclasses.asdict(config))
    return flat


_OBSERVING = ("name", "log_every", "eval_every", "checkpoint_every", "keep_checkpoints")
