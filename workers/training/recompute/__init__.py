"""Activations computed again in the backward pass: none, all (full), the cheap ones (selective), or
as measured (auto).

`auto` is imported by its own name: it measures a parallelised model, which is built with the rest.
"""

from workers.training.recompute.apply import apply_recompute
from workers.training.recompute.flops import hardware_factor

__all__ = ["apply_recompute", "hardware_factor"]
