"""Benchmarks: each checks correctness before it times, and ends with one JSON line."""
