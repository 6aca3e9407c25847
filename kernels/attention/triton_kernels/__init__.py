"""Own Triton attention kernels: device code, configurations, launches and autograd."""
