"""One layer's matrices into NVFP4: scales, codes, and what that costs."""

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hybridjax.calibration.observe import Inputs, Seen, counts, expert_inputs
from hybridjax.calibration.report import Losses, Module
from hybridjax.calibration.selection import LayerPlan
from hybridjax.calibration.settings import Settings
from hybridjax.errors import ConfigError
from hybridjax.models.base import Path, TensorEntry
from hybridjax.ops.dispatch import einsum_f32
from hybridjax.quantization import GROUP, NVFP4, block_scales, dequantize, encode, global_scale, gptq, pack

_GROUP_BYTES = 2**30  # of Hessians and their factors that a group of experts may need


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rounded:
    """A matrix [..., N, K] after rounding.

    Attributes:
      weight: the result.
      fine: bool[...], False where GPTQ had no finite factor.
      losses: of each row, see ``Losses``.
    """

    weight: NVFP4
    fine: jax.Array
    losses: Losses


@functools.partial(jax.jit, static_argnames=("rule", "method", "damping", "ordering"))
def round_matrix(
    weight: jax.Array,
    inputs: Inputs | None,
    enough: jax.Array,
    *,
    rule: str,
    method: str,
    damping: float,
    ordering: str,
) -> Rounded:
    """Rounds a matrix whose rows share a global scale.

    Args:
      weight: [N, K].
      inputs: what it has seen; None: unknown, which "rtn" does not mind.
      enough: bool[], whether that is enough for GPTQ.
      rule, method, damping, ordering: see ``Settings``.
    """
    weight = weight.astype(jnp.float32)
    amax = jnp.max(jnp.abs(weight))
    scale = global_scale(amax, rule)
    scales = block_scales(weight, amax, rule)
    plain = encode(weight, scales, scale)
    codes, fine = plain, jnp.asarray(True)
    if method == "gptq":
        assert inputs is not None
        found, fine = gptq(weight, inputs.hessian, scales, scale, damp=damping, ordering=ordering)
        codes = jnp.where(enough, found, plain)
    out = NVFP4(pack(codes), scales, scale)
    hessian = None if inputs is None else inputs.hessian
    rounded = dequantize(NVFP4(pack(plain), scales, scale)) - weight
    losses = _losses(weight, dequantize(out) - weight, rounded, hessian)
    largest = jnp.max(jnp.abs(weight.reshape(weight.shape[0], -1, GROUP)), axis=2)
    # Scales are rounded by 7 percent at most, so 5 tells a largest code of 4 from one of 6.
    fours = jnp.sum((largest > 0) & (largest < 5 * scales.astype(jnp.float32) * scale), axis=1)
    losses = dataclasses.replace(losses, fours=fours, blocks=jnp.full_like(fours, largest.shape[1]))
    return Rounded(out, fine, losses)


def _losses(weight: jax.Array, lost: jax.Array, plain: jax.Array, hessian: jax.Array | None) -> Losses:
    def squares(x: jax.Array) -> jax.Array:
        return jnp.sum(x * x, axis=1)

    def outputs(x: jax.Array) -> jax.Array | None:
        return None if hessian is None else jnp.sum(einsum_f32("nk,kl->nl", x, hessian) * x, axis=1)

    return Losses(
        squares(weight),
        squares(lost),
        squares(plain),
        outputs(weight),
        outputs(lost),
        outputs(plain),
    )


Weights = dict[str, tuple[NVFP4, float | None]]


def round_layer(
    parameters: Mapping[Path, jax.Array], plan: LayerPlan, seen: Seen | None, settings: Settings
) -> tuple[Weights, list[Module]]:
    """Rounds all planned matrices of a layer.

    Args:
      parameters: of the layer, by path.
      plan: what is quantised.
      seen: what the matrices have seen; None without calibration.
      settings: how.

    Returns:
      Tensor name -> the weight, in host memory, and the scale of its inputs (None: not calibrated); and
      what that cost.

    Raises:
      ConfigError: inputs are not finite.
    """
    weights: Weights = {}
    modules: list[Module] = []
    options = {"rule": settings.scale_rule, "method": settings.method}
    options |= {"damping": settings.damping, "ordering": settings.activation_ordering}
    for path, entries in plan.linears.items():
        value = parameters[(*path, "weight", "value")]
        inputs = None if seen is None else seen.linears[path]
        found = round_matrix(value[_rows(entries)], inputs, jnp.asarray(True), **options)
        rows = None if seen is None else seen.rows
        scale = _input_scale(entries[0].name, None if inputs is None else inputs.largest, settings)
        modules += _linear_results(weights, entries, found, scale, rows, settings)
    for path, entries in plan.experts.items():
        stacks = {name: parameters[(*path, name)] for name in ("gate_up", "down")}
        shown = None if seen is None else seen.experts[path]
        modules += _round_experts(weights, stacks, entries, shown, settings, options)
    return weights, modules


