"""The feed-forward network of a block: gated (SwiGLU, GEGLU, ...) or plain.

Shapes: `[..., hidden]` → `[..., hidden]`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import cast

from torch import Tensor, nn
from torch.nn import functional

from workers.contracts.specs.model import ModelSpec
from workers.models.layers.operations import KernelOperations

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "relu": functional.relu,
}


class Mlp(nn.Module):
    """`down(act(gate(x)) * up(x))` (arXiv 2002.05202) or `down(act(up(x)))`; default width: ffn."""

    operations: type[KernelOperations] = KernelOperations

    def __init__(self, spec: ModelSpec, width: int | None = None) -> None:
        super().__init__()
        bias, width = spec.bias == "all", width or spec.ffn
        self.activation = ACTIVATIONS[spec.activation]
        self.gate = nn.Linear(spec.hidden, width, bias=bias) if spec.gated_mlp else None
        self.up = nn.Linear(spec.hidden, width, bias=bias)
        self.down = nn.Linear(width, spec.hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """`[..., hidden]` → `[..., hidden]`."""
        if self.gate is None:
            inner = self.activation(self.up(x))
        else:
            inner = self.operations.gated(self.gate(x), self.up(x), self.activation)
        return cast(Tensor, self.down(inner))
