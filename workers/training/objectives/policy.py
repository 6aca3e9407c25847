"""Policy optimization on sampled answers: clipped importance ratios, and a penalty by a reference.

Rows carry advantages and earlier log-probabilities (`Row.values`); how answers are sampled and
scored is not known here. Does not hold the formulas (`policy_losses`).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from workers.contracts.catalog.ratio_bins import RATIO_BINS, RATIO_EDGES
from workers.contracts.specs.finetuning.reinforcement import PolicyBody
from workers.training.data.rows import Row
from workers.training.objectives import policy_losses as losses
from workers.training.objectives.objective import Objective, TokenObjective
from workers.training.objectives.token_losses import token_losses
from workers.training.parallel.batch_sharding import IGNORED, Batch, Reference

# names of `Row.values`: each token's advantage, and log-probabilities by the sampler, by the policy
# at the start of the update (absent: the current one), and by the reference
ADVANTAGE, SAMPLER, OLD, REFERENCE = "advantage", "sampler", "old", "reference"


class Policy(Objective):
    """`loss` is the mean over answers of their weighted token losses, or over tokens.

    A row's weights hold how its tokens are averaged: 1 for means over tokens, else one over the
    answer's length (or the longest possible one), so that an answer counts once.
    """

    metrics = (
        "tokens",
        "kl",
        "entropy",
        "clip_fraction",
        "mismatch/kl",
        "mismatch/ratio",
        "mismatch/outside",
        *RATIO_BINS,
    )
    reads_reference = False

    def __init__(self, options: PolicyBody, *, fused: bool = True) -> None:
        super().__init__(fused=fused)
        self.options = options
        self.temperature = options.rollout.temperature
        self.kl_coef = options.kl.coef
        self.by_token = options.averages_tokens

    def count(self, row: Row) -> float:
        """The row's trained tokens, or 1 for an answer that is trained on."""
        if self.by_token:
            return float(row.weights.sum(dtype="float64"))
        return float(bool(row.weights.any()))

    def from_logits(self, logits_BSV: Tensor, batch: Batch) -> Tensor:
        """Losses from logits at the sampler's temperature."""
        return self.from_token_losses(self.scaled_losses(logits_BSV, batch), batch)

    def reference_of(self, logits_BSV: Tensor, batch: Batch) -> Reference:
        """See `scaled_losses`."""
        return self.scaled_losses(logits_BSV, batch)

    def scaled_losses(self, logits_BSV: Tensor, batch: Batch) -> Tensor:
        """The cross-entropy of each target at the sampler's temperature, `[B, S]`."""
        scaled = logits_BSV if self.temperature == 1.0 else logits_BSV / self.temperature
        return token_losses(scaled, batch.targets, fused=self.fused)

    def from_token_losses(self, losses_BS: Tensor, batch: Batch) -> Tensor:
        """Weighted losses, `[B, S]`."""
        if not batch.rows:  # padding only
            return 0.0 * losses_BS
        clip, values = self.options.clip, batch.values
        trained = batch.targets != IGNORED
        logp = -losses_BS
        advantages, sampler = values[ADVANTAGE], values[SAMPLER]
        old = values.get(OLD, logp.detach())
        log_ratio = logp - old
        bounds = {"low": clip.low, "high": clip.high}
        out = losses.clipped(log_ratio, advantages, **bounds)
        if self.options.corrects_mismatch:
            out = out * losses.truncated_weights(old, sampler)
        if REFERENCE in values:
            reference = values[REFERENCE]
            estimator = self.options.kl.estimator
            out = out + self.kl_coef * losses.penalty(estimator, logp, reference, log_ratio)
        self._add_metrics(logp.detach(), old, values, trained)
        weighted = out if batch.weights is None else out * batch.weights
        return weighted.masked_fill(~trained, 0.0)

    def _add_metrics(
        self, logp: Tensor, old: Tensor, values: Mapping[str, Tensor], trained: Tensor
    ) -> None:
        clip = self.options.clip
        advantages, sampler = values[ADVANTAGE], values[SAMPLER]
        clipped = losses.is_clipped(logp - old, advantages, low=clip.low, high=clip.high)
        kl = losses.k3(logp, values[REFERENCE]) if REFERENCE in values else torch.zeros_like(logp)
        mismatch = old - sampler
        ratio = mismatch.exp()
        outside = (ratio < 0.5) | (ratio > 2)
        sums = (torch.ones_like(logp), kl, -logp, clipped, torch.expm1(mismatch) - mismatch)
        bins = ratio_bins(logp - old)
        self.add([(each * trained).sum() for each in (*sums, ratio, outside, *bins)])

    def values(self, sums: list[float], *, count: float) -> dict[str, float]:
        """Means over the step's trained tokens."""
        tokens, *rest = sums
        means = {
            name: total / max(1.0, tokens)
            for name, total in zip(self.metrics[1:], rest, strict=True)
        }
        if not self.options.needs_reference:
            del means["kl"]
        return {"trained_tokens": tokens, **means}


class TokenPolicy(Policy, TokenObjective):
    """At temperature 1, where the head may compute cross-entropies without full logits."""


def ratio_bins(log_ratio: Tensor) -> list[Tensor]:
    """Of each bin of `RATIO_BINS` the tokens whose ratio is in it: bool, of the ratio's shape."""
    edges = torch.tensor(RATIO_EDGES, device=log_ratio.device, dtype=torch.float64).log()
    numbers = torch.bucketize(log_ratio.double(), edges)
    return [numbers == number for number in range(len(RATIO_BINS))]
