"""The way from hidden states to logits, or to losses without whole logits in memory.

Does not know blocks. Shapes: B batch, S sequence, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from workers.contracts.specs.model import ModelSpec

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class Head(nn.Linear):
    """`[B, S, hidden]` → logits `[B, S, V]`, or with targets losses."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec.hidden, spec.vocab, bias=False)
        self.softcap = spec.logit_softcap

    def forward(self, x: Tensor, targets_BS: Tensor | None = None, each: bool = False) -> Tensor:
        if targets_BS is None:
            return super().forward(x)
        return losses(x, self.weight, targets_BS, softcap=self.softcap, each=each)


def losses(
    x: Tensor, weight_VH: Tensor, targets_BS: Tensor, *, softcap: float | None, each: bool
) -> Tensor:
    """Cross-entropy of the logits x · weightᵀ, a chunk of tokens at a time: its sum, or `[B, S]`
    with `each`; fp32.

    Where the vocabulary's rows lie over ranks both are DTensors, `x` whole on each: of every chunk
    three numbers a
    token travel, and hidden states' gradients once.
    """
    from kernels import linear_cross_entropy  # loads triton

    # a look at the targets would wait for a GPU
    how: dict[str, Any] = {
        "reduction": "none" if each else "sum",
        "softcap": softcap or 0.0,
        "check": False,
    }
    lying: Any = weight_VH
    mesh = getattr(lying, "device_mesh", None)
    if mesh is not None:
        whole: Any = x
        how |= {"group": mesh.get_group(), "start": rows_of(weight_VH.shape[0], mesh)[0]}
        x, weight_VH = whole.to_local(), lying.to_local()
    return linear_cross_entropy(x, weight_VH, targets_BS, **how)


def rows_of(vocab: int, mesh: DeviceMesh) -> tuple[int, int]:
    """Of a vocabulary cut over a mesh as `torch.chunk` does: this rank's first row, and the one
    after its last.
    """
    each = -(-vocab // mesh.size())
    start = min(vocab, each * mesh.get_local_rank())
    return start, min(vocab, start + each)
