"""Optimizer state off the device: in host memory (ZeRO-Offload) or on a local disk (ZeRO-Infinity).

Does not depend on update rules, plans or steps.
"""

from workers.training.offload.disk import Disk
from workers.training.offload.host_optimizer import OffloadedOptimizer

__all__ = ["Disk", "OffloadedOptimizer"]
