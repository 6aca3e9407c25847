"""AdamW with 8-bit moments (arXiv 2110.02861): 2 bytes per parameter and a scale per 256 numbers.

Torch 2.13 has no 8-bit optimizer. The update is computed in fp32, a few million numbers at a time,
with plain torch operations on any device.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from workers.metrics.memory import local_tensor
from workers.training.optim.blockwise import Blocks, blocks_per_row, dequantize, quantize
from workers.training.optim.parameter_layout import get_layout, state_like
from workers.training.optim.per_parameter import PerParameterOptimizer

_CHUNK_NUMBERS = 1 << 22  # numbers whose moments exist in fp32 at the same time
_MOMENTS = (("exp_avg", True), ("exp_avg_sq", False))


class AdamW8bit(PerParameterOptimizer):
    """The rule and options of torch.optim.AdamW.

    Vectors (norms, biases), which are few and sensitive, keep fp32 moments. So do matrices sharded
    by columns, whose blocks, and so whose numbers, would depend on the sharding.
    """

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ) -> None:
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        )

    def _update(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state.update(_empty_state(parameter))
        state["step"] += 1
        rule = _Rule(group, int(state["step"]))
        weights, grad = local_tensor(parameter), local_tensor(gradient)
        if _in_fp32(parameter):
            rule.apply(weights, grad, *(local_tensor(state[name]) for name, _ in _MOMENTS))
            return
        columns = weights.shape[-1]
        weights_RC, grad_RC = weights.view(-1, columns), grad.reshape(-1, columns)
        codes = {
            name: local_tensor(state[f"{name}_codes"]).view(-1, columns) for name, _ in _MOMENTS
        }
        scales = {
            name: local_tensor(state[f"{name}_scales"]).view(-1, blocks_per_row(columns))
            for name, _ in _MOMENTS
        }
        rows = max(1, _CHUNK_NUMBERS // columns)
        for first in range(0, weights_RC.shape[0], rows):
            rows_chunk = slice(first, first + rows)
            blocks_by_moment = {
                name: Blocks(codes[name][rows_chunk], scales[name][rows_chunk])
                for name, _ in _MOMENTS
            }
            moments = {
                name: dequantize(blocks_by_moment[name], signed=signed) for name, signed in _MOMENTS
            }
            rule.apply(
                weights_RC[rows_chunk],
                grad_RC[rows_chunk],
                moments["exp_avg"],
                moments["exp_avg_sq"],
            )
            for name, signed in _MOMENTS:
                quantize(moments[name], blocks_by_moment[name], signed=signed)


class _Rule:
    def __init__(self, group: dict[str, Any], step: int) -> None:
        (self.beta1, self.beta2), self.eps, lr = group["betas"], group["eps"], group["lr"]
        self.keep = 1 - lr * group["weight_decay"]
        self.rate = lr / (1 - self.beta1**step)
        self.correction = math.sqrt(1 - self.beta2**step)

    def apply(self, weights: Tensor, grad: Tensor, mean: Tensor, square: Tensor) -> None:
        mean.lerp_(grad, 1 - self.beta1)
        square.mul_(self.beta2).addcmul_(grad, grad, value=1 - self.beta2)
        weights.mul_(self.keep).addcdiv_(
            mean, square.sqrt().div_(self.correction).add_(self.eps), value=-self.rate
        )


def _in_fp32(parameter: Tensor) -> bool:
    return parameter.ndim < 2 or bool(get_layout(parameter).axes(parameter.ndim - 1))


def _empty_state(parameter: Tensor) -> dict[str, Tensor]:
    state = {"step": torch.zeros((), dtype=torch.float32)}
    if _in_fp32(parameter):
        return state | {name: torch.zeros_like(parameter) for name, _ in _MOMENTS}
    local, blocks = local_tensor(parameter), blocks_per_row(local_tensor(parameter).shape[-1])
    for name, _ in _MOMENTS:
        codes = torch.zeros_like(local, dtype=torch.uint8)
        scales = local.new_zeros((*local.shape[:-1], blocks), dtype=torch.float32)
        shape = tuple(parameter.shape)
        state[f"{name}_codes"] = state_like(parameter, codes, shape)
        state[f"{name}_scales"] = state_like(parameter, scales, (*shape[:-1], blocks))
    return state
