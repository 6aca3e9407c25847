"""The output head: logits, or losses without full logits in memory.

Shapes: B batch, S sequence, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from workers.contracts.specs.model import ModelSpec

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class Head(nn.Linear):
    """`[B, S, hidden]` → logits `[B, S, V]`, or losses if there are targets; V is 1 of a scalar
    head.
    """

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec.hidden, 1 if spec.scalar_head else spec.vocab, bias=False)
        self.softcap = spec.logit_softcap

    def forward(self, x: Tensor, targets_BS: Tensor | None = None, each: bool = False) -> Tensor:
        """Logits, or with targets the result of `losses`."""
        if targets_BS is None:
            return super().forward(x)
        return losses(x, self.weight, targets_BS, softcap=self.softcap, each=each)


def losses(
    x: Tensor, weight_VH: Tensor, targets_BS: Tensor, *, softcap: float | None, each: bool
) -> Tensor:
    """Cross-entropy of the logits x · weightᵀ by chunks: the sum, or `[B, S]` with `each`; fp32.

    With a vocabulary sharded over ranks both are DTensors, `x` replicated: three numbers
    per token are communicated for each chunk, and the gradients of hidden states once.
    """
    from kernels import linear_cross_entropy  # imports triton

    # checking the targets would synchronize a GPU
    options: dict[str, Any] = {
        "reduction": "none" if each else "sum",
        "softcap": softcap or 0.0,
        "check": False,
    }
    sharded: Any = weight_VH
    mesh = getattr(sharded, "device_mesh", None)
    if mesh is not None:
        replicated: Any = x
        options |= {"group": mesh.get_group(), "start": vocab_rows(weight_VH.shape[0], mesh)[0]}
        x, weight_VH = replicated.to_local(), sharded.to_local()
    return linear_cross_entropy(x, weight_VH, targets_BS, **options)


def vocab_rows(vocab: int, mesh: DeviceMesh) -> tuple[int, int]:
    """This rank's rows `(first, end)` of a vocabulary sharded over a mesh as by `torch.chunk`."""
    size = -(-vocab // mesh.size())
    start = min(vocab, size * mesh.get_local_rank())
    return start, min(vocab, start + size)
