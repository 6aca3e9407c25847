"""The training engine: one program for one device or many, CPU or CUDA.

Depends on contracts, models, metrics, runtime and kernels only.
"""