def dequantised(
    parameters: Mapping[Path, jax.Array], plan: LayerPlan, weights: Mapping[str, tuple[NVFP4, Any]]
) -> dict[Path, jax.Array]:
    """The parameters that change, with the values of the quantised weights in the parameters' dtype."""
    out: dict[Path, jax.Array] = {}
    for path, entries in plan.linears.items():
        place = (*path, "weight", "value")
        new = [dequantize(jax.tree.map(jnp.asarray, weights[entry.name][0])) for entry in entries]
        value = parameters[place]
        out[place] = value.at[_rows(entries)].set(jnp.concatenate(new).astype(value.dtype))
    for entries in plan.experts.values():
        by_place: dict[Path, list[TensorEntry]] = {}
        for entry in entries:
            by_place.setdefault(entry.path[2:], []).append(entry)
        for place, held in by_place.items():
            value = np.empty(parameters[place].shape, parameters[place].dtype)
            for entry in held:
                found = dequantize(jax.tree.map(jnp.asarray, weights[entry.name][0]))
                entry.part_of(value)[...] = np.asarray(found.astype(value.dtype))
            out[place] = jnp.asarray(value)
    return out


def _rows(entries: Sequence[TensorEntry]) -> np.ndarray:
    """The rows of a parameter that tensors fill."""
    return np.concatenate([np.arange(e.start, e.start + e.shape[0]) for e in entries])


def _linear_results(
    weights: Weights,
    entries: Sequence[TensorEntry],
    found: Rounded,
    scale: float | None,
    rows: int | None,
    settings: Settings,
) -> list[Module]:
    """Adds the weights of one matrix's tensors, and says what each cost."""
    weight, losses = jax.tree.map(np.asarray, (found.weight, found.losses))
    method = settings.method if found.fine else "rtn (no factor)"
    modules, start = [], 0
    for entry in entries:
        part = slice(start, start + entry.shape[0])
        start = part.stop
        weights[entry.name] = NVFP4(weight.codes[part], weight.scales[part], weight.global_scale), scale
        modules.append(Module(entry.name, method, rows, _total(losses, part)))
    return modules


def _total(losses: Losses, part: slice) -> Losses:
    """Totals over rows ``part`` of the last axis."""
    return jax.tree.map(lambda x: float(np.sum(x[..., part], dtype=np.float64)), losses)


def _input_scale(name: str, largest: jax.Array | None, settings: Settings) -> float | None:
    if largest is None:
        return None
    if not np.isfinite(largest).all():
        raise ConfigError(f"{name}: its inputs are not finite on the calibration text")
    return None if settings.weights_only else float(global_scale(jnp.max(largest)))


def _round_experts(
    weights: Weights,
    stacks: Mapping[str, jax.Array],
    entries: Sequence[TensorEntry],
    rows: Sequence[tuple[np.ndarray, np.ndarray]] | None,
    settings: Settings,
    options: Mapping[str, Any],
) -> list[Module]:
    """Adds the weights of a layer's experts, group by group, and says what each projection cost."""
    count, hidden, narrow = stacks["down"].shape
    tokens = None if rows is None else counts(rows, count)
    found: dict[str, list[Rounded]] = {name: [] for name in stacks}
    largest: dict[str, list[jax.Array]] = {name: [] for name in stacks}
    for first, size in _groups(count, hidden, narrow):
        part = slice(first, first + size)
        inputs = (None, None) if rows is None else expert_inputs(rows, stacks["gate_up"][part], first)
        for name, own in zip(("gate_up", "down"), inputs):
            matrices = stacks[name][part]
            least = settings.least_tokens(matrices.shape[2])
            enough = np.ones(size, bool) if tokens is None else tokens[part] >= least
            run = jax.vmap(functools.partial(round_matrix, **options))
            # Results of all experts stay, so in host memory.
            found[name].append(jax.tree.map(np.asarray, run(matrices, own, jnp.asarray(enough))))
            largest[name] += [] if own is None else [own.largest]
    names = {(entry.path[-1], entry.index, entry.start): entry.name for entry in entries}
    modules = []
    for name, start, size in (("gate_up", 0, narrow), ("gate_up", narrow, narrow), ("down", 0, hidden)):
        whole: Rounded = jax.tree.map(lambda *groups: np.concatenate(groups), *found[name])
        title = names[name, 0, start].replace(".experts.0.", ".experts.*.")
        # One scale for all experts: those that few rows reach say little of what is to come.
        scale = _input_scale(title, jnp.concatenate(largest[name]) if largest[name] else None, settings)
        part = slice(start, start + size)
        for expert in range(count):
            one = jax.tree.map(lambda x, expert=expert: x[expert], whole.weight)
            own = NVFP4(one.codes[part], one.scales[part], one.global_scale)
            weights[names[name, expert, start]] = own, scale
        few = 0
        if settings.method == "gptq" and tokens is not None:
            least = settings.least_tokens(stacks[name].shape[2])
            few = int(np.sum((tokens < least) | ~whole.fine))
        seen_by = None if tokens is None else tuple(map(int, tokens))
        total = _total(whole.losses, part)
        modules.append(Module(title, settings.method, None, total, experts=seen_by, rounded_experts=few))
    return modules


def _groups(count: int, hidden: int, narrow: int) -> Iterator[tuple[int, int]]:
    """(first expert, number of experts): all groups have one size, so that one program serves them all."""
    # A Hessian, its sorted copy, its factor and the matrix being rounded, all float32.
    each = 4 * (3 * max(hidden, narrow) ** 2 + 2 * hidden * 2 * narrow)
    size = max(1, min(count, _GROUP_BYTES // each))
    while count % size:
        size -= 1
    return ((first, size) for first in range(0, count, size))
