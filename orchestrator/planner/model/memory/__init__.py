"""Terms of memory: model states, buffers, host memory and the peak of each rank."""
