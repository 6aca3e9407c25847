"""Dropout where ranks hold different heads or tokens: each draws its own numbers, and all go on
drawing alike after.

Between blocks ranks that hold the same tokens need the same masks; within attention, and everywhere
under sequence
parallelism, the same numbers on all ranks would drop the same places of different heads or tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from workers.models.initialise import derived_seed


def draw_apart(module: nn.Module, rank: int) -> None:
    """Make `module`'s forward pass in training draw from a stream of this rank's own, begun by the
    common one.

    Under recomputation too: the common stream is set back to where it was, and begins the same one.
    """
    plain = module.forward

    def forward(first: Tensor, *rest: Any) -> Any:
        if not module.training:
            return plain(first, *rest)
        common = int(torch.randint(1 << 62, ()).item())
        with torch.random.fork_rng(devices=[first.device] if first.device.type == "cuda" else []):
            torch.manual_seed(derived_seed(common, "tensor-parallel", rank))
            return plain(first, *rest)

    module.forward = forward
