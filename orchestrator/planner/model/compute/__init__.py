"""Terms of compute time: kernels, layers and offloading."""
