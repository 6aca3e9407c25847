"""Benchmark runs: variants of one plan, repeated alternately on the same samples, and device
tests.
"""
