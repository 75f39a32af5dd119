"""Prints which implementation of each op with a GPU kernel runs on which GPU, and how kernels are tuned."""

import hybridjax.ops  # noqa: F401 - registers the ops
from hybridjax.pallas_kernels.selection import table, tunings

print(table(), tunings(), sep="\n\n")
