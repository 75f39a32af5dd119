"""What checkpoints say of their quantisation: read to refuse what is not supported, written for others.

How each tensor is stored is decided by the files' headers alone; released configurations contradict their
files (qwen4_exp 2.4).
"""

import fnmatch
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from hybridjax.checkpoints import nvfp4
from hybridjax.checkpoints.directory import open_weights
from hybridjax.errors import CheckpointError
from hybridjax.json_files import read_object
from hybridjax.quantization import GROUP

FILE = "hf_quant_config.json"

_METHODS = ("fp8", "modelopt", "modelopt_fp4", "modelopt_mixed", "compressed-tensors")
_ALGORITHMS = frozenset({"NVFP4", "W4A16_NVFP4", "FP8", "FP8_PB_WO", "FP8_BLOCK_SCALES", "MIXED_PRECISION"})
_PACKED = "nvfp4-pack-quantized"
_NUMBERS = {
    "num_bits": 4,
    "type": "float",
    "symmetric": True,
    "strategy": "tensor_group",
    "group_size": GROUP,
}


def check(directory: Path, config: Mapping[str, Any]) -> str | None:
    """Refuses quantisation that is not supported.

    Args:
      directory: of the checkpoint.
      config: the content of its config.json.

    Returns:
      "fp8", "modelopt" or "compressed-tensors", or None: the checkpoint says nothing of quantisation.

    Raises:
      CheckpointError: the method, algorithm, format or group size is not supported; names it.
    """
    stated = config.get("quantization_config") or config.get("compression_config")
    apart = directory / FILE
    if stated is None and not apart.is_file():
        return None
    if stated is not None and not isinstance(stated, dict):
        raise CheckpointError(
            f"{directory / 'config.json'}: quantization_config is {stated!r}, not an object"
        )
    method = "modelopt"
    if stated is not None:
        where = f"{directory / 'config.json'}: quantization_config"
        method = stated.get("quant_method") or ("modelopt" if "quant_algo" in stated else None)
        if not isinstance(method, str) or method not in _METHODS:
            raise CheckpointError(f"{where}.quant_method is {method!r}; supported: {', '.join(_METHODS)}")
        if method == "compressed-tensors":
            _check_groups(where, stated)
        elif method != "fp8":
            _check_modelopt(where, stated)
    if apart.is_file():
        inner = read_object(apart).get("quantization")
        if not isinstance(inner, dict):
            raise CheckpointError(f"{apart}: quantization is {inner!r}; it must be an object")
        _check_modelopt(f"{apart}: quantization", inner)
    return "modelopt" if method.startswith("modelopt") else method


def _check_modelopt(where: str, stated: Mapping[str, Any]) -> None:
    algorithm = _algorithm(f"{where}.quant_algo", stated.get("quant_algo"))
    layers = stated.get("quantized_layers") or {}
    if not isinstance(layers, dict):
        raise CheckpointError(f"{where}.quantized_layers is {layers!r}; it must be an object")
    if "NVFP4" in algorithm:
        _check_group_size(where, stated)
    for name, layer in layers.items():
        inner = f"{where}.quantized_layers.{name}"
        if not isinstance(layer, dict):
            raise CheckpointError(f"{inner} is {layer!r}; it must be an object with quant_algo")
        if "NVFP4" in _algorithm(f"{inner}.quant_algo", layer.get("quant_algo")):
            _check_group_size(inner, layer)


def _algorithm(field: str, value: Any) -> str:
    if not isinstance(value, str) or value not in _ALGORITHMS:
        raise CheckpointError(f"{field} is {value!r}; supported: {', '.join(sorted(_ALGORITHMS))}")
    return value


def _check_group_size(where: str, stated: Mapping[str, Any]) -> None:
    size = stated.get("group_size", GROUP)
    if size is not None and size != GROUP:
        raise CheckpointError(f"{where}.group_size is {size!r}; NVFP4 has groups of {GROUP}")


def _check_groups(where: str, stated: Mapping[str, Any]) -> None:
    groups = stated.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise CheckpointError(f"{where}.config_groups is {groups!r}; it must be an object with groups")
    for name, group in groups.items():
        inner = f"{where}.config_groups.{name}"
        if not isinstance(group, dict):
            raise CheckpointError(f"{inner} is {group!r}; it must be an object")
        form = group.get("format") or stated.get("format")
        if form != _PACKED:
            raise CheckpointError(f"{inner}: format {form!r} is not supported; supported: {_PACKED}")
        weights = group.get("weights")
        if not isinstance(weights, dict):
            raise CheckpointError(f"{inner}.weights is {weights!r}; it must be an object")
        for field, value in _NUMBERS.items():
            if weights.get(field, value) != value:
                raise CheckpointError(f"{inner}.weights.{field} is {weights[field]!r}; NVFP4 has {value!r}")


def quantization_config(
    layout: str, skipped: Sequence[str], activations: bool
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """What a checkpoint in NVFP4 says of itself.

    Args:
      layout: one of ``nvfp4.FORMATS``.
      skipped: modules of linear layers that are not quantised, such as ``lm_head``; patterns may have ``*``.
      activations: whether the activations' scales are calibrated (W4A4 is possible).

    Returns:
      quantization_config for config.json, and the content of ``FILE`` where the layout has one.
    """
    ignored = sorted(skipped)
    if layout == nvfp4.MODELOPT:
        algorithm = "NVFP4" if activations else "W4A16_NVFP4"
        apart = {
            "producer": {"name": "hybridjax"},
            "quantization": {
                "quant_algo": algorithm,
                "kv_cache_quant_algo": None,
                "group_size": GROUP,
                "exclude_modules": ignored,
            },
        }
        stated = {"quant_method": "modelopt", "quant_algo": algorithm, "group_size": GROUP, "ignore": ignored}
        return stated, apart
    group = {
        "targets": ["Linear"],
        "format": _PACKED,
        "weights": _NUMBERS | {"dynamic": False},
        "input_activations": _NUMBERS | {"dynamic": "local"} if activations else None,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": _PACKED,
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "ignore": ignored,
        "config_groups": {"group_0": group},
    }, None


def of_tensors(names: Collection[str], layout: str) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """``quantization_config`` for a checkpoint with tensors of these names."""
    plain = [name for name in names if name.endswith(".weight")]
    skipped = {name.removesuffix(".weight") for name in plain if name + "_scale" not in names}
    inputs = any(name.endswith(("input_scale", "input_global_scale")) for name in names)
    return quantization_config(layout, _shortened(sorted(skipped)), inputs)


def _shortened(modules: Sequence[str]) -> list[str]:
    return [module for module in modules if not fnmatch.fnmatch(module, "*norm*")]


def quantization_of(directory: str | Path) -> tuple[str, str | None]:
    """How a checkpoint's weights are stored, from its files' headers.

    Returns:
      "nvfp4" and its layout, one of ``nvfp4.FORMATS``; or "fp8" or "none", and None.

    Raises:
      CheckpointError: a file is malformed.
    """
    names = open_weights(Path(directory))
    if any(name.endswith(("weight_packed", "weight_scale_2")) for name in names):
        return "nvfp4", nvfp4.common_layout(names)
    return ("fp8" if any(name.endswith(("scale_inv", "weight_scale")) for name in names) else "none"), None
