"""Which matrices of a model are quantised, and in which groups."""

import dataclasses
import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

from hybridjax.checkpoints.safetensors_file import SafetensorsFile
from hybridjax.errors import ConfigError
from hybridjax.layers.linear import Linear
from hybridjax.layers.sparse_moe import DenseExperts
from hybridjax.models.base import Path, TensorEntry, module_at
from hybridjax.models.precision import kept_precise, matches
from hybridjax.quantization import GROUP

_FUSED_EXPERTS = re.compile(r"(.*\.mlp\.experts\.)(gate_up|down)_proj")


@dataclasses.dataclass(frozen=True)
class LayerPlan:
    """What is quantised of one layer, by paths below ``layers[i]``.

    Attributes:
      linears: path of a Linear -> the tensors of its matrix that are quantised. They share a global scale.
      experts: path of a stack of experts -> their tensors, one per expert and projection; those of an
        expert's gate and up share a global scale.
    """

    linears: Mapping[Path, tuple[TensorEntry, ...]]
    experts: Mapping[Path, tuple[TensorEntry, ...]]

    @property
    def entries(self) -> list[TensorEntry]:
        return list(itertools.chain(*self.linears.values(), *self.experts.values()))


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is quantised of a model.

    Attributes:
      layers: in order.
      entries: every tensor that a model in the model's dtype would be written with, experts one by one
        where they are quantised.
    """

    layers: tuple[LayerPlan, ...]
    entries: tuple[TensorEntry, ...]

    @property
    def targets(self) -> list[TensorEntry]:
        """The tensors that are quantised."""
        return [entry for layer in self.layers for entry in layer.entries]


def make_plan(model: Any, weights: Mapping[str, SafetensorsFile], skip: Sequence[str]) -> Plan:
    """What is to be quantised.

    Args:
      model: without memory, with dense weights.
      weights: of its checkpoint.
      skip: the user's patterns.

    Raises:
      ConfigError: the checkpoint is quantised to NVFP4 already, nothing is left to quantise, a pattern
        matches nothing or only some experts of a layer, or a matrix does not divide into blocks.
    """
    shapes = {name: file.tensors[name].shape for name, file in weights.items()}
    for name in shapes:
        if name.endswith(("weight_packed", "weight_scale_2")):
            raise ConfigError(f"{name} is there: the checkpoint is quantised to NVFP4 already")
    patterns = (*kept_precise(model), *skip)
    entries = type(model).checkpoint_entries(model.config, shapes | _apart(shapes, patterns))
    candidates: list[tuple[int, bool, Path, TensorEntry]] = []
    for entry in entries:
        if entry.path[0] == "layers" and isinstance(entry.path[1], int) and len(entry.shape) == 2:
            kind = _owner(model.layers[entry.path[1]], entry.path[2:])
            if kind is not None:
                candidates.append((entry.path[1], *kind, entry))
    for pattern in skip:
        if not any(matches(entry.name, [pattern]) for entry in entries):
            raise ConfigError(f"skip has {pattern!r}, which no tensor's name matches")
    layers = []
    for index in range(len(model.layers)):
        own = [(stacked, path, entry) for i, stacked, path, entry in candidates if i == index]
        layers.append(_layer_plan(own, patterns))
    plan = Plan(tuple(layers), tuple(entries))
    if not plan.targets:
        raise ConfigError("nothing is left to quantise: skip matches every matrix")
    for entry in plan.targets:
        if entry.shape[1] % GROUP:
            raise ConfigError(
                f"{entry.name} {list(entry.shape)} has {entry.shape[1]} columns, which do not divide into "
                f"groups of {GROUP}; skip it"
            )
    return plan


def _apart(shapes: Mapping[str, tuple[int, ...]], patterns: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Names that make the model class list fused experts one by one, where they are to be quantised."""
    out = {}
    for name in shapes:
        if (match := _FUSED_EXPERTS.fullmatch(name)) and not matches(f"{match[1]}0.up_proj.weight", patterns):
            out[f"{match[1]}0.up_proj.weight"] = ()
    return out


def _owner(layer: Any, path: Path) -> tuple[bool, Path] | None:
    """Whether a parameter is that of experts, and the path of its Linear or experts; None: of neither."""
    if isinstance(module_at(layer, path[:-1]), DenseExperts):
        return True, path[:-1]
    if path[-2:] == ("weight", "value") and isinstance(module_at(layer, path[:-2]), Linear):
        return False, path[:-2]
    return None


def _layer_plan(candidates: Sequence[tuple[bool, Path, TensorEntry]], patterns: Sequence[str]) -> LayerPlan:
    linears: dict[Path, list[TensorEntry]] = {}
    experts: dict[Path, list[TensorEntry]] = {}
    kept: dict[Path, str] = {}
    for stacked, path, entry in candidates:
        if matches(entry.name, patterns):
            kept.setdefault(path, entry.name)
        else:
            (experts if stacked else linears).setdefault(path, []).append(entry)
    for path, held in experts.items():
        if path in kept:
            raise ConfigError(
                f"skip leaves out {kept[path]}, but not {held[0].name}; the experts of a layer are quantised "
                "together or not at all"
            )
    return LayerPlan(
        {path: tuple(sorted(held, key=lambda e: e.order)) for path, held in linears.items()},
        {path: tuple(sorted(held, key=lambda e: (e.path, e.order))) for path, held in experts.items()},
    )
