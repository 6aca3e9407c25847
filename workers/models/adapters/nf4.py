"""NF4 weights: 4-bit codes of blocks of 64 inputs, with scales in fp32 or in 8 bits.

The layout of bitsandbytes: the first value of a byte is in its high nibble; with double
quantization the scales minus their mean have 8-bit codes in blocks of 256 (arXiv 2305.14314,
section 3). Does not depend on modules or on how weights are sharded.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from workers.contracts.catalog.adapter_shapes import DOUBLE_BLOCK, NF4_BLOCK
from workers.models.adapters.codebooks import dynamic_levels, nf4_levels

_NUMBERS = 1 << 22
Place = tuple[slice, slice]


@dataclass(frozen=True, slots=True)
class Nf4:
    """A weight `[N, K]`, or a part of it, in 4 bits.

    `codes` `[N, K / 2]` uint8. `scales` `[N, K / 64]`: fp32, or uint8 codes of double quantization;
    then `groups` are the fp32 scales of groups of 256 scales of the full weight, `mean` is added,
    and `group_of` `[N, K / 64]` is each scale's group, computed from `first` and `columns`.
    """

    codes: Tensor
    scales: Tensor
    groups: Tensor | None = None
    mean: Tensor | None = None
    first: int = 0
    columns: int = 0

    def part(self, place: Place) -> Nf4:
        """The rows and columns of `place`, multiples of 64 columns: this rank's shard."""
        rows, columns = place
        low, high = columns.start or 0, columns.stop
        per_block = NF4_BLOCK
        scales = self.scales[rows, low // per_block : high // per_block].contiguous()
        codes = self.codes[rows, low // 2 : high // 2].contiguous()
        first = (rows.start or 0) * self.columns + low // per_block
        return Nf4(codes, scales, self.groups, self.mean, first, self.columns)

    def absmax(self) -> Tensor:
        """Each block's scale, `[N, K / 64]` fp32."""
        if self.groups is None or self.mean is None:
            return self.scales
        rows, columns = self.scales.shape
        place = torch.arange(rows, device=self.scales.device)[:, None] * self.columns
        place = place + torch.arange(columns, device=self.scales.device) + self.first
        levels = _dynamic(self.scales.device)
        return levels[self.scales.int()] * self.groups[place // DOUBLE_BLOCK] + self.mean

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The weight `[N, K]` in `dtype`."""
        rows, half = self.codes.shape
        out = torch.empty(rows, 2 * half, dtype=dtype, device=self.codes.device)
        absmax, pairs = self.absmax().unsqueeze(-1), _pairs(self.codes.device)
        # by groups of rows, so that little exists in fp32 at a time
        step = max(1, _NUMBERS // (2 * half))
        for first in range(0, rows, step):
            values = pairs[self.codes[first : first + step].int()]  # [rows, K / 2, 2]
            blocks = values.view(len(values), -1, NF4_BLOCK) * absmax[first : first + step]
            out[first : first + step] = blocks.view(len(values), -1)
        return out


def quantize_nf4(weight: Tensor, *, double: bool) -> Nf4:
    """The weight `[N, K]` rounded to NF4. Raises ValueError if K is not a multiple of 64."""
    rows, inputs = weight.shape
    if inputs % NF4_BLOCK:
        raise ValueError(f"NF4 has one scale for {NF4_BLOCK} inputs, the weight has {inputs}")
    blocks = weight.detach().float().view(rows, -1, NF4_BLOCK)
    absmax = blocks.abs().amax(-1)
    shares = blocks / torch.where(absmax == 0, 1.0, absmax).unsqueeze(-1)
    codes = torch.bucketize(shares, _midpoints(_nf4(weight.device))).to(torch.uint8)
    codes = codes.view(rows, -1, 2)
    packed = codes[..., 0] << 4 | codes[..., 1]
    columns = inputs // NF4_BLOCK
    if not double:
        return Nf4(packed, absmax, columns=columns)
    mean = absmax.mean()
    centered = absmax.flatten() - mean
    count = -(-centered.numel() // DOUBLE_BLOCK)
    padded = centered.new_zeros(count * DOUBLE_BLOCK)
    padded[: centered.numel()] = centered
    groups = padded.view(count, DOUBLE_BLOCK).abs().amax(-1)
    shares = padded.view(count, DOUBLE_BLOCK) / torch.where(groups == 0, 1.0, groups).unsqueeze(-1)
    scales = torch.bucketize(shares, _midpoints(_dynamic(weight.device))).to(torch.uint8)
    scales = scales.flatten()[: absmax.numel()].view_as(absmax)
    return Nf4(packed, scales, groups, mean, columns=columns)


def _midpoints(levels: Tensor) -> Tensor:
    return (levels[1:] + levels[:-1]) / 2


@cache
def _nf4(device: torch.device) -> Tensor:
    return torch.tensor(nf4_levels(), dtype=torch.float32, device=device)


@cache
def _dynamic(device: torch.device) -> Tensor:
    return torch.tensor(dynamic_levels(signed=True), dtype=torch.float32, device=device)


@cache
def _pairs(device: torch.device) -> Tensor:
    """The two values of each byte, `[256, 2]`: the high nibble's first."""
    levels, byte = _nf4(device), torch.arange(256, device=device)
    return torch.stack([levels[byte >> 4], levels[byte & 15]], dim=1)
