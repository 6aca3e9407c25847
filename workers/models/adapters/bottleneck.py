"""Bottleneck adapters: a small MLP with a residual after attention and after the feed-forward
network.

Does not depend on where it is placed.
"""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn
from torch.nn import functional


class Bottleneck(nn.Module):
    """`x + up(gelu(down(x)))` with `size` units (Houlsby et al. 2019, arXiv 1902.00751)."""

    def __init__(self, hidden: int, size: int) -> None:
        super().__init__()
        self.down = nn.Linear(hidden, size)
        self.up = nn.Linear(size, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """`[..., hidden]` → `[..., hidden]`."""
        return x + cast(Tensor, self.up(functional.gelu(self.down(x))))
