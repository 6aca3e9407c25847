"""Update rules, their sharded state, gradient norms and clipping.

Does not depend on models or learning-rate schedules. Each rule that torch lacks, or lacks for
sharded parameters, has its own file.
"""

from workers.training.optim.build import build_optimizer, fill_state, set_lr
from workers.training.optim.norm import Norms, scale_
from workers.training.optim.update import (
    EarlyGradientCopies,
    skips_on_device,
    update,
    update_unread,
)
from workers.training.optim.zero1 import get_master_weights, get_optimizer_state, release

__all__ = [
    "EarlyGradientCopies",
    "Norms",
    "build_optimizer",
    "fill_state",
    "get_master_weights",
    "get_optimizer_state",
    "release",
    "scale_",
    "set_lr",
    "skips_on_device",
    "update",
    "update_unread",
]
