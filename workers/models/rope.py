"""Rotary position embedding: the angle tables and their application, halves or interleaved pairs.

Does not know attention, or where a sequence stands in a batch. Shapes: B batch, S sequence, H heads, D head_dim.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from workers.contracts.model import Rope, RopeScaling


def rope_tables(rope: Rope, head_dim: int, length: int, device: torch.device | str) -> tuple[Tensor, Tensor]:
    """Cosines and sines, each `[length, head_dim / 2]` in fp32 (RoFormer, arXiv 2104.09864, eq. 34).

    Raises ValueError for a scaling that this version does not compute.
    """
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    frequency = rope.theta**-exponent
    if rope.scaling is not None:
        frequency = _scaled(frequency, rope.scaling)
    angle = torch.arange(length, dtype=torch.float64)[:, None] * frequency[None, :]
    return angle.cos().float().to(device), angle.sin().float().to(device)


def check_rope(rope: Rope) -> None:
    """Raises ValueError when `rope` asks for a scaling that `rope_tables` cannot give."""
    if rope.scaling is not None:
        _scaled(torch.ones(1, dtype=torch.float64), rope.scaling)


def apply_rope(x_BSHD: Tensor, cos_SD: Tensor, sin_SD: Tensor, interleaved: bool) -> Tensor:
    """Turn each head by its position's angle; computed in fp32 because bf16 angles lose far positions."""
    cos, sin = cos_SD[None, :, None, :], sin_SD[None, :, None, :]
    if interleaved:
        first, second = x_BSHD.float()[..., 0::2], x_BSHD.float()[..., 1::2]
        turned = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(-2)
    else:
        first, second = x_BSHD.float().chunk(2, dim=-1)
        turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(x_BSHD.dtype)


def _scaled(frequency: Tensor, scaling: RopeScaling) -> Tensor:
    if scaling.name == "linear":
        return frequency / scaling.factor
    if scaling.name == "llama3":
        return _llama3(frequency, scaling)
    raise ValueError(
        f"rope scaling {scaling.name!r} is not trained by this engine version; "
        "try linear or llama3, or leave rope.scaling out"
    )


def _llama3(frequency: Tensor, scaling: RopeScaling) -> Tensor:
    """Long wavelengths are divided by `factor`, short ones kept, a linear ramp between (Llama 3.1 reference code)."""
    original = scaling.original_max_seq_len or 8192
    wavelength = 2 * math.pi / frequency
    ramp = (original / wavelength - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = ramp.clamp(0, 1)
    return frequency * kept + frequency / scaling.factor * (1 - kept)
