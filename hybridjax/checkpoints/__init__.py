"""Model directories in the Hugging Face layout, bundled models, and training checkpoints.

Orbax is imported only by ``hybridjax.checkpoints.orbax_checkpoints``, which serving never needs.
"""

from hybridjax.checkpoints.bundled import bundled_models, load_tokenizer, resolve
from hybridjax.checkpoints.generation import GenerationDefaults, generation_config
from hybridjax.checkpoints.loading import load_config, load_model
from hybridjax.checkpoints.quantization_config import quantization_of
from hybridjax.checkpoints.saving import check_target, save_pretrained

__all__ = [
    "GenerationDefaults",
    "bundled_models",
    "check_target",
    "generation_config",
    "load_config",
    "load_model",
    "load_tokenizer",
    "quantization_of",
    "resolve",
    "save_pretrained",
]
