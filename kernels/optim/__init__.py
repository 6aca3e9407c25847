"""Optimizer steps over many tensors: `unscale_` and `FusedAdamW`."""

from kernels.optim.adamw import FusedAdamW
from kernels.optim.unscale import unscale_

__all__ = ["FusedAdamW", "unscale_"]
