"""Settings of every test: CPU, strict dtype promotion, no compilation cache of the user's."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# The size of XLA's thread pool. Each thread of an interpreted kernel holds one of them while it waits for
# another thread of the kernel: with one per core, as is usual, a machine of few cores waits for ever.
os.environ.setdefault("NPROC", str(max(16, os.cpu_count() or 1)))

import hypothesis
import jax

jax.config.update("jax_numpy_dtype_promotion", "strict")

# Compiling inside an example makes its time meaningless; pytest-timeout bounds the whole test.
hypothesis.settings.register_profile("default", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("default")
