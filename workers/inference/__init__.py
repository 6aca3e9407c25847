"""The inference engine: a paged cache, continuous batching, sampling, and the runs of kind
generate.
"""
