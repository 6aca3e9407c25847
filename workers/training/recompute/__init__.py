"""Recomputation of activations in the backward pass: none, full, selective or auto (measured).

`auto` is imported by its module name, because it measures a parallelized model, which is built from
this package.
"""

from workers.training.recompute.apply import apply_recompute
from workers.training.recompute.flops import hardware_factor

__all__ = ["apply_recompute", "hardware_factor"]
