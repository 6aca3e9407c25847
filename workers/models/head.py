"""The way from hidden states to logits, or to losses without whole logits in memory.

Does not know blocks. Shapes: B batch, S sequence, V vocabulary.
"""

from __future__ import annotations

from torch import Tensor, nn

from workers.contracts.model import ModelSpec


class Head(nn.Linear):
    """`[B, S, hidden]` → logits `[B, S, V]`, or with targets losses."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec.hidden, spec.vocab, bias=False)
        self.softcap = spec.logit_softcap

    def forward(self, x: Tensor, targets_BS: Tensor | None = None, each: bool = False) -> Tensor:
        if targets_BS is None:
            return super().forward(x)
        return losses(x, self.weight, targets_BS, softcap=self.softcap, each=each)


def losses(x: Tensor, weight_VH: Tensor, targets_BS: Tensor, *, softcap: float | None, each: bool) -> Tensor:
    """Cross-entropy of the logits x · weightᵀ, a chunk of tokens at a time: its sum, or `[B, S]` with `each`; fp32."""
    from kernels import linear_cross_entropy  # loads triton

    how = "none" if each else "sum"
    # a look at the targets would wait for a GPU
    return linear_cross_entropy(x, weight_VH, targets_BS, reduction=how, softcap=softcap or 0.0, check=False)
