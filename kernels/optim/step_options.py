"""Inputs of one optimizer step: each parameter with its state and options, and the step's
options.
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
        """The parameter."""
        return self.row[0]

    @property
    def grad(self) -> torch.Tensor:
        """Its gradient."""
        return self.row[1]


@dataclass(frozen=True)
class StepOptions:
    """inv_scale, grad_norm, found_inf as in `FusedAdamW.step`; measured: the norm must be computed
    here.
    """

    inv_scale: torch.Tensor | None
    grad_norm: torch.Tensor | None
    found_inf: torch.Tensor | None
    measured: bool
    clip_norm: float | None
    stochastic: bool
    seed: int
