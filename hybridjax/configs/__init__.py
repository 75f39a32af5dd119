"""Frozen dataclass configurations; command-line flags are generated from them."""

from hybridjax.configs.minicpm_sala import MiniCPMSALAConfig, SparseConfig
from hybridjax.configs.qwen4_exp import Qwen4ExpConfig
from hybridjax.configs.qwen4_exp_multimodal import Qwen4ExpMultimodalConfig, Qwen4ExpVisionConfig
from hybridjax.configs.serving import EngineConfig, ServerConfig

__all__ = [
    "EngineConfig",
    "MiniCPMSALAConfig",
    "Qwen4ExpConfig",
    "Qwen4ExpMultimodalConfig",
    "Qwen4ExpVisionConfig",
    "ServerConfig",
    "SparseConfig",
]
