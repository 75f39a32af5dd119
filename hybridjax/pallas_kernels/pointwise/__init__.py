"""Kernels of what the linear mixers do around their recurrences."""
