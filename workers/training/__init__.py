"""The training engine: one program for one device or many, CPU or CUDA.

Knows contracts, models and metrics only.
"""
