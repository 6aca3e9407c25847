"""Benchmarks: each `bench_*.py` measures one thing and appends rows to docs/results."""
