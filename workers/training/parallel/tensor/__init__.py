"""Tensor and sequence parallelism: parameter placements and redistribution of activations.

Does not depend on data parallelism, pipelines or steps.
"""

from workers.training.parallel.tensor.gradient_sums import sum_partial
from workers.training.parallel.tensor.sharding import apply_tensor

__all__ = ["apply_tensor", "sum_partial"]
