"""Benchmark runs: variants of one plan in turns on the same samples, and the placed devices
themselves, measured.
"""
