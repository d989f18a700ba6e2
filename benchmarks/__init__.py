"""Benchmarks: one module per question, run as `python -m benchmarks.NAME`; records lie in `results`."""
