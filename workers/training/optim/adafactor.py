"""Adafactor for plain and sharded parameters (arXiv 1804.04235): factored second moments per
matrix.

The rule and constants of torch.optim.Adafactor. Torch 2.13's raises errors for sharded matrices and
copies two norms per parameter to the host; this one reduces them over ranks, one message per
layout.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from workers.metrics.memory import local_tensor
from workers.training.optim.parameter_layout import Layout, get_layout, state_like

_BETA2_DECAY = -0.8
_LEAST_RMS = 1e-3  # of a parameter, for its relative step
_LARGEST_UPDATE = 1.0  # RMS above which an update is scaled down
_TINY = torch.finfo(torch.float32).eps


class Adafactor(Optimizer):
    """Step sizes are relative to a parameter's RMS: at most `lr` of it, and 1 / sqrt(t) once
    smaller.

    Uses the gradients as scratch space: after a step they hold the updates.
    """

    def __init__(
        self, params: Iterable[Any], *, lr: float = 1e-2, weight_decay: float = 0.0
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        for group in self.param_groups:
            by_layout: dict[tuple[Layout, int], list[Tensor]] = defaultdict(list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    if not state:
                        state.update(_empty_state(parameter))
                    state["step"] += 1
                    by_layout[get_layout(parameter), parameter.ndim].append(parameter)
            for (layout, dims), parameters in by_layout.items():
                self._update(parameters, layout, dims, group)

    def _update(
        self, parameters: list[Tensor], layout: Layout, dims: int, group: dict[str, Any]
    ) -> None:
        """Update parameters of equal layout: each sum over ranks is one message for all of them."""
        steps = [int(self.state[each]["step"]) for each in parameters]
        weights = [local_tensor(each) for each in parameters]
        grads = [local_tensor(each.grad) for each in parameters if each.grad is not None]
        sizes = [math.sqrt(each.numel()) for each in parameters]
        estimate = self._factored if dims > 1 else self._plain
        lengths = _lengths(layout, weights)
        for grad, variance in zip(grads, estimate(parameters, grads, layout, steps), strict=True):
            grad.mul_(variance.clamp_(min=_TINY * _TINY).rsqrt_())
        updates = _lengths(layout, grads)
        lr, decay = group["lr"], group["weight_decay"]
        for index, step in enumerate(steps):
            relative = min(lr, 1 / math.sqrt(step)) * max(_LEAST_RMS, lengths[index] / sizes[index])
            shrink = max(1.0, updates[index] / (sizes[index] * _LARGEST_UPDATE))
            weights[index].mul_(1 - lr * decay).sub_(grads[index], alpha=relative / shrink)

    def _plain(
        self, parameters: list[Tensor], grads: list[Tensor], layout: Layout, steps: list[int]
    ) -> Iterable[Tensor]:
        for parameter, grad, step in zip(parameters, grads, steps, strict=True):
            variance_state = local_tensor(self.state[parameter]["variance"])
            yield variance_state.lerp_(grad.square(), step**_BETA2_DECAY).clone()

    def _factored(
        self, parameters: list[Tensor], grads: list[Tensor], layout: Layout, steps: list[int]
    ) -> Iterable[Tensor]:
        """Yield second moments estimated as rows x columns / mean of rows."""
        across, down = layout.axes(parameters[0].ndim - 1), layout.axes(parameters[0].ndim - 2)
        row_sums = layout.sums(
            (torch.linalg.vector_norm(g, dim=-1, keepdim=True).square_() for g in grads), across
        )
        column_sums = layout.sums(
            (torch.linalg.vector_norm(g, dim=-2, keepdim=True).square_() for g in grads), down
        )
        rows, columns = [], []
        for parameter, row, column, step in zip(
            parameters, row_sums, column_sums, steps, strict=True
        ):
            state, new = self.state[parameter], step**_BETA2_DECAY
            rows.append(local_tensor(state["row_var"]).lerp_(row / parameter.shape[-1], new))
            columns.append(local_tensor(state["col_var"]).lerp_(column / parameter.shape[-2], new))
        totals = layout.sums((row.sum(dim=-2, keepdim=True) for row in rows), down)
        for parameter, row, column, total in zip(parameters, rows, columns, totals, strict=True):
            yield (row @ column).div_((total / parameter.shape[-2]).clamp_(min=_TINY))


def _lengths(layout: Layout, tensors: list[Tensor]) -> list[float]:
    """Euclidean norms of the full tensors, with one message and one copy to the host."""
    norms = torch._foreach_norm(tensors, 2, dtype=torch.float64)
    [squares] = layout.sums([torch.stack(list(norms)).square_()], layout.axes())
    lengths: list[float] = squares.sqrt_().tolist()
    return lengths


def _empty_state(parameter: Tensor) -> dict[str, Tensor]:
    state = {"step": torch.zeros((), dtype=torch.float32)}
    if parameter.ndim < 2:
        return state | {"variance": torch.zeros_like(parameter)}
    local, shape = local_tensor(parameter), tuple(parameter.shape)
    row = local.new_zeros((*local.shape[:-1], 1))
    column = local.new_zeros((*local.shape[:-2], 1, local.shape[-1]))
    return state | {
        "row_var": state_like(parameter, row, (*shape[:-1], 1)),
        "col_var": state_like(parameter, column, (*shape[:-2], 1, shape[-1])),
    }
