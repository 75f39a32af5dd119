"""The work directory of a run: finished layers, so that a run that was stopped goes on where it was."""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hybridjax.calibration.report import Module
from hybridjax.checkpoints.safetensors_file import SafetensorsFile, write_safetensors
from hybridjax.checkpoints.saving import remove_leftovers
from hybridjax.errors import CheckpointError, ConfigError
from hybridjax.json_files import read_object, write_object
from hybridjax.quantization import NVFP4

_RUN = "run.json"
_SAMPLE = 4096  # bytes of each tensor that tell checkpoints apart
_FIELDS = ("codes", "scales", "global_scale")
Weights = Mapping[str, tuple[NVFP4, float | None]]


class WorkDirectory:
    """Results by layer, valid for one fingerprint.

    Args:
      target: where the checkpoint is going to be; the work directory lies beside it.
      fingerprint: all that decides the results, as JSON.
      restart: throw away what another run has left.

    Raises:
      ConfigError: another run's results are there and ``restart`` is not set, or another run is at work.
    """

    def __init__(self, target: Path, fingerprint: Mapping[str, Any], *, restart: bool = False):
        self.path = target.with_name(f".{target.name}.quantize")
        self._aside = target.with_name(f".{target.name}.quantize.tmp")
        self._target = target
        self._fingerprint = json.loads(json.dumps(fingerprint))
        self._lock: int | None = None
        if restart and self.path.exists():
            self._acquire()
            self.remove()
        self._check()

    def _check(self) -> None:
        """Raises ConfigError if another run's results are there."""
        try:
            known = read_object(self.path / _RUN) if self.path.exists() else None
        except CheckpointError:
            known = {}
        if known is not None and known != self._fingerprint:
            changed = [k for k in {**known, **self._fingerprint} if known.get(k) != self._fingerprint.get(k)]
            raise ConfigError(
                f"{self.path} holds results of a run with another {', '.join(changed)}; repeat that run, or "
                "--restart to throw them away"
            )

    def create(self) -> None:
        """Makes the directory if it is not there, and keeps other runs away from it.

        Raises:
          ConfigError: it cannot be written, another run is at work, or has left results since this was made.
        """
        try:
            if not self.path.exists():
                fresh = self._aside
                shutil.rmtree(fresh, ignore_errors=True)
                fresh.mkdir(parents=True)
                write_object(fresh / _RUN, self._fingerprint)
                fresh.rename(self.path)
            self._acquire()
            remove_leftovers(self._target)
        except OSError as error:
            raise ConfigError(f"{self.path}: cannot be written: {error}") from error
        try:
            self._check()
        except ConfigError:
            self.release()
            raise

    def remove(self) -> None:
        """Removes the directory and lets other runs come."""
        # Whole or not at all: half a directory would be taken for another run's.
        shutil.rmtree(self._aside, ignore_errors=True)
        with contextlib.suppress(OSError):
            self.path.rename(self._aside)
        shutil.rmtree(self._aside, ignore_errors=True)
        self.release()

    def release(self) -> None:
        """Lets other runs come; idempotent. The process's end does so, too."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _acquire(self) -> None:
        if self._lock is not None:
            return
        descriptor = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            raise ConfigError(f"{self._target} is being written by another run; wait for its end") from error
        self._lock = descriptor

    def _file(self, index: int) -> Path:
        return self.path / f"layer-{index:05d}.safetensors"

    def __contains__(self, index: int) -> bool:
        return self._file(index).exists()

    def save(self, index: int, weights: Weights, modules: list[Module]) -> None:
        """Writes a finished layer; it is there whole or not at all."""
        tensors: dict[str, np.ndarray] = {}
        for name, (weight, input_scale) in weights.items():
            for field in _FIELDS:
                tensors[f"{name}|{field}"] = np.asarray(getattr(weight, field))
            if input_scale is not None:
                tensors[f"{name}|input_scale"] = np.asarray(input_scale, np.float32)
        layout = {name: (value.dtype, value.shape) for name, value in tensors.items()}
        fresh = self._file(index).with_suffix(".tmp")
        fresh.unlink(missing_ok=True)
        notes = {"modules": json.dumps([module.to_dict() for module in modules])}
        write_safetensors(fresh, layout, tensors.__getitem__, notes)
        with fresh.open("rb") as file:
            os.fsync(file.fileno())
        fresh.rename(self._file(index))

    def load(self, index: int) -> tuple[dict[str, tuple[NVFP4, float | None]], list[Module]]:
        """Opens a finished layer; arrays are views of the file."""
        file = SafetensorsFile(self._file(index))
        names = dict.fromkeys(name.rpartition("|")[0] for name in file.tensors)
        weights = {}
        for name in names:
            codes, scales, scale = (file.read(f"{name}|{field}") for field in _FIELDS)
            stored = f"{name}|input_scale"
            input_scale = float(file.read(stored)) if stored in file.tensors else None
            weights[name] = NVFP4(codes, scales, scale), input_scale  # pyright: ignore[reportArgumentType]
        return weights, [Module.from_dict(raw) for raw in json.loads(file.metadata["modules"])]


def fingerprint_of_files(files: Mapping[str, SafetensorsFile], config: Path) -> str:
    """A hash of what a checkpoint's files say of themselves, and of the first bytes of each tensor.

    Contents may be large; but files that were copied with their times are told apart, too.
    """
    digest = hashlib.sha256(config.read_bytes())
    for file in sorted({file.path for file in files.values()}):
        stat = file.stat()
        digest.update(f"{file.name} {stat.st_size} {stat.st_mtime_ns}\n".encode())
    for name, file in sorted(files.items()):
        info = file.tensors[name]
        digest.update(f"{name} {info.dtype} {info.shape} {info.start}\n".encode())
        beginning = file.read(name).reshape(-1)[: _SAMPLE // info.dtype.itemsize]
        digest.update(beginning.tobytes())
        file.release(name)
    return digest.hexdigest()
