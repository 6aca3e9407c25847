"""Full copies of the trained weights in the compute dtype, one weight at a time.

Low-rank updates are merged into the weights that they adapt, and weights in 4 bits are
dequantized, as the trainer computes with them. Does not depend on who uses the copies.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from workers.models.adapters.linear import AdaptedLinear
from workers.models.decoder import Decoder
from workers.training.loop.step_context import StepContext
from workers.training.numerics.precision import DTYPES
from workers.training.parallel.mesh import Axis
from workers.training.parallel.pipeline.stage_transfer import global_rank
from workers.training.setup.spec_loading import TrainingRun


def empty_decoder(run: TrainingRun, device: torch.device) -> Decoder:
    """A decoder of the run's shape in its compute dtype, without values."""
    with torch.device("meta"):
        decoder = Decoder(run.model)
    for parameter in decoder.parameters():
        parameter.data = parameter.data.to(DTYPES[run.plan.precision])
    return decoder.to_empty(device=device).requires_grad_(False).eval()


@torch.no_grad()
def full_weights(
    context: StepContext, targets: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """The trained weights with the names of `targets`, in order of their names. Collective.

    Each is gathered from all ranks when it is requested: all of them would be a second model. In a
    pipeline, the ranks that hold a weight send it to the others, with the target's shape and dtype.
    """
    trained, layers = context.parallel.weights(), _adapted(context)
    stages = context.world.axis("pp")
    holders = _holders(stages, {*trained, *(f"{path}.weight" for path in layers)})
    dtype = DTYPES[context.run.plan.precision]
    for name in sorted(targets):
        if stages.size == 1:
            yield name, _full_weight(trained, layers, name, dtype)
            continue
        target = targets[name]
        if holders[name] == stages.rank:
            full = _full_weight(trained, layers, name, dtype).to(target.dtype).contiguous()
        else:
            full = torch.empty(target.shape, dtype=target.dtype, device=context.world.device)
        dist.broadcast(full, global_rank(stages, holders[name]), group=stages.group)
        yield name, full


def _holders(stages: Axis, held: Collection[str]) -> dict[str, int]:
    """The first pipeline rank that holds each weight; both ends hold a tied embedding."""
    if stages.size == 1:
        return {}
    names: list[Any] = [None] * stages.size
    dist.all_gather_object(names, list(held), group=stages.group)
    return {name: rank for rank in reversed(range(stages.size)) for name in names[rank]}


def _full_weight(
    trained: Mapping[str, Tensor],
    layers: Mapping[str, AdaptedLinear],
    name: str,
    dtype: torch.dtype,
) -> Tensor:
    """The full weight with its adapter, 4-bit ones in `dtype`. Collective over its holders."""
    path = name.removesuffix(".weight")
    layer = layers.get(path)
    if layer is None:
        return _full(trained[name])
    full = _full(trained[name]) if layer.nf4 is None else layer.dense_weight(dtype)
    return full if layer.lora_A is None else _merged(full, layer, trained, path)


def _merged(full: Tensor, layer: AdaptedLinear, trained: Mapping[str, Tensor], path: str) -> Tensor:
    """W + scale · B A, of DoRA with each output's norm replaced by its magnitude. Collective."""
    low, high = (_full(trained[f"{path}.{part}"]) for part in ("lora_A", "lora_B"))
    update = layer.scale * (high.float() @ low.float())
    if layer.lora_magnitude is None:
        return full + update.to(full.dtype)
    merged = full.float() + update
    norms = merged.norm(dim=1).clamp_min(torch.finfo(torch.float32).tiny)
    magnitude = _full(trained[f"{path}.lora_magnitude"]).float()
    scaled: Tensor = merged * (magnitude / norms).unsqueeze(1)
    return scaled.to(full.dtype)


def _adapted(context: StepContext) -> dict[str, AdaptedLinear]:
    """The adapted linear layers by path."""
    return {
        path: module
        for part in context.parallel.parts
        for path, module in part.named_modules()
        if isinstance(module, AdaptedLinear)
    }


def _full(trained: Tensor) -> Tensor:
    """The full tensor of a sharded one. Collective."""
    sharded: Any = trained
    gathered: Tensor = sharded.full_tensor() if hasattr(trained, "full_tensor") else trained
    return gathered
