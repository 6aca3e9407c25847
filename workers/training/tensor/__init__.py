"""Tensor and sequence parallelism: how a decoder lies over a mesh axis, and what travels between
its parts.

Does not know data parallelism, pipelines or steps.
"""

from workers.training.tensor.apply import apply_tensor
from workers.training.tensor.gradients import sum_partial

__all__ = ["apply_tensor", "sum_partial"]
