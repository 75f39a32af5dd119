"""Quantises a checkpoint layer by layer with what a calibration text shows of its activations.

One layer's weights are in device memory at a time. See docs/quantization.md.
"""

from hybridjax.calibration.pipeline import Quantization
from hybridjax.calibration.settings import METHODS, Settings

__all__ = ["METHODS", "Quantization", "Settings"]
