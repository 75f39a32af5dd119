"""Model families. ``ARCHITECTURES`` is closed: a checkpoint can only name one of them."""

from hybridjax.models.base import CausalLM, StateSize, TensorEntry
from hybridjax.models.registry import ARCHITECTURES, Architecture

__all__ = ["ARCHITECTURES", "Architecture", "CausalLM", "StateSize", "TensorEntry"]
