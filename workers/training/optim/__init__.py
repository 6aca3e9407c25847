"""The update: which rule with which options, its state's split among ranks, gradient norm and
clipping.

Does not know models or learning-rate schedules. What torch does not have, or not over shards,
stands in a file a rule.
"""

from workers.training.optim.build import build_optimizer, fill_state, set_lr
from workers.training.optim.norm import Norms, scale_
from workers.training.optim.update import Following, update
from workers.training.optim.zero1 import masters_of, release, state_of

__all__ = [
    "Following",
    "Norms",
    "build_optimizer",
    "fill_state",
    "masters_of",
    "release",
    "scale_",
    "set_lr",
    "state_of",
    "update",
]
