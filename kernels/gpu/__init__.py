"""`python -m kernels.gpu`: correctness checks, then benchmarks of every operation on this machine's
GPU.
"""
