"""What one step is asked to do: a parameter with its state and options, and what holds for all of
them.

Knows no optimizer and no way to do it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ParameterUpdate:
    """row: (parameter, gradient, exp_avg, exp_avg_sq, step), plain tensors; and the parameter's
    options.
    """

    row: tuple[torch.Tensor, ...]
    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float

    @property
    def param(self) -> torch.Tensor:
        return self.row[0]

    @property
    def grad(self) -> torch.Tensor:
        return self.row[1]


@dataclass(frozen=True)
class StepOptions:
    """inv_scale, grad_norm, found_inf as `FusedAdamW.step` takes them; measured: the norm must be
    found here.
    """

    inv_scale: torch.Tensor | None
    grad_norm: torch.Tensor | None
    found_inf: torch.Tensor | None
    measured: bool
    clip_norm: float | None
    stochastic: bool
    seed: int
