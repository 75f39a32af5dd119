"""GPU implementations of ops, one folder per op; ``python -m hybridjax.pallas_kernels`` lists them."""
