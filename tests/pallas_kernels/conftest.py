import pytest
from interpreting import ON_GPU


@pytest.fixture
def no_races():
    """Fails a test whose interpreted kernels have raced."""
    yield
    if not ON_GPU:
        from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

        races = gpu_callbacks.get_races()
        gpu_callbacks.reset_gpu_interpret_mode_state()
        assert not races.races_found
