"""Norms with torch's parameters and names, computed by the model's operations."""

from __future__ import annotations

from torch import Tensor, nn

from workers.models.layers.operations import KernelOperations


class RmsNorm(nn.RMSNorm):
    """Over the last dimension, `width` numbers."""

    operations: type[KernelOperations] = KernelOperations

    def __init__(self, width: int, *, eps: float) -> None:
        super().__init__(width, eps=eps)
        self.epsilon = eps

    def forward(self, x: Tensor) -> Tensor:
        """`x` normalized."""
        return self.operations.rms_norm(x, self.weight, self.epsilon)


class LayerNorm(nn.LayerNorm):
    """Over the last dimension, `width` numbers."""

    operations: type[KernelOperations] = KernelOperations

    def __init__(self, width: int, *, eps: float, bias: bool) -> None:
        super().__init__(width, eps=eps, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """`x` normalized."""
        return self.operations.layer_norm(x, self.weight, self.bias, self.eps)
