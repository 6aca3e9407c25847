"""Runs an optimizer step with clipping and unscaling, before it or fused; selects the AdamW to use.

Does not depend on rules or on gradient sharding.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol, runtime_checkable

from torch import Tensor
from torch.optim import Optimizer

from kernels import runtime
from kernels.dispatch import Candidate, choose
from workers.metrics.memory import local_tensor
from workers.training.optim.norm import clip_factor, clip_factor_on_device, scale_


def fused_adamw(parameters: Iterable[Tensor]) -> type[Optimizer] | None:
    """AdamW of `kernels` if it runs on these parameters, else None; records the choice."""
    local = next((local_tensor(each.detach()) for each in parameters), None)
    why = "this rank updates nothing" if local is None else runtime.why_not(local)
    if why is None:
        from workers.training.optim.scaled_adamw import ScaledAdamW  # loads triton

        return ScaledAdamW
    facts: dict[str, object] = {} if local is None else {"dtype": local.dtype}
    choose("adamw", facts, [Candidate("own", why), Candidate("torch")])
    return None


@runtime_checkable
class ScalingOptimizer(Protocol):
    """An optimizer whose `step` may take the combined factor of clipping and unscaling.

    `step(factor=…)` if `accepts_factor`. If it `skips_on_device` too, the factor may be a tensor on
    the device, and `step(skip=…)` takes one that skips the whole update unless it is zero.
    """

    @property
    def accepts_factor(self) -> bool:
        """Whether `step` multiplies gradients by a factor."""
        ...

    @property
    def skips_on_device(self) -> bool:
        """Whether `step` decides on the device whether to update."""
        ...


@runtime_checkable
class EarlyGradientCopies(Protocol):
    """An optimizer that copies gradients off the device during the backward pass."""

    def set_gradients_final(self, final: bool) -> None:
        """Declare whether the next backward pass's gradients stay unchanged until the update."""
        ...


def update(
    optimizer: Optimizer, gradients: list[Tensor], *, norm: float, limit: float | None, scale: float
) -> None:
    """One step with gradients that include the loss scale `scale`.

    `norm` is their norm without that scale; it is clipped to `limit`.
    """
    if isinstance(optimizer, ScalingOptimizer) and optimizer.accepts_factor:
        accepting: Any = optimizer
        accepting.step(factor=clip_factor(norm=norm, limit=limit) / scale)
        return
    scale_(gradients, norm=norm, limit=limit, loss_scale=scale)
    optimizer.step()


def update_unread(
    optimizer: Optimizer, *, norm: Tensor, limit: float | None, scale: float, skip: Tensor
) -> None:
    """`update` with a norm that only the device knows; the host does not wait.

    `norm`: fp64, no dimension. `skip`: fp32, one element; the update is skipped unless it is zero.
    The optimizer must `skips_on_device`.
    """
    accepting: Any = optimizer
    accepting.step(factor=clip_factor_on_device(norm=norm, limit=limit) / scale, skip=skip)


def skips_on_device(optimizer: Optimizer) -> bool:
    """Whether `update_unread` takes this optimizer."""
    return isinstance(optimizer, ScalingOptimizer) and optimizer.skips_on_device
