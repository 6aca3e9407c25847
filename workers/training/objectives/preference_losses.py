"""Losses of preference optimization, from log-probabilities of answers.

Pure functions of tensors; `d` of the formulas is (logp_w - ref_w) - (logp_l - ref_l), the
difference of the log-ratios of chosen and rejected answer.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, relu


def dpo(d: Tensor, *, beta: float) -> Tensor:
    """-log sigmoid(beta d) (arXiv 2305.18290, equation 7)."""
    return -logsigmoid(beta * d)


def cdpo(d: Tensor, *, beta: float, label_smoothing: float) -> Tensor:
    """DPO whose labels are wrong at the rate `label_smoothing` (Mitchell 2023)."""
    right, wrong = logsigmoid(beta * d), logsigmoid(-beta * d)
    return -(1 - label_smoothing) * right - label_smoothing * wrong


def hinge(d: Tensor, *, beta: float) -> Tensor:
    """relu(1 - beta d) (SLiC-HF, arXiv 2305.10425)."""
    return relu(1 - beta * d)


def ipo(mean_d: Tensor, *, beta: float) -> Tensor:
    """(d - 1 / (2 beta))² (arXiv 2310.12036, equation 17); each log-ratio is a mean over tokens."""
    return (mean_d - 1 / (2 * beta)) ** 2


def kto(ratio: Tensor, good: Tensor, *, z: float, beta: float) -> Tensor:
    """1 - sigmoid(beta (ratio - z)) of good answers, 1 - sigmoid(beta (z - ratio)) of bad ones
    (arXiv 2402.01306, equation 8; both weights 1).
    """
    return 1 - torch.sigmoid(torch.where(good, beta * (ratio - z), beta * (z - ratio)))


def bradley_terry(difference: Tensor, margin: Tensor | float = 0.0) -> Tensor:
    """-log sigmoid(r_w - r_l - margin) (Bradley and Terry 1952; margins: arXiv 2307.09288,
    equation 2).
    """
    return -logsigmoid(difference - margin)


def simpo(mean_chosen: Tensor, mean_rejected: Tensor, *, beta: float, gamma: float) -> Tensor:
    """-log sigmoid(beta (mean_w - mean_l) - gamma) (arXiv 2405.14734, equation 6)."""
    return -logsigmoid(beta * (mean_chosen - mean_rejected) - gamma)


def odds_ratio(mean_chosen: Tensor, mean_rejected: Tensor, *, beta: float) -> Tensor:
    """ORPO's term -beta log sigmoid(log odds ratio) (arXiv 2403.07691, equation 7)."""
    log_odds = (mean_chosen - mean_rejected) - (_log1mexp(mean_chosen) - _log1mexp(mean_rejected))
    return -beta * logsigmoid(log_odds)


def orpo(mean_chosen: Tensor, mean_rejected: Tensor, *, beta: float) -> Tensor:
    """The mean loss of the chosen answer's tokens plus `odds_ratio` (equation 6)."""
    return odds_ratio(mean_chosen, mean_rejected, beta=beta) - mean_chosen


def _log1mexp(x: Tensor) -> Tensor:
    """log(1 - exp(x)) for x < 0."""
    return torch.log(-torch.expm1(x.clamp(max=-1e-7)))
