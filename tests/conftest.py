"""Settings of every test: CPU, strict dtype promotion, no compilation cache of the user's."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import hypothesis
import jax

jax.config.update("jax_numpy_dtype_promotion", "strict")

# Compiling inside an example makes its time meaningless; pytest-timeout bounds the whole test.
hypothesis.settings.register_profile("default", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("default")
