"""Whether the tensors in a checkpoint's files are those that a model needs, from their headers alone."""

import logging
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from hybridjax.checkpoints.directory import listing
from hybridjax.checkpoints.float8 import FLOAT8, SCALE_DTYPES, scale_shape
from hybridjax.checkpoints.parameters import Layout
from hybridjax.checkpoints.safetensors_file import DTYPES, SafetensorsFile
from hybridjax.errors import CheckpointError, ConfigError
from hybridjax.models.base import TensorEntry

_FLOATS = frozenset(DTYPES[name] for name in ("F32", "BF16", "F16"))
_INT64 = np.dtype(np.int64)

# Names of released checkpoints that hold nothing a model needs (qwen4_exp 2.1).
_DROPPED = re.compile(
    r"rotary_emb\.|\.ple_embedding\.hashstats_|(^|\.)token_lookup(\.|$)"
    r"|hyper_connection_mixer\.block_inject_weight(\.|$)"
    r"|\.[kv]_scale$"  # of 8-bit K/V caches: ours are as wide as the model
)

log = logging.getLogger(__name__)

Weights = Mapping[str, SafetensorsFile]


def check_tensors(model: Any, layout: Layout, weights: Weights) -> None:
    """Every tensor must be there with the right shape and a usable dtype, and no others.

    Raises:
      CheckpointError: one is not; names the first few.
    """
    groups = [(p.entries, p.value.dtype) for p in layout.parameters]
    groups += [(entries, np.dtype(model.config.dtype)) for entries in layout.tables]
    problems: list[str] = []
    wanted = set(_constants(model))
    for entries, dtype in groups:
        for entry in entries:
            wanted.add(entry.name)
            if entry.scale is not None:
                # ModelOpt calibrates the inputs of FP8 weights, too; ours stay as they are.
                wanted |= {entry.scale.name, entry.name.removesuffix("weight") + "input_scale"}
            problems += _problems(entry, dtype, weights)
        problems += _mixtures(entries, weights)
        problems += _unused_scales(entries, weights)
    for name, file in weights.items():
        tied = name == "lm_head.weight" and getattr(model.config, "tie_word_embeddings", False)
        if name not in wanted and not tied and not _DROPPED.search(name):
            problems.append(f"{name!r} in {file.path.name} is no tensor of this architecture")
    if problems:
        raise CheckpointError(f"the tensors do not fit {type(model).__name__}: {listing(problems)}")


def _problems(entry: TensorEntry, dtype: np.dtype, weights: Weights) -> Iterator[str]:
    if entry.name not in weights:
        yield f"{entry.name} {list(entry.shape)} is missing"
        return
    file = weights[entry.name]
    info = file.tensors[entry.name]
    where = f"{entry.name} in {file.path.name} has"
    if entry.spread is not None and info.shape in ((), (1,)):
        if info.dtype != np.float32:
            yield f"{where} dtype {info.dtype}, expected float32"
    elif info.shape != entry.shape:
        yield f"{where} shape {list(info.shape)}, expected {list(entry.shape)}"
    elif info.dtype == FLOAT8 and entry.scale is not None:
        yield from _scale_problems(entry, weights)
    elif info.dtype != dtype and not {info.dtype, dtype} <= _FLOATS:
        yield f"{where} dtype {info.dtype}, expected {dtype}"


def _scale_problems(entry: TensorEntry, weights: Weights) -> Iterator[str]:
    assert entry.scale is not None
    name, wanted = entry.scale.name, scale_shape(entry.shape, entry.scale.block)
    if name not in weights:
        yield f"{name} {list(wanted)} is missing, though {entry.name} is in {FLOAT8}"
        return
    file = weights[name]
    info = file.tensors[name]
    where = f"{name} in {file.path.name} has"
    if info.shape != wanted and not (math.prod(wanted) == 1 and info.shape in ((), (1,))):
        yield f"{where} shape {list(info.shape)}, expected {list(wanted)}"
    elif info.dtype not in SCALE_DTYPES:
        yield f"{where} dtype {info.dtype}, expected float32 or bfloat16"


def _mixtures(entries: Sequence[TensorEntry], weights: Weights) -> Iterator[str]:
    """Parts of one stacked parameter or table must agree on how they are stored."""
    stored = [entry for entry in entries if entry.scale is not None and entry.name in weights]
    for entry in stored[1:]:
        first = weights[stored[0].name].tensors[stored[0].name].dtype
        other = weights[entry.name].tensors[entry.name].dtype
        if other != first:
            yield f"{entry.name} is in {other}, but {stored[0].name}, a part of the same, in {first}"
            return


def _unused_scales(entries: Sequence[TensorEntry], weights: Weights) -> Iterator[str]:
    scaled: dict[str, set[np.dtype]] = {}
    for entry in entries:
        if entry.scale is not None and entry.name in weights:
            dtype = weights[entry.name].tensors[entry.name].dtype
            scaled.setdefault(entry.scale.name, set()).add(dtype)
    for name, stored in scaled.items():
        if name in weights and FLOAT8 not in stored:
            yield f"{name} is there, but no tensor in {FLOAT8} that it scales"


def _constants(model: Any) -> Mapping[str, np.ndarray]:
    return model.checkpoint_constants() if hasattr(model, "checkpoint_constants") else {}


def load_constants(model: Any, weights: Weights) -> None:
    """Takes over integer constants that a checkpoint stores; those of a layer are all there or none.

    Stored ones go before computed ones (qwen4_exp 8.1).

    Raises:
      CheckpointError: some are missing, malformed, or cannot be true of the model.
    """
    known = dict(_constants(model))
    stored: dict[str, np.ndarray] = {}
    problems: list[str] = []
    layers = {name.rpartition(".")[0] for name in known if name in weights}
    for name, computed in known.items():
        if name.rpartition(".")[0] not in layers:
            continue
        if name not in weights:
            problems.append(f"{name} {list(computed.shape)} is missing, though others of its layer are there")
            continue
        info = weights[name].tensors[name]
        if info.dtype != _INT64 or info.shape != computed.shape:
            problems.append(
                f"{name} in {weights[name].path.name} is {info.dtype}{list(info.shape)}, expected "
                f"int64{list(computed.shape)}"
            )
            continue
        stored[name] = weights[name].read(name).copy()
    if problems:
        raise CheckpointError(f"the constants do not fit {type(model).__name__}: {listing(problems)}")
    if all(np.array_equal(value, known[name]) for name, value in stored.items()):
        return
    changed = next(name for name, value in stored.items() if not np.array_equal(value, known[name]))
    log.warning("%s differs from what the configuration gives; the stored values are used", changed)
    try:
        model.set_checkpoint_constants(known | stored)
    except ConfigError as error:
        raise CheckpointError(f"{changed} and its neighbours cannot be used: {error}") from error
