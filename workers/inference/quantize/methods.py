"""Each way of making a model smaller, block by block: scales, rounding by what inputs are like, and
what it cost.

Puts walk, scales and rounding together; knows neither files nor perplexity.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from workers.contracts.specs.model import ModelSpec
from workers.inference.quantize.calibrate import Inputs, Walk
from workers.inference.quantize.factors import low_rank, rank_for
from workers.inference.quantize.gptq import gptq
from workers.inference.quantize.linears import packed_as, round_groups
from workers.inference.quantize.prune import prune_block
from workers.inference.quantize.replace_linears import put_packed
from workers.inference.quantize.scales import awq_scales, fold, folds_of, smooth_scales
from workers.models.decoder import Block, Decoder
from workers.models.hf.packed import Packed
from workers.models.moe.experts import StackedLinear

BITS = {"awq": 4.0, "gptq": 4.0, "int4": 4.0, "int8": 8.0, "smoothquant": 8.0, "fp8": 8.0}
METHODS = (*BITS, "prune", "lowrank")
CURVE = 64  # points of a saliency curve


@dataclass(slots=True)
class Made:
    """`packed` has each linear in few bits by the name of its weight, of experts one each; the
    decoder computes so
    already. `layers` is the report: what each linear lost, and which inputs matter."""

    packed: dict[str, list[Packed]] = field(default_factory=dict)
    layers: list[dict[str, Any]] = field(default_factory=list)


@torch.no_grad()
def smaller(
    decoder: Decoder,
    method: str,
    ids: list[Tensor],
    *,
    group: int,
    keep: float = 0.7,
    to: ModelSpec | None = None,
) -> Made:
    """In place, on calibration windows `ids`, each `[1, S]`. `keep` is the share of numbers of a
    factored linear, `to`
    the shape that is pruned to. Raises ValueError."""
    made = Made()
    for number, block, inputs in Walk(decoder, ids).blocks():
        before = f"blocks.{number}."
        if method == "prune":
            assert to is not None
            made.layers += [
                {"name": before + name, **told}
                for name, told in prune_block(block, inputs, to).items()
            ]
            continue
        scaled = scale_block(block, method, inputs, group)
        for name, module in [*block.named_modules()]:
            if isinstance(module, nn.Linear):
                seen = inputs[name]
                packed = _packed(module.weight, method, seen, group, keep)
                made.packed[f"{before}{name}.weight"] = [packed]
                told = scaled.get(name, {})
                made.layers.append(_told(before + name, module.weight, packed, seen, told))
                put_packed(
                    decoder,
                    before + name,
                    module,
                    [packed],
                    module.bias,
                    module.weight.dtype,
                    module.weight.device,
                )
            elif isinstance(module, StackedLinear):
                if method == "lowrank":
                    continue  # no inputs of single experts are known
                experts = [
                    _packed(
                        each, "int4" if method in ("awq", "gptq") else method, None, group, keep
                    )
                    for each in module.weight.unbind()
                ]
                made.packed[f"{before}{name}.weight"] = experts
                put_packed(
                    decoder,
                    before + name,
                    module,
                    experts,
                    module.bias,
                    module.weight.dtype,
                    module.weight.device,
                )
    if method == "prune" and to is not None:
        decoder.spec = to
    return made


@torch.no_grad()
def scale_block(
    block: Block, method: str, inputs: dict[str, Inputs], group: int
) -> dict[str, dict[str, Any]]:
    """Scales folded in; of each linear that has some, `{power, scaled_error, plain_error}` and its
    saliency.
    """
    told: dict[str, dict[str, Any]] = {}
    if method not in ("awq", "smoothquant"):
        return told
    for where in folds_of(block):
        layers = [block.get_submodule(name) for name in where.onto]
        weights = [layer.weight for layer in layers if isinstance(layer, nn.Linear)]
        seen = inputs[where.onto[0]]
        energy = sum(seen.error(each) for each in weights) or 1.0
        mean, about = seen.mean, dict[str, Any]()
        if method == "awq":
            scales, power, error, plain = awq_scales(weights, seen, partial(_nearest, group=group))
            about = {
                "power": power,
                "error_with_scales": error / energy,
                "error_without": plain / energy,
            }
        else:
            scales, about = smooth_scales(weights, seen), {"power": 0.5}
        about |= {"saliency": saliency(mean), "scales": saliency(scales)}
        fold(block, where, scales, inputs)
        told |= dict.fromkeys(where.onto, about)
    return told


def saliency(values: Tensor) -> dict[str, Any]:
    """A curve of channels from the largest on, in at most CURVE points, and the share that the
    first hundredth has.
    """
    ordered = values.float().sort(descending=True)
    places = torch.linspace(0, len(values) - 1, min(CURVE, len(values))).round().long()
    top = max(1, len(values) // 100)
    share = float(ordered.values[:top].sum() / ordered.values.sum().clamp_min(1e-12))
    return {
        "curve": [round(float(each), 6) for each in ordered.values[places.to(values.device)]],
        "channels": len(values),
        "top": [int(each) for each in ordered.indices[:8]],
        "share_of_top": share,
    }


def _packed(weight: Tensor, method: str, seen: Inputs | None, group: int, keep: float) -> Packed:
    if method == "gptq":
        assert seen is not None
        return gptq(weight, seen.gram, group=group)
    if method in ("awq", "int4"):
        return Packed("int4", *round_groups(weight.float(), group, dtype=torch.float16), group)
    if method == "lowrank":
        assert seen is not None
        return low_rank(weight, seen.gram, rank=rank_for(weight, keep))
    return packed_as(method if method in ("int8", "fp8") else "w8a8", weight.contiguous())


def _nearest(weight: Tensor, *, group: int) -> Tensor:
    codes, scales, zeros = round_groups(weight.float(), group, dtype=torch.float16)
    return Packed("int4", codes, scales, zeros, group).weight().float()


def _told(
    name: str, weight: Tensor, packed: Packed, seen: Inputs, more: dict[str, Any]
) -> dict[str, Any]:
    """The error of outputs over their energy, on the inputs that occurred."""
    error = seen.error(packed.weight().float() - weight.float()) / (seen.error(weight) or 1.0)
    return {"name": name, "error": error, **(more or {"saliency": saliency(seen.mean)})}
