"""Kernel tests that run in Triton's interpreter."""
