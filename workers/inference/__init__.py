"""The inference engine and its runs: paged cache, continuous batching, sampling, serving."""
