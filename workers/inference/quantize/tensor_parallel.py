"""A rank's share of a weight in few bits: the same codes and scales as in the whole one, and no
rounding anew.

Knows layouts; knows no ranks. Shapes: N outputs, K inputs, G groups along K.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from kernels.fp8.reference import SIDE
from workers.contracts.specs.weight_rounding import GROUPS
from workers.models.errors import WeightsError
from workers.models.hf.packed import Packed


def check_shape(whole: Packed, name: str, wanted: Sequence[int], where: str) -> None:
    """Of a linear's weight, or of one among stacked ones. Raises WeightsError."""
    shape = whole.codes.T.shape if whole.kind == "int4" else whole.codes.shape
    found = [shape[0], whole.scales.shape[1] if whole.kind == "low-rank" else shape[1]]
    if found != list(wanted[-2:]):
        raise WeightsError(
            f"{where}: {name} has shape {found}, the configuration wants {list(wanted[-2:])}"
        )


def outputs(whole: Packed, start: int, stop: int) -> Packed:
    """Outputs `start` to `stop`. Raises ValueError where their scales are not apart."""
    codes, scales = whole.codes, whole.scales
    if whole.kind == "int4":
        assert whole.zeros is not None
        columns = (codes[:, start:stop], scales[:, start:stop], whole.zeros[:, start:stop])
        codes, scales, zeros = (each.contiguous() for each in columns)
        return replace(whole, codes=codes, scales=scales, zeros=zeros)
    if whole.kind == "fp8":
        return replace(
            whole, codes=codes[start:stop].contiguous(), scales=_tiles(scales, start, stop)
        )
    scales = scales if whole.kind == "low-rank" else scales[start:stop].contiguous()
    return replace(whole, codes=codes[start:stop].contiguous(), scales=scales)


def inputs(whole: Packed, start: int, stop: int) -> Packed:
    """Inputs `start` to `stop`: what such shares give adds up to what the whole weight does.

    Raises ValueError.
    """
    if whole.kind == "int4":
        return _groups(whole, start, stop)
    if whole.kind == "low-rank":
        return replace(whole, scales=whole.scales[:, start:stop].contiguous())
    if whole.kind == "w8a8":
        raise ValueError(
            "activations are rounded by the largest of all inputs, which no rank would have"
        )
    codes = whole.codes[:, start:stop].contiguous()
    if whole.kind == "int8":
        return replace(whole, codes=codes)
    if start % SIDE:  # a row's activations are rounded 128 at a time
        raise ValueError(f"a share would begin at input {start}, inside a tile of {SIDE}")
    return replace(whole, codes=codes, scales=_tiles(whole.scales.T, start, stop).T.contiguous())


def _tiles(scales: Tensor, start: int, stop: int) -> Tensor:
    """Of tiles along the first dim those that a share from `start` to `stop` would have of its own."""
    firsts = range(start, stop, SIDE)
    if any(first // SIDE != (min(first + SIDE, stop) - 1) // SIDE for first in firsts):
        raise ValueError(f"a share from {start} to {stop} would divide tiles of {SIDE}")
    return scales[[first // SIDE for first in firsts]].contiguous()


def _groups(whole: Packed, start: int, stop: int) -> Packed:
    """Groups that a share would divide become smaller ones of the same scale."""
    assert whole.zeros is not None
    if whole.order is not None:
        raise ValueError("its inputs are grouped by importance (act-order), not as they stand")
    size, group = len(whole.codes), whole.group
    edge = stop if stop < size else 0
    if (finer := math.gcd(group, start, edge)) != group:
        finer = next((each for each in GROUPS[1:] if finer % each == 0), 0)
    if not finer:
        raise ValueError(f"a share of inputs {start} to {stop} would divide groups of {group}")
    first, last = start // finer, -(-stop // finer)
    scales, zeros = (
        x.repeat_interleave(group // finer, 0)[first:last] for x in (whole.scales, whole.zeros)
    )
    codes = whole.codes[start:stop].contiguous()
    return replace(
        whole, codes=codes, scales=scales.contiguous(), zeros=zeros.contiguous(), group=finer
    )
