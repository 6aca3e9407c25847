"""Rotary position embedding: the angle tables and their application, halves or interleaved pairs.

Does not depend on attention. Shapes: B batch, S sequence, H heads, D rotary dims.
"""

from __future__ import annotations

import torch
from torch import Tensor

from workers.contracts.specs.model import Rope
from workers.models.layers.rope_scaling import rotary_amplitude, scaled_frequencies


def rope_tables(
    rope: Rope,
    rotary_dim: int,
    length: int,
    device: torch.device | str,
    *,
    max_seq_len: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Cosines and sines, each `[length, rotary_dim / 2]` in fp32 (RoFormer, arXiv 2104.09864).

    `max_seq_len` (default: `length`) is the context that a scaling extends if it has no original
    length. Angles are products of fp32 numbers, as in Llama's code and transformers: with fp64
    angles SmolLM2's logits differ by up to 1.5e-4 from transformers', with these they are equal.
    """
    frequency = scaled_frequencies(
        rope, rotary_dim, length=length, max_seq_len=max_seq_len or length
    )
    angle = torch.arange(length, dtype=torch.float32)[:, None] * frequency[None, :]
    amplitude = rotary_amplitude(rope.scaling)
    return (angle.cos() * amplitude).to(device), (angle.sin() * amplitude).to(device)


def apply_rope(x_BSHD: Tensor, cos_SD: Tensor, sin_SD: Tensor, interleaved: bool) -> Tensor:
    """Rotate each head by its position's angle, in fp32 because bf16 angles are too coarse."""
    cos, sin = cos_SD[None, :, None, :], sin_SD[None, :, None, :]
    if interleaved:
        first, second = x_BSHD.float()[..., 0::2], x_BSHD.float()[..., 1::2]
        rotated = torch.stack(
            (first * cos - second * sin, second * cos + first * sin), dim=-1
        ).flatten(-2)
    else:
        first, second = x_BSHD.float().chunk(2, dim=-1)
        rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return rotated.to(x_BSHD.dtype)
