"""The paged KV cache: block pool, tensors, attention over them, and swapping to CPU memory."""
