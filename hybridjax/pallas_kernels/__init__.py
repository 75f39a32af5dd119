"""GPU implementations of ops, one folder per op. None yet: ops run on their XLA paths everywhere."""
