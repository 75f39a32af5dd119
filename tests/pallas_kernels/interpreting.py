"""How the tests run kernels: compiled on a GPU, interpreted elsewhere."""

import functools

import jax
from jax.experimental.pallas import mosaic_gpu as plgpu

ON_GPU = jax.default_backend() == "gpu"


def interpreted(function):
    """The kernel as it runs here; races are noted, see the fixture ``no_races``.

    Nothing else is computed meanwhile: what the interpreter computes can wait for ever behind it.
    """
    if ON_GPU:
        return function
    run = functools.partial(function, interpret=plgpu.InterpretGPUParams(detect_races=True))

    @functools.wraps(function)
    def wait(*operands, **options):
        return jax.block_until_ready(run(*jax.block_until_ready(operands), **options))

    return wait
