"""Separate random streams for dropout inside attention on tensor-parallel ranks.

Between blocks, ranks with the same tokens need the same masks. Within attention, the same numbers
on all ranks would drop the same positions of different heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor, nn

from workers.models.initialize import derived_seed


def rank_stream(rank: int) -> Callable[[nn.Module, Tensor], AbstractContextManager[None]]:
    """A `Region`'s `around`: in training, draw from this rank's stream, seeded by the common one.

    Also correct under recomputation: the common stream is restored, and seeds the same one.
    """

    @contextmanager
    def around(module: nn.Module, first: Tensor) -> Iterator[None]:
        if not module.training:
            yield
            return
        common = int(torch.randint(1 << 62, ()).item())
        with torch.random.fork_rng(devices=[first.device] if first.device.type == "cuda" else []):
            torch.manual_seed(derived_seed(common, "tensor-parallel", rank))
            yield

    return around
