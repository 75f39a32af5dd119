"""What the engine says to a quantised model, and what it expects of its checkpoint."""

import logging
from pathlib import Path
from typing import Any

from hybridjax.configs.serving import EngineConfig
from hybridjax.errors import ConfigError

log = logging.getLogger(__name__)

_ALIASES = {
    "modelopt": ("nvfp4", "modelopt"),
    "modelopt_fp4": ("nvfp4", "modelopt"),
    "compressed-tensors": ("nvfp4", "compressed-tensors"),
}


def check_quantization(config: EngineConfig, directory: Path) -> None:
    """Refuses a checkpoint that is not quantised as the flags need it; before weights are read.

    Raises:
      ConfigError: it is not.
      CheckpointError: the files are malformed.
    """
    from hybridjax.checkpoints import nvfp4, quantization_of
    from hybridjax.checkpoints.directory import open_weights

    needs_scales = config.nvfp4_activations == "w4a4"
    if config.quantization == "auto" and not needs_scales:
        return
    method, layout = quantization_of(directory)
    if needs_scales and method != "nvfp4":
        raise ConfigError("nvfp4_activations is 'w4a4', but no weight of the checkpoint is in NVFP4")
    if needs_scales and (name := nvfp4.without_input_scale(open_weights(directory))):
        raise ConfigError(
            f"nvfp4_activations is 'w4a4', but {name} has no input scale; calibrate the checkpoint's "
            "activations, or use w4a16"
        )
    if config.quantization == "auto":
        return
    wanted = _ALIASES.get(config.quantization, (config.quantization, None))
    if method != wanted[0] or wanted[1] not in (None, layout):
        found = f"{method} in the layout of {layout}" if layout else method
        raise ConfigError(
            f"quantization is {config.quantization!r}, but the checkpoint's is {found}; leave it at auto"
        )


def prepare(config: EngineConfig, model: Any) -> None:
    """Fixes how NVFP4 weights treat activations, and arranges them for the kernels of this GPU.

    Raises:
      ConfigError: W4A4 is asked for, but the checkpoint has no input scales.
    """
    from hybridjax.layers.quantized import arrange, set_activations
    from hybridjax.ops.dispatch import architecture
    from hybridjax.quantization.dispatch import BLACKWELL

    activations = config.nvfp4_activations.replace("-", "_")
    if activations == "auto" and config.enable_deterministic_inference:
        activations = "w4a16"
    count = set_activations(model, activations)
    if not count:
        if activations == "w4a4":
            raise ConfigError("nvfp4_activations is 'w4a4', but no weight of the checkpoint is in NVFP4")
        if config.nvfp4_activations != "auto":
            log.warning("nvfp4_activations is %s, but no weight is in NVFP4", config.nvfp4_activations)
        return
    if arranged := arrange(model):
        log.info("%d matrices arranged for the GPU kernel", arranged)
    how = {"auto": "w4a16 or w4a4 by rows and hardware", "by_rows": "w4a16 or w4a4 by rows"}
    log.info("%d weights in NVFP4; products: %s", count, how.get(activations, activations))
    if activations in ("by_rows", "w4a4") and architecture() not in BLACKWELL:
        log.warning("W4A4 is emulated on %s: exact, but slower than w4a16", architecture())
