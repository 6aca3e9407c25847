"""`python -m kernels.gpu`: correctness, then benchmarks of every operation on this machine's GPU."""
