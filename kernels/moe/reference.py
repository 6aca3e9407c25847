"""A mixture of experts by its definition, one assignment at a time; differentiable by torch.

Shapes: T tokens, E experts, K experts per token, A = T · K assignments, H width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class GateOptions:
    """The options of a gate, named as in `moe_gate`."""

    top_k: int
    scoring: str
    groups: int
    top_k_groups: int
    renormalise: bool
    scale: float


def gate(logits_TE: Tensor, options: GateOptions, bias_E: Tensor | None) -> tuple[Tensor, Tensor]:
    """Weights `[T, K]` fp32 (fp64 stays) and experts `[T, K]` int64, best first."""
    scores = compute_scores(logits_TE, options.scoring)
    ranking = scores.detach() if bias_E is None else scores.detach() + bias_E
    if options.top_k_groups < options.groups:
        ranking = mask_groups(ranking, options)
    chosen = ranking.topk(options.top_k, dim=-1).indices
    return compute_weights(scores, chosen, options), chosen


def mask_groups(ranking_TE: Tensor, options: GateOptions) -> Tensor:
    """-inf for experts outside the best groups."""
    grouped = ranking_TE.unflatten(-1, (options.groups, -1))
    best = min(2 if options.scoring == "sigmoid" else 1, grouped.shape[-1])
    chosen_groups = (
        grouped.topk(best, dim=-1).values.sum(-1).topk(options.top_k_groups, dim=-1).indices
    )
    outside = torch.ones(grouped.shape[:-1], dtype=torch.bool, device=ranking_TE.device).scatter(
        -1, chosen_groups, False
    )
    masked: Tensor = grouped.masked_fill(outside.unsqueeze(-1), -torch.inf).flatten(-2)
    return masked


def compute_scores(logits_TE: Tensor, scoring: str) -> Tensor:
    """Softmax or sigmoid of the logits, in fp32 (fp64 stays)."""
    wide = logits_TE if logits_TE.dtype == torch.float64 else logits_TE.float()
    return wide.softmax(-1) if scoring == "softmax" else wide.sigmoid()


def compute_weights(scores_TE: Tensor, chosen_TK: Tensor, options: GateOptions) -> Tensor:
    """Weights of the chosen experts from their scores."""
    weights = scores_TE.gather(-1, chosen_TK)
    if options.renormalise:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * options.scale


def unpermute(y_AH: Tensor, position_TK: Tensor, weights_TK: Tensor | None) -> Tensor:
    """`[T, H]`: the sum over k of weights · y[position], in fp32 at least."""
    wide = y_AH if y_AH.dtype == torch.float64 else y_AH.float()
    rows = wide[position_TK.long()]
    return (rows if weights_TK is None else rows * weights_TK.to(wide.dtype).unsqueeze(-1)).sum(1)


def grouped_matmul(x_AK: Tensor, w_ENK: Tensor, counts_E: Tensor) -> Tensor:
    """`[A, N]`: each expert's rows times its weight; zeros after the last expert's rows."""
    counts: list[int] = counts_E.tolist()
    pieces = x_AK[: sum(counts)].split(counts)
    done = [part @ weight.T for part, weight in zip(pieces, w_ENK.unbind(), strict=True)]
    rest = x_AK.new_zeros(x_AK.shape[0] - sum(counts), w_ENK.shape[1])
    return torch.cat([*done, rest])
