"""NVFP4 weights in checkpoints: which tensors hold them, in ModelOpt's and in compressed-tensors' layout.

Source: minicpm_sala 4.2, qwen4_exp 2.4. How a weight is stored is read from the files' headers; a
quantisation configuration is only checked, see quantization_config.py.
"""

import dataclasses
import itertools
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np
from flax import nnx

from hybridjax.errors import CheckpointError
from hybridjax.layers.linear import DenseWeight, Linear
from hybridjax.layers.quantized import NVFP4Experts, NVFP4Weight, SplitWeight
from hybridjax.layers.sparse_moe import DenseExperts
from hybridjax.models.base import Path, ScaleEntry, TensorEntry, module_at
from hybridjax.quantization import GROUP, NVFP4

MODELOPT, COMPRESSED_TENSORS = "modelopt", "compressed-tensors"
FORMATS = (MODELOPT, COMPRESSED_TENSORS)


@dataclasses.dataclass(frozen=True)
class _Names:
    """Names of the tensors of one weight."""

    codes: str
    scales: str
    global_scale: str
    input_scale: str

    @classmethod
    def of(cls, name: str, layout: str) -> "_Names":
        """For a weight such as ``model.layers.0.mlp.up_proj.weight``."""
        module = name.removesuffix("weight")
        if layout == MODELOPT:
            return cls(name, name + "_scale", name + "_scale_2", module + "input_scale")
        return cls(name + "_packed", name + "_scale", name + "_global_scale", module + "input_global_scale")


def layout_of_weight(name: str, names: Collection[str]) -> str | None:
    """How a weight is stored, by the names of a checkpoint's tensors; None: not in NVFP4."""
    if name + "_packed" in names:
        return COMPRESSED_TENSORS
    return MODELOPT if name + "_scale_2" in names else None


def stored_tensors(name: str, weight: NVFP4, input_scale: float | None, layout: str) -> dict[str, np.ndarray]:
    """The tensors of one weight, by name.

    Args:
      name: of the weight, such as ``model.layers.0.mlp.up_proj.weight``.
      weight: one matrix, with one global scale.
      input_scale: of its activations; None: not calibrated.
      layout: one of FORMATS.
    """
    names, inverse = _Names.of(name, layout), layout == COMPRESSED_TENSORS

    def number(value: float) -> np.ndarray:
        stored = np.float32(1) / np.float32(value) if inverse else np.float32(value)
        return np.full((1,) if inverse else (), stored, np.float32)

    out = {
        names.codes: np.asarray(weight.codes),
        names.scales: np.asarray(weight.scales),
        names.global_scale: number(float(weight.global_scale)),
    }
    return out if input_scale is None else out | {names.input_scale: number(input_scale)}


def without_input_scale(names: Collection[str]) -> str | None:
    """A weight in NVFP4 whose activations are not calibrated, by the names of a checkpoint's tensors."""
    for name in names:
        weight = name.removesuffix("_packed").removesuffix("_scale_2")
        if weight != name and weight.endswith("weight") and (layout := layout_of_weight(weight, names)):
            if _Names.of(weight, layout).input_scale not in names:
                return weight
    return None


def common_layout(names: Collection[str]) -> str:
    """The layout that a checkpoint's weights in NVFP4 have."""
    return COMPRESSED_TENSORS if any(name.endswith("weight_packed") for name in names) else MODELOPT


def exchange_weights(model: Any, entries: Sequence[TensorEntry], names: Collection[str]) -> None:
    """Gives a model weights in NVFP4 where a checkpoint has them.

    Args:
      model: that was only traced, with dense weights.
      entries: of the dense model.
      names: of the checkpoint's tensors.

    Raises:
      CheckpointError: a parameter that cannot be in NVFP4 is, a width does not divide into groups, or the
        parts of stacked experts are stored in different ways.
    """
    by_path: dict[Path, list[TensorEntry]] = {}
    for entry in entries:
        if len(entry.shape) == 2:
            by_path.setdefault(entry.path, []).append(entry)
    experts: dict[Path, list[TensorEntry]] = {}
    for path, held in by_path.items():
        if not any(layout_of_weight(entry.name, names) for entry in held):
            continue
        for entry in held:
            if entry.shape[1] % GROUP:
                raise CheckpointError(
                    f"{entry.name} is in NVFP4, but its {entry.shape[1]} columns are no multiple of {GROUP}"
                )
        if isinstance(module_at(model, path[:-1]), DenseExperts):
            experts.setdefault(path[:-1], []).extend(held)
        else:
            _exchange_linear(model, path, held, names)
    for path, held in experts.items():
        _exchange_experts(model, path, held, names)


def _exchange_linear(model: Any, path: Path, entries: Sequence[TensorEntry], names: Collection[str]) -> None:
    owner = module_at(model, path[:-2])
    if not isinstance(owner, Linear) or path[-2:] != ("weight", "value"):
        raise CheckpointError(f"{entries[0].name} is in NVFP4, which only linear layers can be")
    dense = owner.weight
    assert isinstance(dense, DenseWeight)
    parts: list[DenseWeight | NVFP4Weight] = []
    entries = sorted(entries, key=lambda entry: entry.start)
    for quantized, group in itertools.groupby(entries, lambda e: layout_of_weight(e.name, names) is not None):
        held = list(group)
        shape = (sum(entry.shape[0] for entry in held), held[0].shape[1])
        if quantized:
            calibrated = _calibrated(held, names)
            parts.append(NVFP4Weight(shape, shards=len(held), calibrated=calibrated, axes=dense.axes))
        else:
            parts.append(dense.of_shape(shape))
    owner.weight = parts[0] if len(parts) == 1 else SplitWeight(parts)


