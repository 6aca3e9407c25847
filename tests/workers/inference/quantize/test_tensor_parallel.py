"""Shards of quantized weights: together they equal the full weight, code by code."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from workers.inference.quantize.linears import QuantizedLinear, build_layer, pack_weight
from workers.inference.quantize.tensor_parallel import inputs, outputs
from workers.models.hf.quantized_formats import Packed

CPU = torch.device("cpu")


def whole(kind: str, out: int, into: int, group: int = 32) -> Packed:
    weight = torch.randn(out, into, generator=torch.Generator().manual_seed(out + into))
    if kind == "low-rank":
        return Packed(kind, weight[:, :7].contiguous(), torch.randn(7, into))
    return pack_weight(kind, weight, group)


def layer(packed: Packed) -> QuantizedLinear:
    return build_layer(packed, None, torch.float32, CPU)


@pytest.mark.parametrize(
    ("kind", "out", "into", "group", "ends"),
    [
        ("int8", 30, 50, 32, (0, 17, 50)),
        ("int4", 30, 128, 64, (0, 64, 128)),
        ("int4", 32, 144, 64, (0, 48, 144)),
        ("int4", 8, 50, 16, (0, 32, 50)),
        ("int4", 16, 96, 96, (0, 48, 96)),
        ("fp8", 256, 300, 32, (0, 256, 300)),
        ("low-rank", 20, 33, 32, (0, 9, 33)),
    ],
)
def test_shares_of_inputs_add_up_and_shares_of_outputs_stand_side_by_side(
    kind, out, into, group, ends
):
    packed = whole(kind, out, into, group)
    expected, x = layer(packed), torch.randn(3, into)
    spans = list(pairwise(ends))
    parts = [layer(inputs(packed, *span)) for span in spans]
    torch.testing.assert_close(
        torch.cat([each.weight for each in parts], 1), expected.weight, atol=1e-6, rtol=1e-6
    )
    summed = sum(part(x[:, start:stop]) for part, (start, stop) in zip(parts, spans, strict=True))
    # the others round what a CPU multiplies to bf16, each share for itself
    exact = kind in ("fp8", "low-rank")
    torch.testing.assert_close(
        summed, expected(x), atol=1e-4 if exact else 0.2, rtol=1e-4 if exact else 2e-2
    )
    edge = 128 if kind == "fp8" else out // 3
    halves = [layer(outputs(packed, *span)) for span in ((0, edge), (edge, out))]
    torch.testing.assert_close(
        torch.cat([each.weight for each in halves]), expected.weight, atol=1e-6, rtol=1e-6
    )
    torch.testing.assert_close(
        torch.cat([each(x) for each in halves], 1), expected(x), atol=1e-4, rtol=8e-3
    )


def test_one_tile_may_be_shared_by_outputs():
    packed = whole("fp8", 96, 40)
    halves = [layer(outputs(packed, *span)) for span in ((0, 32), (32, 96))]
    assert torch.equal(torch.cat([each.weight for each in halves]), layer(packed).weight)


@pytest.mark.parametrize(
    ("packed", "take", "span", "message"),
    [
        (whole("int4", 8, 64), inputs, (0, 24), "inputs 0 to 24 would divide groups of 32"),
        (whole("w8a8", 8, 64), inputs, (0, 32), "rounded by the maximum of all inputs"),
        (whole("fp8", 8, 300), inputs, (150, 300), "begin at input 150, inside a tile of 128"),
        (whole("fp8", 300, 8), outputs, (100, 200), "from 100 to 200 would divide tiles"),
    ],
)
def test_layouts_that_cannot_be_sharded_are_reported(
    packed: Packed, take: Any, span: Any, message: str
):
    with pytest.raises(ValueError, match=message):
        take(packed, *span)


def test_inputs_by_importance_do_not_come_apart_but_outputs_do():
    codes, scales, zeros = (
        torch.ones(64, 8, dtype=torch.uint8),
        torch.rand(2, 8),
        torch.ones(2, 8, dtype=torch.uint8),
    )
    packed = Packed("int4", codes, scales, zeros, 32, torch.randperm(64))
    with pytest.raises(ValueError, match="grouped by importance"):
        inputs(packed, 0, 32)
    assert torch.equal(layer(outputs(packed, 4, 8)).weight, layer(packed).weight[4:])
