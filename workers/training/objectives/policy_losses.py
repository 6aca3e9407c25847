"""Losses of policy optimization, per token, from log-probabilities of sampled tokens.

Pure functions of tensors of equal shape. `log_ratio` is log(policy / old policy), where old is the
policy at the start of the update.
"""

from __future__ import annotations

import torch
from torch import Tensor

MAX_WEIGHT = 2.0  # of truncated importance weights


def clipped(log_ratio: Tensor, advantages: Tensor, *, low: float, high: float) -> Tensor:
    """-min(ratio A, clip(ratio, 1 - low, 1 + high) A) (PPO, arXiv 1707.06347, equation 7)."""
    ratio = log_ratio.exp()
    limited = ratio.clamp(1 - low, 1 + high)
    return -torch.minimum(ratio * advantages, limited * advantages)


def is_clipped(log_ratio: Tensor, advantages: Tensor, *, low: float, high: float) -> Tensor:
    """Where the clipped term decides, so that the token has no gradient: bool."""
    ratio = log_ratio.exp()
    return ((ratio > 1 + high) & (advantages > 0)) | ((ratio < 1 - low) & (advantages < 0))


def k1(logp: Tensor, reference: Tensor) -> Tensor:
    """log(policy / reference): unbiased, of high variance (Schulman 2020)."""
    return logp - reference


def k2(logp: Tensor, reference: Tensor) -> Tensor:
    """Half the squared log-ratio; its gradient is that of the reverse divergence on policy."""
    return 0.5 * (logp - reference) ** 2


def k3(logp: Tensor, reference: Tensor) -> Tensor:
    """exp(-x) - 1 + x with x the log-ratio: unbiased and never negative (Schulman 2020)."""
    x = logp - reference
    return torch.expm1(-x) + x


def clipped_value(
    values: Tensor, old: Tensor, returns: Tensor, *, clip: float | None
) -> tuple[Tensor, Tensor]:
    """0.5 max((v - R)^2, (clip(v, old ± clip) - R)^2), and where the clipped term decides: bool.

    `old` are the values at the start of the update; without `clip` half the squared error. As in
    the reference implementation of PPO (arXiv 2005.12729, section 3).
    """
    error = (values - returns) ** 2
    if clip is None:
        return 0.5 * error, torch.zeros_like(error, dtype=torch.bool)
    limited = (torch.clamp(values, old - clip, old + clip) - returns) ** 2
    return 0.5 * torch.maximum(error, limited), limited > error


def penalty(estimator: str, logp: Tensor, reference: Tensor, log_ratio: Tensor) -> Tensor:
    """The term of `train.grpo.kl.estimator` in the loss; 0 for `k1_reward`."""
    if estimator == "k2_loss":
        return k2(logp, reference)
    if estimator == "k3_ratio_loss":
        return log_ratio.exp() * k3(logp, reference)
    if estimator == "k3_loss":
        return k3(logp, reference)
    return torch.zeros_like(logp)


def truncated_weights(old: Tensor, sampler: Tensor) -> Tensor:
    """min(old policy / sampler, MAX_WEIGHT) without gradient (arXiv 2505.24298, equation 5)."""
    return (old - sampler).exp().clamp(max=MAX_WEIGHT).detach()
