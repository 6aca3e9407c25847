"""Keeping experts evenly loaded: the auxiliary loss, the load counters, and the training loop's handle on both.

Does not know routing or steps. Shapes: B batch, S sequence, K chosen a token, E experts, L routing layers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from workers.contracts.model import Moe

MOST_LOADS = 512


class Balance(nn.Module):
    """Passes a layer's output through; its backward pass counts loads and adds the auxiliary loss's gradient.

    The backward pass, because it runs once a micro-batch where a recomputed forward pass runs twice, and runs in
    whatever stage of a pipeline the layer stands. Does nothing outside training.
    """

    def __init__(self, moe: Moe) -> None:
        super().__init__()
        self.experts, self.coefficient = moe.experts, moe.aux_loss
        self.gradient_scale = 0.0
        self.told: Tensor | None = None  # E loads and the summed auxiliary loss, since last taken

    def forward(self, out: Tensor, scores_BSE: Tensor, chosen_BSK: Tensor) -> Tensor:
        if not (self.training and torch.is_grad_enabled()):
            return out
        assigned_BE = functional.one_hot(chosen_BSK, self.experts).sum((1, 2))
        loss = balance_loss(scores_BSE, assigned_BE) * self.coefficient
        passed: Tensor = _Through.apply(out, loss, assigned_BE.sum(0), self)  # type: ignore[no-untyped-call]
        return passed

    def add(self, loads_E: Tensor, loss: Tensor) -> None:
        told = torch.cat((loads_E.double(), loss.double().reshape(1)))
        self.told = told if self.told is None else self.told + told


class _Through(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, loss: Tensor, loads_E: Tensor, balance: Balance) -> Tensor:
        ctx.loss, ctx.loads_E, ctx.balance = loss.detach(), loads_E, balance
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        ctx.balance.add(ctx.loads_E, ctx.loss)
        return gradients[0], torch.full_like(ctx.loss, ctx.balance.gradient_scale), None, None


def balance_loss(scores_BSE: Tensor, assigned_BE: Tensor) -> Tensor:
    """Sum over sequences of Σ_e f_e · P_e (DeepSeek-V3, arXiv 2412.19437, eq. 17 to 20), before its coefficient.

    f_e is the share of a sequence's assignments times E, P_e its mean normalised score: 1 when balanced. By sequence,
    so that a batch's loss is the same however it is spread over ranks and micro-batches.
    """
    share_BE = assigned_BE * (assigned_BE.shape[1] / assigned_BE.sum(1, keepdim=True))
    mean_BE = (scores_BSE / (scores_BSE.sum(-1, keepdim=True) + 1e-20)).mean(1)
    return (share_BE * mean_BE).sum()


class Balancer:
    """The training loop's handle on all routing layers of a model, in order of depth.

    `told` is how many numbers `take` gives: each layer's loads and its summed auxiliary loss, one layer after another.
    """

    def __init__(self, model: nn.Module, moe: Moe) -> None:
        self.moe = moe
        self.layers = [module for module in model.modules() if isinstance(module, Balance)]
        self.biases = [buffer for name, buffer in model.named_buffers() if name.endswith("choice_bias")]
        self.told = len(self.layers) * (moe.experts + 1)

    def scale_gradients(self, scale: float) -> None:
        """What one sequence's auxiliary loss counts for in the gradients that the next backward passes leave."""
        for layer in self.layers:
            layer.gradient_scale = scale

    def take(self, device: torch.device) -> Tensor:
        """`[L · (E + 1)]` in fp64 of what this rank did since the last call; summed over ranks, `values` reads it."""
        empty = torch.zeros(self.moe.experts + 1, dtype=torch.float64, device=device)
        taken = [empty if layer.told is None else layer.told for layer in self.layers]
        for layer in self.layers:
            layer.told = None
        return torch.cat(taken)

    @torch.no_grad()
    def update(self, told: list[float]) -> None:
        """Move each choice bias by `bias_update` towards even loads (arXiv 2408.15664, algorithm 1)."""
        for bias, loads in zip(self.biases, self._loads(told) if self.biases else [], strict=True):
            bias += (self.moe.bias_update * torch.sign(loads.mean() - loads)).to(bias)

    def values(self, told: list[float], *, sequences: int) -> dict[str, float]:
        """Metrics of a step over `sequences`: each expert's share of its layer's assignments times E (1 when even),
        the largest of them minus 1 (MaxVio, arXiv 2408.15664, eq. 4), and the auxiliary loss summed over layers.

        Layers count from the first routing one. Of models with more than MOST_LOADS experts in all the loads are left
        out: a series for each of DeepSeek-V3's 14,848 would drown all others.
        """
        loads = self._loads(told)
        shares = (loads / loads.mean(1, keepdim=True)).tolist()
        named: dict[str, float] = {}
        if loads.numel() <= MOST_LOADS:
            named = {f"moe/load/{layer}/{e}": load for layer, row in enumerate(shares) for e, load in enumerate(row)}
        auxiliary = sum(told[self.moe.experts :: self.moe.experts + 1]) / sequences
        return {"moe/aux_loss": auxiliary, "moe/max_violation": max(map(max, shares)) - 1, **named}

    def _loads(self, told: list[float]) -> Tensor:
        return torch.tensor(told, dtype=torch.float64).view(len(self.layers), -1)[:, :-1]
