"""A checkpoint into NVFP4, layer by layer: check, calibrate, quantise, write, measure."""

import dataclasses
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tqdm

from hybridjax import __version__
from hybridjax.calibration import output, report
from hybridjax.calibration.observe import observe
from hybridjax.calibration.perplexity import Perplexity, measure
from hybridjax.calibration.results import WorkDirectory, fingerprint_of_files
from hybridjax.calibration.rounding import dequantised, round_layer
from hybridjax.calibration.selection import Plan, make_plan
from hybridjax.calibration.settings import Settings
from hybridjax.calibration.streaming import LayerStream
from hybridjax.calibration.text import Sample, batches, cut, evenly, hold_out, read_documents
from hybridjax.checkpoints import check_target, load_tokenizer, nvfp4, resolve
from hybridjax.checkpoints.saving import resolved_target
from hybridjax.configs.validation import check
from hybridjax.errors import ConfigError

_FORMAT = 1  # of work directories


@dataclasses.dataclass(frozen=True)
class Texts:
    """What a model is calibrated and evaluated on; either may be empty."""

    calibration: list[Sample]
    evaluation: list[Sample]


def read_texts(
    source: Path, settings: Settings, calibration: Path | None, evaluation: Path | None, context: int
) -> Texts:
    """Samples of the text files; without an evaluation file, the calibration text's last tenth.

    Raises:
      ConfigError: a text is needed and missing, or a file cannot be used.
    """
    if calibration is None:
        if settings.method == "gptq":
            raise ConfigError("method gptq needs a calibration text; give --calibration, or --method rtn")
        if not settings.weights_only:
            raise ConfigError(
                "input scales for W4A4 need a calibration text; give --calibration, or --weights-only"
            )
    if calibration is None and evaluation is None:
        return Texts([], [])
    tokenizer: Any = load_tokenizer(source)
    length = min(settings.calibration_length, context)
    found: list[Sample] = []
    held: list[Sample] = []
    if calibration is not None:
        found = cut(
            read_documents(calibration, tokenizer), tokenizer, length, lengths=settings.calibration_lengths
        )
        if evaluation is None:
            found, held = hold_out(found)
        found = evenly(found, settings.calibration_samples)
    if evaluation is not None:
        held = cut(read_documents(evaluation, tokenizer), tokenizer, length)
    if calibration is not None and not found:
        raise ConfigError(f"{calibration}: holds too little text")
    if evaluation is not None and not held:
        raise ConfigError(f"{evaluation}: holds too little text")
    return Texts(found, evenly(held, settings.calibration_samples))


