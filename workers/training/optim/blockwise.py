"""8-bit optimizer state: blocks with one scale each, and codes that are densest near large values.

Dynamic quantization of arXiv 2110.02861 (sections 1.2, 2.1). Does not depend on optimizers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from workers.models.adapters.codebooks import dynamic_levels

BLOCK = 256


@dataclass(frozen=True, slots=True)
class Codebook:
    """`values[code]` in fp32; `codes[pattern + 32768]` is the code nearest to the bfloat16
    `pattern`.

    A lookup by bit pattern costs 1 ns per number on a CPU core, a search among 256 values 90 ns;
    bf16 rounds to 2⁻⁹, the finest codes are 0.014 apart.
    """

    values: Tensor
    codes: Tensor


@dataclass(frozen=True, slots=True)
class Blocks:
    """A matrix `[R, C]` as `codes` (uint8, `[R, C]`) and `scales` (fp32, `[R, blocks per row]`)."""

    codes: Tensor
    scales: Tensor


def blocks_per_row(columns: int) -> int:
    """Blocks do not cross rows: a matrix sharded by rows has the blocks of the full matrix."""
    return max(1, math.ceil(columns / BLOCK))


def quantize(values_RC: Tensor, into: Blocks, *, signed: bool) -> None:
    """Write `values_RC` (fp32) into the codes and scales of `into`."""
    rows, columns = values_RC.shape
    blocks = into.scales.shape[1]
    width = math.ceil(columns / blocks)
    padded = (
        functional.pad(values_RC, (0, blocks * width - columns))
        if blocks * width != columns
        else values_RC
    )
    in_blocks = padded.view(rows, blocks, width)
    torch.amax(in_blocks.abs(), dim=2, out=into.scales)
    safe = torch.where(into.scales == 0, 1.0, into.scales)
    patterns = (in_blocks / safe.unsqueeze(2)).to(torch.bfloat16).view(torch.int16).to(
        torch.int32
    ) + 32768
    codes = torch.index_select(codebook(signed, values_RC.device).codes, 0, patterns.view(-1))
    into.codes.copy_(codes.view(rows, blocks * width)[:, :columns])


def dequantize(blocks: Blocks, *, signed: bool) -> Tensor:
    """The values in fp32, `[R, C]`."""
    rows, columns = blocks.codes.shape
    count = blocks.scales.shape[1]
    width = math.ceil(columns / count)
    values = torch.index_select(
        codebook(signed, blocks.codes.device).values, 0, blocks.codes.reshape(-1).to(torch.int32)
    )
    scales = (
        blocks.scales if count == 1 else blocks.scales.repeat_interleave(width, dim=1)[:, :columns]
    )
    return values.view(rows, columns).mul_(scales)


@cache
def codebook(signed: bool, device: torch.device) -> Codebook:
    """The codes of `dynamic_levels`.

    Unsigned codes have no zero: a second moment rounded to zero makes Adam divide by zero (arXiv
    2309.01507, section 4.1). A block of zeros has the scale 0.
    """
    values = torch.tensor(dynamic_levels(signed=signed), dtype=torch.float64)
    patterns = (
        torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).double()
    )
    codes = torch.bucketize(patterns.nan_to_num(0.0), (values[1:] + values[:-1]) / 2)
    return Codebook(values.float().to(device), codes.to(torch.uint8).to(device))
