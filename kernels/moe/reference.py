"""A mixture of experts as it is defined, an assignment at a time; differentiable by torch.

Knows no speed. Shapes: T tokens, E experts, K chosen a token, A = T · K assignments, H width.
"""

from __future__ import annotations

import torch
from torch import Tensor


def gate(
    logits_TE: Tensor, top_k: int, scoring: str, bias_E: Tensor | None, renormalise: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Weights `[T, K]` fp32 (fp64 stays) and experts `[T, K]` int64, best first."""
    scores = scores_of(logits_TE, scoring)
    wanted = scores.detach() if bias_E is None else scores.detach() + bias_E
    chosen = wanted.topk(top_k, dim=-1).indices
    return weights_of(scores, chosen, renormalise, scale), chosen


def scores_of(logits_TE: Tensor, scoring: str) -> Tensor:
    wide = logits_TE if logits_TE.dtype == torch.float64 else logits_TE.float()
    return wide.softmax(-1) if scoring == "softmax" else wide.sigmoid()


def weights_of(scores_TE: Tensor, chosen_TK: Tensor, renormalise: bool, scale: float) -> Tensor:
    weights = scores_TE.gather(-1, chosen_TK)
    if renormalise:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * scale


def unpermute(y_AH: Tensor, place_TK: Tensor, weights_TK: Tensor | None) -> Tensor:
    """`[T, H]`: the sum over k of weights · y[place], in fp32 at least."""
    wide = y_AH if y_AH.dtype == torch.float64 else y_AH.float()
    rows = wide[place_TK.long()]
    return (rows if weights_TK is None else rows * weights_TK.to(wide.dtype).unsqueeze(-1)).sum(1)


def grouped_matmul(x_AK: Tensor, w_ENK: Tensor, counts_E: Tensor) -> Tensor:
    """`[A, N]`: each expert's rows times its weight; rows behind the last expert's are zeros."""
    counts: list[int] = counts_E.tolist()
    pieces = x_AK[: sum(counts)].split(counts)
    done = [piece @ weight.T for piece, weight in zip(pieces, w_ENK.unbind(), strict=True)]
    rest = x_AK.new_zeros(x_AK.shape[0] - sum(counts), w_ENK.shape[1])
    return torch.cat([*done, rest])
