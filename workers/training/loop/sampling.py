"""Draws a token from logits with a seed of its own, the same under every plan."""

from __future__ import annotations

import torch
from torch import Tensor

from workers.models.initialize import derived_seed


def draw_token(logits_V: Tensor, temperature: float, seed: tuple[int | str, ...]) -> int:
    """A token of softmax(logits / temperature); the most probable one at temperature 0."""
    logits = logits_V.double().cpu()
    if temperature == 0:
        return int(logits.argmax())
    generator = torch.Generator().manual_seed(derived_seed(*seed))
    draw = torch.rand((), dtype=torch.float64, generator=generator)
    cumulative = torch.softmax(logits / temperature, 0).cumsum(0)
    index = int(torch.searchsorted(cumulative, draw * cumulative[-1], right=True))
    return min(index, len(cumulative) - 1)
