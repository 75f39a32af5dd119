"""How the tests run kernels: compiled on a GPU, interpreted elsewhere."""

import functools

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

ON_GPU = jax.default_backend() == "gpu"


def interpreted(function):
    """The kernel as it runs here; races are noted, see the fixture ``no_races``."""
    if ON_GPU:
        return function
    return functools.partial(function, interpret=plgpu.InterpretGPUParams(detect_races=True))
