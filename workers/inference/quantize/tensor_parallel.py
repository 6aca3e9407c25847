"""A rank's shard of a quantized weight: the same codes and scales as in the full weight.

Nothing is rounded again. Does not depend on ranks.
Shapes: N outputs, K inputs, G groups along K.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from kernels.fp8.reference import SIDE
from workers.contracts.specs.weight_rounding import GROUPS
from workers.models.errors import WeightsError
from workers.models.hf.quantized_formats import Packed


def check_shape(packed: Packed, name: str, expected: Sequence[int], where: str) -> None:
    """Check a linear's weight, or one of stacked ones. Raises WeightsError."""
    shape = packed.codes.T.shape if packed.kind == "int4" else packed.codes.shape
    actual = [shape[0], packed.scales.shape[1] if packed.kind == "low-rank" else shape[1]]
    if actual != list(expected[-2:]):
        raise WeightsError(
            f"{where}: {name} has shape {actual}, the configuration wants {list(expected[-2:])}"
        )


def outputs(packed: Packed, start: int, stop: int) -> Packed:
    """Outputs `start` to `stop`. Raises ValueError if their scales cannot be separated."""
    codes, scales = packed.codes, packed.scales
    if packed.kind == "int4":
        assert packed.zeros is not None
        columns = (codes[:, start:stop], scales[:, start:stop], packed.zeros[:, start:stop])
        codes, scales, zeros = (column.contiguous() for column in columns)
        return replace(packed, codes=codes, scales=scales, zeros=zeros)
    if packed.kind == "fp8":
        return replace(
            packed, codes=codes[start:stop].contiguous(), scales=_tiles(scales, start, stop)
        )
    scales = scales if packed.kind == "low-rank" else scales[start:stop].contiguous()
    return replace(packed, codes=codes[start:stop].contiguous(), scales=scales)


def inputs(packed: Packed, start: int, stop: int) -> Packed:
    """Inputs `start` to `stop`: the shards' outputs add up to the full weight's.

    Raises ValueError if the layout does not allow it.
    """
    if packed.kind == "int4":
        return _groups(packed, start, stop)
    if packed.kind == "low-rank":
        return replace(packed, scales=packed.scales[:, start:stop].contiguous())
    if packed.kind == "w8a8":
        raise ValueError(
            "activations are rounded by the maximum of all inputs, which no rank would have"
        )
    codes = packed.codes[:, start:stop].contiguous()
    if packed.kind == "int8":
        return replace(packed, codes=codes)
    if start % SIDE:  # a row's activations are rounded 128 at a time
        raise ValueError(f"a shard would begin at input {start}, inside a tile of {SIDE}")
    return replace(packed, codes=codes, scales=_tiles(packed.scales.T, start, stop).T.contiguous())


def _tiles(scales: Tensor, start: int, stop: int) -> Tensor:
    """Scales of the tiles along the first dim that lie in a shard from `start` to `stop`."""
    firsts = range(start, stop, SIDE)
    if any(first // SIDE != (min(first + SIDE, stop) - 1) // SIDE for first in firsts):
        raise ValueError(f"a shard from {start} to {stop} would divide tiles of {SIDE}")
    return scales[[first // SIDE for first in firsts]].contiguous()


def _groups(packed: Packed, start: int, stop: int) -> Packed:
    """Groups that a shard would divide become smaller ones of the same scale."""
    assert packed.zeros is not None
    if packed.order is not None:
        raise ValueError("its inputs are grouped by importance (act-order), not by position")
    size, group = len(packed.codes), packed.group
    edge = stop if stop < size else 0
    if (finer := math.gcd(group, start, edge)) != group:
        finer = next((divisor for divisor in GROUPS[1:] if finer % divisor == 0), 0)
    if not finer:
        raise ValueError(f"a shard of inputs {start} to {stop} would divide groups of {group}")
    first, last = start // finer, -(-stop // finer)
    scales, zeros = (
        x.repeat_interleave(group // finer, 0)[first:last] for x in (packed.scales, packed.zeros)
    )
    codes = packed.codes[start:stop].contiguous()
    return replace(
        packed, codes=codes, scales=scales.contiguous(), zeros=zeros.contiguous(), group=finer
    )