def _exchange_experts(model: Any, path: Path, entries: Sequence[TensorEntry], names: Collection[str]) -> None:
    owner, dense = module_at(model, path[:-1]), module_at(model, path)
    count, hidden, intermediate = dense.down.shape
    plain = [entry.name for entry in entries if layout_of_weight(entry.name, names) is None]
    if plain or len(entries) != 3 * count:
        other = plain[0] if plain else "the rest of its layer's experts"
        raise CheckpointError(f"{entries[0].name} is in NVFP4, but {other} is not")
    calibrated = _calibrated(entries, names)
    setattr(owner, str(path[-1]), NVFP4Experts(count, hidden, intermediate, calibrated=calibrated))


def _calibrated(entries: Sequence[TensorEntry], names: Collection[str]) -> bool:
    """Whether weights have input scales.

    Raises:
      CheckpointError: some have, some have not.
    """
    missing = {True: "", False: ""}
    for entry in entries:
        name = _Names.of(entry.name, layout_of_weight(entry.name, names) or MODELOPT).input_scale
        missing[name in names] = name
    if missing[True] and missing[False]:
        raise CheckpointError(
            f"{missing[False]} is missing, though {missing[True]}, of the same layer, is there"
        )
    return bool(missing[True])


def expand(model: Any, entries: Sequence[TensorEntry], names: Collection[str] | None) -> list[TensorEntry]:
    """The tensors of a model, some weights of which may be in NVFP4.

    Args:
      model: the model.
      entries: of the dense model.
      names: of a checkpoint's tensors; None: in the layout that ``model.nvfp4_layout`` names.
    """
    fixed = getattr(model, "nvfp4_layout", MODELOPT)
    entries = [_with_single_scale(entry, names) for entry in entries]
    out: list[TensorEntry] = []
    shards: dict[Path, int] = {}
    for entry in entries:
        layout = fixed if names is None else layout_of_weight(entry.name, names) or fixed
        out += _expanded(model, entry, layout, shards)
    return out


def _with_single_scale(entry: TensorEntry, names: Collection[str] | None) -> TensorEntry:
    """The entry of a matrix that a checkpoint may hold in float8 with one scale, as ModelOpt's FP8 does."""
    scale = entry.name + "_scale"
    single = names is not None and scale in names and layout_of_weight(entry.name, names) is None
    if not single or entry.scale is not None or len(entry.shape) != 2:
        return entry
    return dataclasses.replace(entry, scale=ScaleEntry(scale, (entry.shape[0], entry.shape[1])))


def _expanded(model: Any, entry: TensorEntry, layout: str, shards: dict[Path, int]) -> Iterator[TensorEntry]:
    path, start = entry.path, entry.start
    owner = module_at(model, path[:-1])
    if isinstance(owner, SplitWeight):
        path = path[:-1]
        for number, part in enumerate(owner.parts):
            if start < part.shape[0]:
                path, owner = (*path, "parts", number, "value"), part
                break
            start -= part.shape[0]
        entry = dataclasses.replace(entry, path=path, start=start)
    if isinstance(owner, NVFP4Weight):
        place = path[:-1]
        fields = ("codes", "scales", "global_scale", "input_scale")
        calibrated = owner.input_scale is not None
    elif isinstance(owner, NVFP4Experts):
        place = path[:-1]
        fields = tuple(f"{path[-1]}_{field}" for field in ("codes", "scales", "global", "input"))
        calibrated = owner.down_input is not None
    else:
        yield entry
        return
    names, (rows, columns), inverse = _Names.of(entry.name, layout), entry.shape, layout == COMPRESSED_TENSORS
    number = (1,) if inverse else ()
    codes, scales, global_scale, input_scale = ((*place, field) for field in fields)
    yield TensorEntry(names.codes, (rows, columns // 2), codes, start, entry.index)
    yield TensorEntry(names.scales, (rows, columns // GROUP), scales, start, entry.index)
    yield TensorEntry(
        names.global_scale, number, global_scale, start, entry.index, spread=rows, inverse=inverse
    )
    if calibrated:
        shard = shards[input_scale] = shards.get(input_scale, -1) + 1
        yield TensorEntry(names.input_scale, number, input_scale, shard, spread=1, inverse=inverse)


def check_scales(values: np.ndarray) -> None:
    """Refuses block scales (float8_e4m3fn) that are NaN or below 0.

    Raises:
      CheckpointError: there are some.
    """
    raw = values.view(np.uint8)
    if ((raw & 0x7F) == 0x7F).any() or (raw > 0x80).any():
        raise CheckpointError("a block scale is NaN or below 0")


def read_number(stored: np.ndarray, inverse: bool) -> np.float32:
    """A global or input scale as the parameter holds it.

    Raises:
      CheckpointError: it is not finite and above 0.
    """
    value = np.float32(stored.reshape(-1)[0])
    out = np.float32(1) / value if inverse and value else value
    least = np.finfo(np.float32).tiny  # below, devices compute with 0
    if not (least <= value < np.inf and least <= out < np.inf):
        raise CheckpointError(
            f"the scale is {value}; it must be finite and above 0, and its reciprocal no subnormal number"
        )
    return out


def weights_in_nvfp4(model: Any) -> list[NVFP4Weight | NVFP4Experts]:
    """Every weight module in NVFP4."""
    return [node for _, node in nnx.iter_graph(model) if isinstance(node, NVFP4Weight | NVFP4Experts)]
