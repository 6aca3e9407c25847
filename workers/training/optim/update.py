"""The update itself: by the rule's own step, or one that clips and unscales on the way; which AdamW
that is.

Knows neither rules nor how gradients lie over ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol, runtime_checkable

from torch import Tensor
from torch.optim import Optimizer

from kernels import runtime
from kernels.dispatch import Candidate, choose
from workers.metrics.memory import local_tensor
from workers.training.optim.norm import factor_of, scale_


def fused_adamw(parameters: Iterable[Tensor]) -> type[Optimizer] | None:
    """AdamW of `kernels` where it can run on these parameters, else None, told as every choice is."""
    local = next((local_tensor(each.detach()) for each in parameters), None)
    why = "this rank updates nothing" if local is None else runtime.why_not(local)
    if why is None:
        from workers.training.optim.scaled_adamw import ScaledAdamW  # loads triton

        return ScaledAdamW
    facts: dict[str, object] = {} if local is None else {"dtype": local.dtype}
    choose("adamw", facts, [Candidate("own", why), Candidate("torch")])
    return None


@runtime_checkable
class Following(Protocol):
    """An optimizer whose gradients leave the device while the backward pass goes on."""

    def follow(self, final: bool) -> None:
        """What the next backward pass makes is what the update takes, or will be changed before."""
        ...


def update(
    optimizer: Optimizer, gradients: list[Tensor], *, norm: float, limit: float | None, scale: float
) -> None:
    """One step by gradients without their loss scale `scale`, the norm of which (`norm`) is brought
    to `limit` where it
    is above."""
    if getattr(optimizer, "takes_factor", False):
        taking: Any = optimizer
        taking.step(factor=factor_of(norm=norm, limit=limit) / scale)
        return
    scale_(gradients, norm=norm, limit=limit, loss_scale=scale)
    optimizer.step()