class Quantization:
    """One run, checked: whatever can be known to fail has failed when this is made.

    Args:
      source: a model directory or a bundled model's name.
      target: the directory to create or replace.
      form: one of nvfp4.FORMATS.
      settings: how.
      calibration, evaluation: text files, see ``read_texts``.
      dtype: of the computation; None: the checkpoint's.
      report_file: where the report goes; None: ``<target>.report.json`` beside the target.
      restart: throw away what a run with other settings has left.
      progress: whether to show a progress bar; None: only on a terminal.

    Raises:
      ConfigError, CheckpointError: it cannot work; says why.
    """

    def __init__(
        self,
        source: str | Path,
        target: Path,
        form: str,
        settings: Settings,
        *,
        calibration: Path | None = None,
        evaluation: Path | None = None,
        dtype: Any = None,
        report_file: Path | None = None,
        restart: bool = False,
        progress: bool | None = None,
    ):
        check(form in nvfp4.FORMATS, "format", form, f"one of {', '.join(nvfp4.FORMATS)}")
        self.source, self.target = resolve(source), resolved_target(target)
        if self.target == self.source.resolve():
            raise ConfigError(
                f"output is {target}, the model that is to be quantised; give another directory"
            )
        self.form, self.settings, self.dtype = form, settings, dtype
        self.report_file = report_file or self.target.with_name(self.target.name + ".report.json")
        if self.report_file.suffix != ".json":
            raise ConfigError(f"report is {self.report_file}; it must end in .json")
        report.check_writable(self.report_file)
        check_target(self.target)
        self.stream = LayerStream(self.source, dtype)
        text = getattr(self.stream.model.config, "text_config", self.stream.model.config)
        self.texts = read_texts(self.source, settings, calibration, evaluation, text.max_position_embeddings)
        vocabulary = text.vocab_size
        for sample in (*self.texts.calibration, *self.texts.evaluation):
            if sample.ids.max() >= vocabulary:
                raise ConfigError(
                    f"the tokenizer gives id {sample.ids.max()}; the model's vocabulary has {vocabulary}"
                )
        self.plan: Plan = make_plan(self.stream.model, self.stream.weights, settings.skip)
        replaced = output.replaced_by(self.plan, self.stream.layout)
        output.check_weights(list(replaced), self.stream.weights)
        self._checkpoint = self._files()
        self.work = WorkDirectory(self.target, self._fingerprint(), restart=restart)
        self._hidden = None if progress is None else not progress

    def _files(self) -> str:
        return fingerprint_of_files(self.stream.weights, self.source / "config.json")

    def _fingerprint(self) -> dict[str, Any]:
        digest = hashlib.sha256()
        for sample in self.texts.calibration:
            digest.update(np.int64(len(sample.ids)).tobytes() + sample.ids.tobytes())
        return {
            "format": _FORMAT,
            "version": __version__,
            "checkpoint": self._checkpoint,
            "calibration text": digest.hexdigest(),
            "dtype": self.stream.model.dtype.name,
            "device": jax.devices()[0].device_kind,
            **dataclasses.asdict(self.settings),
        }

    def run(self) -> dict[str, Any]:
        """Quantises, writes the checkpoint and the report, and returns the latter's content."""
        self.work.create()
        try:
            return self._run()
        finally:
            self.work.release()

    def _run(self) -> dict[str, Any]:
        evaluations = self._evaluations()
        found: dict[str, Perplexity] = {}
        with tqdm.tqdm(
            total=self.stream.count * (1 + len(evaluations)), unit="layer", disable=self._hidden
        ) as bar:
            bar.set_description("quantising")
            content = self._convert(bar.update)
            for name, (directory, activations) in evaluations.items():
                bar.set_description(f"evaluating {name}")
                found[name] = measure(
                    directory,
                    self.texts.evaluation,
                    dtype=self.dtype,
                    activations=activations,
                    against=found.get("before"),
                    step=bar.update,
                )
        content = content | {"perplexity": report.perplexities(found)}
        report.write(content, self.report_file)
        self.work.remove()
        return content

    def quantize(self, step: Callable[[], object] = lambda: None) -> dict[str, Any]:
        """Quantises and writes the checkpoint alone; returns the report without perplexities.

        The work directory stays, so that a repeated run has nothing to do but what comes after.
        """
        self.work.create()
        try:
            return self._convert(step)
        finally:
            self.work.release()

    def _convert(self, step: Callable[[], object]) -> dict[str, Any]:
        self._quantize(step)
        if self._files() != self._checkpoint:
            raise ConfigError(
                f"{self.source} was changed while it was read, so that layers of two models may be mixed; "
                "quantise it again with --restart"
            )
        output.write(
            self.source,
            self.target,
            self.work,
            self.plan,
            self.stream.layout,
            self.stream.weights,
            self.form,
        )
        done = [index for index, layer in enumerate(self.plan.layers) if layer.entries]
        modules = [module for index in done for module in self.work.load(index)[1]]
        calibration = {
            "samples": len(self.texts.calibration),
            "tokens": sum(len(sample.ids) for sample in self.texts.calibration),
        }
        settings = {"model": str(self.source), "format": self.form, **dataclasses.asdict(self.settings)}
        return report.build(settings | {"calibration": calibration}, modules)

    def _evaluations(self) -> dict[str, tuple[Path, str]]:
        """What is evaluated: the directory, and what its weights do with activations."""
        if not self.texts.evaluation:
            return {}
        out = {"before": (self.source, "w4a16"), "after, W4A16": (self.target, "w4a16")}
        if self.texts.calibration and not self.settings.weights_only:
            out["after, W4A4"] = (self.target, "w4a4")
        return out

    def _quantize(self, step: Callable[[], object]) -> None:
        work = batches(self.texts.calibration)
        hidden: list[np.ndarray] = [self.stream.embed(tokens) for tokens in work]
        for index, plan in enumerate(self.plan.layers):
            if not self._nothing_left(index):
                layer = self.stream.layer(index)
                rows = [self.stream.ngram_rows(index, tokens) for tokens in work]
                if plan.entries and index not in self.work:
                    inputs = [(h, t.whole(), r) for h, t, r in zip(hidden, work, rows, strict=True)]
                    seen = observe(layer, plan, inputs) if work else None
                    self.work.save(index, *round_layer(layer.parameters(), plan, seen, self.settings))
                needed = bool(work) and not self._nothing_left(index + 1)
                if needed and plan.entries:
                    # From the file also where it was rounded just now: so a resumed run sees the same.
                    layer.update(dequantised(layer.parameters(), plan, self.work.load(index)[0]))
                for i, tokens in enumerate(work if needed else ()):
                    hidden[i] = layer(hidden[i], tokens.whole(), rows[i])
            step()

    def _nothing_left(self, index: int) -> bool:
        """Whether this layer and all behind it are finished."""
        later = range(index, len(self.plan.layers))
        return all(i in self.work for i in later if self.plan.layers[i].entries)
