"""The closed registry of architectures, keyed by the names that ``config.json`` uses."""

import dataclasses
from typing import Any

from hybridjax.configs import MiniCPMSALAConfig, Qwen4ExpConfig
from hybridjax.configs.qwen4_exp_multimodal import Qwen4ExpMultimodalConfig
from hybridjax.models.minicpm_sala import MiniCPMSALA
from hybridjax.models.qwen4_exp import Qwen4Exp
from hybridjax.models.qwen4_exp_multimodal import Qwen4ExpMultimodal
from hybridjax.registry import Registry


@dataclasses.dataclass(frozen=True)
class Architecture:
    """A config class (``from_dict``, ``to_dict``) and the nnx module built from it.

    ``model(config, dtype=, rngs=)`` makes a randomly initialised model.
    """

    config: Any
    model: Any


ARCHITECTURES: Registry[Architecture] = Registry("architecture")
ARCHITECTURES.register("MiniCPMSALAForCausalLM")(Architecture(MiniCPMSALAConfig, MiniCPMSALA))
ARCHITECTURES.register("Qwen4ExpForCausalLM")(Architecture(Qwen4ExpConfig, Qwen4Exp))
ARCHITECTURES.register("Qwen4ExpForConditionalGeneration")(
    Architecture(Qwen4ExpMultimodalConfig, Qwen4ExpMultimodal)
)
