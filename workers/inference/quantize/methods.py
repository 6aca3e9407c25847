"""The compression methods, block by block: scaling, rounding by input statistics, and the error.

Does not depend on files or perplexity.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from workers.contracts.specs.model import ModelSpec
from workers.inference.quantize.calibrate import BlockWalk, InputStats
from workers.inference.quantize.gptq import gptq
from workers.inference.quantize.linears import pack_weight, round_groups
from workers.inference.quantize.low_rank import low_rank, rank_for
from workers.inference.quantize.prune import prune_block
from workers.inference.quantize.replace_linears import replace_with_packed
from workers.inference.quantize.scales import awq_scales, find_folds, fold, smooth_scales
from workers.models.decoder import Block, Decoder
from workers.models.hf.quantized_formats import Packed
from workers.models.moe.experts import StackedLinear

BITS = {"awq": 4.0, "gptq": 4.0, "int4": 4.0, "int8": 8.0, "smoothquant": 8.0, "fp8": 8.0}
METHODS = (*BITS, "prune", "lowrank")
CURVE = 64  # points of a saliency curve


@dataclass(slots=True)
class CompressedModel:
    """`packed`: quantized linears by the name of their weight, one per expert; the decoder already
    uses them. `layers` is the report: the error of each linear and its most important inputs.
    """

    packed: dict[str, list[Packed]] = field(default_factory=dict)
    layers: list[dict[str, Any]] = field(default_factory=list)


@torch.no_grad()
def compress(
    decoder: Decoder,
    method: str,
    ids: list[Tensor],
    *,
    group: int,
    keep: float = 0.7,
    to: ModelSpec | None = None,
) -> CompressedModel:
    """Compress in place, on calibration windows `ids`, each `[1, S]`.

    `keep` is the share of numbers that low-rank factors keep, `to` the shape after pruning. Raises
    ValueError.
    """
    compressed = CompressedModel()
    for number, block, inputs in BlockWalk(decoder, ids).blocks():
        prefix = f"blocks.{number}."
        if method == "prune":
            assert to is not None
            compressed.layers += [
                {"name": prefix + name, **report}
                for name, report in prune_block(block, inputs, to).items()
            ]
            continue
        scaled = scale_block(block, method, inputs, group)
        for name, module in [*block.named_modules()]:
            if isinstance(module, nn.Linear):
                stats = inputs[name]
                packed = _pack(module.weight, method, stats, group, keep)
                compressed.packed[f"{prefix}{name}.weight"] = [packed]
                scaling = scaled.get(name, {})
                compressed.layers.append(
                    _describe_layer(prefix + name, module.weight, packed, stats, scaling)
                )
                replace_with_packed(
                    decoder,
                    prefix + name,
                    module,
                    [packed],
                    module.bias,
                    module.weight.dtype,
                    module.weight.device,
                )
            elif isinstance(module, StackedLinear):
                if method == "lowrank":
                    continue  # statistics of single experts are not collected
                nearest = "int4" if method in ("awq", "gptq") else method
                experts = [
                    _pack(weight, nearest, None, group, keep) for weight in module.weight.unbind()
                ]
                compressed.packed[f"{prefix}{name}.weight"] = experts
                replace_with_packed(
                    decoder,
                    prefix + name,
                    module,
                    experts,
                    module.bias,
                    module.weight.dtype,
                    module.weight.device,
                )
    if method == "prune" and to is not None:
        decoder.spec = to
    return compressed


@torch.no_grad()
def scale_block(
    block: Block, method: str, inputs: dict[str, InputStats], group: int
) -> dict[str, dict[str, Any]]:
    """Fold scales into the block; per scaled linear its power, errors and saliency."""
    reports: dict[str, dict[str, Any]] = {}
    if method not in ("awq", "smoothquant"):
        return reports
    for target in find_folds(block):
        layers = [block.get_submodule(name) for name in target.onto]
        weights = [layer.weight for layer in layers if isinstance(layer, nn.Linear)]
        stats = inputs[target.onto[0]]
        energy = sum(stats.error(weight) for weight in weights) or 1.0
        mean, report = stats.mean, dict[str, Any]()
        if method == "awq":
            rounding = partial(_round_to_nearest, group=group)
            scales, power, error, plain = awq_scales(weights, stats, rounding)
            report = {
                "power": power,
                "error_with_scales": error / energy,
                "error_without": plain / energy,
            }
        else:
            scales, report = smooth_scales(weights, stats), {"power": 0.5}
        report |= {"saliency": saliency(mean), "scales": saliency(scales)}
        fold(block, target, scales, inputs)
        reports |= dict.fromkeys(target.onto, report)
    return reports


def saliency(values: Tensor) -> dict[str, Any]:
    """The sorted channels in at most CURVE points, and the share of the top 1%."""
    ordered = values.float().sort(descending=True)
    places = torch.linspace(0, len(values) - 1, min(CURVE, len(values))).round().long()
    top = max(1, len(values) // 100)
    share = float(ordered.values[:top].sum() / ordered.values.sum().clamp_min(1e-12))
    return {
        "curve": [round(float(value), 6) for value in ordered.values[places.to(values.device)]],
        "channels": len(values),
        "top": [int(channel) for channel in ordered.indices[:8]],
        "share_of_top": share,
    }


def _pack(weight: Tensor, method: str, stats: InputStats | None, group: int, keep: float) -> Packed:
    if method == "gptq":
        assert stats is not None
        return gptq(weight, stats.gram, group=group)
    if method in ("awq", "int4"):
        return Packed("int4", *round_groups(weight.float(), group, dtype=torch.float16), group)
    if method == "lowrank":
        assert stats is not None
        return low_rank(weight, stats.gram, rank=rank_for(weight, keep))
    return pack_weight(method if method in ("int8", "fp8") else "w8a8", weight.contiguous())


def _round_to_nearest(weight: Tensor, *, group: int) -> Tensor:
    codes, scales, zeros = round_groups(weight.float(), group, dtype=torch.float16)
    return Packed("int4", codes, scales, zeros, group).weight().float()


def _describe_layer(
    name: str, weight: Tensor, packed: Packed, stats: InputStats, scaling: dict[str, Any]
) -> dict[str, Any]:
    """The relative output error on the calibration inputs."""
    error = stats.error(packed.weight().float() - weight.float()) / (stats.error(weight) or 1.0)
    return {"name": name, "error": error, **(scaling or {"saliency": saliency(stats.mean)})}
