"""Writes a model as a directory that Hugging Face's tools and ``load_model`` read."""

import os
import shutil
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hybridjax.checkpoints.directory import INDEX, SINGLE
from hybridjax.checkpoints.generation import FILE as GENERATION_CONFIG
from hybridjax.checkpoints.generation import GenerationDefaults
from hybridjax.checkpoints.parameters import Parameter, parameters_of
from hybridjax.checkpoints.safetensors_file import write_safetensors
from hybridjax.errors import CheckpointError
from hybridjax.json_files import write_object
from hybridjax.models.base import TensorEntry

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
)
_METADATA = {"format": "pt"}  # transformers refuses files without it

Tensor = tuple[Parameter, TensorEntry]


def save_pretrained(
    model: Any,
    directory: str | Path,
    *,
    max_shard_bytes: int = 5 * 2**30,
    tokenizer_dir: str | Path | None = None,
    extra_files: Mapping[str, bytes | str] | None = None,
) -> None:
    """Saves a model under the released tensor names and shapes.

    Writes config.json, generation_config.json and model.safetensors, or shards with an index. All is
    written to a temporary directory beside the target and renamed at the end, so a crash leaves either
    the old state or the new one. A checkpoint that is there already is replaced.

    A loaded model keeps what its JSON files said beyond what is read here, except ``auto_map``: it names
    code that would not be in the new directory.

    Args:
      model: a module of one of the registered architectures.
      directory: the directory to create or replace.
      max_shard_bytes: tensor bytes per file; a single larger tensor gets a file of its own.
      tokenizer_dir: where to copy tokenizer files from; None keeps those the target already has.
      extra_files: further files by name, for instance a model card. A checkpoint that has all of them
        is replaced with them.

    Raises:
      CheckpointError: the target holds files that are no part of a checkpoint, its parent directory
        cannot be written, or tokenizer_dir has no tokenizer.json.
    """
    extra_files = extra_files or {}
    target = Path(directory).expanduser().resolve()
    _check_replaceable(target, extra_files)
    tokenizer_files = _tokenizer_files(target, tokenizer_dir)
    staging = _make_staging(target)
    try:
        _write_tensors(staging, parameters_of(model), max_shard_bytes)
        write_object(staging / "config.json", _config_dict(model))
        write_object(staging / GENERATION_CONFIG, _generation_dict(model))
        for file in tokenizer_files:
            shutil.copyfile(file, staging / file.name)
        for name, content in extra_files.items():
            (staging / name).write_bytes(content.encode() if isinstance(content, str) else content)
        for path in (*staging.iterdir(), staging):
            _flush(path)
        _swap(staging, target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _tokenizer_files(target: Path, tokenizer_dir: str | Path | None) -> list[Path]:
    source = target if tokenizer_dir is None else Path(tokenizer_dir)
    if tokenizer_dir is not None and not (source / "tokenizer.json").is_file():
        raise CheckpointError(f"{source}: has no tokenizer.json to copy")
    return [source / name for name in TOKENIZER_FILES if (source / name).is_file()]


def check_target(directory: str | Path, extra_names: Collection[str] = ()) -> None:
    """Fails now where ``save_pretrained`` would fail later; creates the parent directory.

    Args:
      directory: where a model is going to be saved.
      extra_names: names of the ``extra_files``.

    Raises:
      CheckpointError: the directory is not to be replaced, or its parent cannot be written.
    """
    target = Path(directory).expanduser().resolve()
    _check_replaceable(target, extra_names)
    _make_staging(target).rmdir()


def _make_staging(target: Path) -> Path:
    staging = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        staging.mkdir()
    except OSError as error:
        raise CheckpointError(f"{target}: cannot write beside it: {error}") from error
    return staging


def _check_replaceable(target: Path, extra_names: Collection[str]) -> None:
    """Refuses a target with files that are no checkpoint's.

    Extra files are taken for a checkpoint's where they are complete and beside a config: one of them
    alone may be anybody's.
    """
    known = {"config.json", GENERATION_CONFIG, SINGLE, INDEX, *TOKENIZER_FILES}
    for name in extra_names:
        if name in known or _is_shard(name) or not _is_plain(name):
            raise CheckpointError(f"{name!r} cannot be the name of an extra file")
    try:
        if not target.exists():
            return
        if not target.is_dir():
            raise CheckpointError(f"{target} is a file; give a directory")
        files = {file.name: file.is_dir() for file in target.iterdir()}
    except OSError as error:
        raise CheckpointError(f"{target}: cannot be read: {error}") from error
    if files.keys() >= {"config.json", *extra_names}:
        known |= set(extra_names)
    for name, is_directory in files.items():
        if is_directory or (name not in known and not _is_shard(name)):
            raise CheckpointError(
                f"{target} holds {name}, which is no part of a checkpoint and would be lost; "
                "give another directory"
            )


def _is_plain(name: str) -> bool:
    return name not in ("", "..") and Path(name).name == name


def _is_shard(name: str) -> bool:
    return name.startswith("model-") and name.endswith(".safetensors")


def _flush(path: Path) -> None:
    """Waits until a file or directory is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _swap(staging: Path, target: Path) -> None:
    """Puts ``staging`` where ``target`` is, which stays whole until then."""
    old = target.with_name(staging.name.removesuffix(".tmp") + ".old")
    if target.exists():
        os.rename(target, old)
    try:
        os.rename(staging, target)
    except OSError:
        if old.exists():
            os.rename(old, target)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _config_dict(model: Any) -> dict[str, Any]:
    out = model.config.to_dict()
    bytes_of: Counter[str] = Counter()
    for parameter in parameters_of(model):
        bytes_of[parameter.value.dtype.name] += parameter.value.nbytes
    name = "dtype" if "dtype" in out else "torch_dtype"
    return out | {name: bytes_of.most_common(1)[0][0]}


def _generation_dict(model: Any) -> dict[str, Any]:
    generation = getattr(model, "generation", None)
    if generation is None:
        generation = GenerationDefaults(
            do_sample=True,
            eos_token_id=getattr(model.config, "eos_token_id", None),
            bos_token_id=getattr(model.config, "bos_token_id", None),
            pad_token_id=getattr(model.config, "pad_token_id", None),
        )
    return generation.to_dict()


def _write_tensors(directory: Path, parameters: list[Parameter], max_shard_bytes: int) -> None:
    tensors = {entry.name: (parameter, entry) for parameter in parameters for entry in parameter.entries}
    shards = list(_shards(tensors, max_shard_bytes))
    read = _reader(tensors)
    weight_map: dict[str, str] = {}
    for i, names in enumerate(shards):
        file = SINGLE if len(shards) == 1 else f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        layout = {name: (tensors[name][0].value.dtype, tensors[name][1].shape) for name in names}
        write_safetensors(directory / file, layout, read, _METADATA)
        weight_map |= dict.fromkeys(names, file)
    if len(shards) > 1:
        total = sum(_nbytes(tensor) for tensor in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        write_object(directory / INDEX, index)


def _nbytes(tensor: Tensor) -> int:
    parameter, entry = tensor
    return int(np.prod(entry.shape)) * parameter.value.dtype.itemsize


def _shards(tensors: dict[str, Tensor], max_shard_bytes: int) -> Iterator[list[str]]:
    names: list[str] = []
    size = 0
    for name, tensor in tensors.items():
        if names and size + _nbytes(tensor) > max_shard_bytes:
            yield names
            names, size = [], 0
        names.append(name)
        size += _nbytes(tensor)
    yield names


def _reader(tensors: dict[str, Tensor]) -> Callable[[str], np.ndarray]:
    """Reads tensors from the device, keeping one parameter in host memory for its other tensors."""
    kept: dict[Any, np.ndarray] = {}

    def read(name: str) -> np.ndarray:
        parameter, entry = tensors[name]
        if parameter.path not in kept:
            kept.clear()
            kept[parameter.path] = np.asarray(parameter.value)
        value = kept[parameter.path]
        return value if value.shape == entry.shape else value[entry.start : entry.start + entry.shape[0]]

    return read
