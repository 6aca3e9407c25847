"""Calibration of a reward model: the share of pairs it ranks right, by its confidence.

Does not depend on models. Shapes: P pairs.
"""

from __future__ import annotations

import torch
from torch import Tensor

BINS = 10  # of confidences from 0.5 to 1


def reliability_sums(difference_P: Tensor) -> list[Tensor]:
    """Of each bin the number of pairs, of right ones and the sum of confidences, in this order.

    A pair's confidence is the probability, by Bradley-Terry, of the answer with the higher reward:
    sigmoid of the absolute difference. It is right if that answer is the chosen one; rewards that
    are equal are half right.
    """
    difference = difference_P.double()
    confidence = torch.sigmoid(difference.abs())
    right = (difference.sign() + 1) / 2
    bins = ((confidence - 0.5) * 2 * BINS).long().clamp(max=BINS - 1)
    sums = torch.zeros(BINS, 3, dtype=torch.float64, device=difference_P.device)
    sums.index_add_(0, bins, torch.stack([torch.ones_like(right), right, confidence], dim=1))
    return list(sums.flatten())


def calibration(sums: list[float]) -> dict[str, float]:
    """`reward/ece`, and of each bin with pairs their number, accuracy and mean confidence.

    The expected calibration error is the mean over pairs of the distance between a bin's accuracy
    and its confidence (Guo et al. 2017, arXiv 1706.04599, equation 3).
    """
    values: dict[str, float] = {}
    error = total = 0.0
    for number in range(BINS):
        pairs, right, confidence = sums[3 * number : 3 * number + 3]
        if not pairs:
            continue
        error, total = error + abs(right - confidence), total + pairs
        values |= {
            f"reward/bin_{number}/pairs": pairs,
            f"reward/bin_{number}/accuracy": right / pairs,
            f"reward/bin_{number}/confidence": confidence / pairs,
        }
    return ({"reward/ece": error / total} if total else {}) | values
