"""Tensor and sequence parallelism: how a decoder lies over a mesh axis, and what travels between
its parts.

Does not know data parallelism, pipelines or steps.
"""

from workers.training.parallel.tensor.gradient_sums import sum_partial
from workers.training.parallel.tensor.sharding import apply_tensor

__all__ = ["apply_tensor", "sum_partial"]
