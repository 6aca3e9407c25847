"""Full copies of the trained weights in the compute dtype, one weight at a time.

Low-rank updates are added to the weights that they adapt. Does not depend on who uses the copies.
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
    trained, scales = context.parallel.weights(), _low_rank(context)
    stages = context.world.axis("pp")
    holders = _holders(stages, trained)
    for name in sorted(targets):
        if stages.size == 1:
            yield name, _full_weight(trained, scales, name)
            continue
        target = targets[name]
        if holders[name] == stages.rank:
            full = _full_weight(trained, scales, name).to(target.dtype).contiguous()
        else:
            full = torch.empty(target.shape, dtype=target.dtype, device=context.world.device)
        dist.broadcast(full, global_rank(stages, holders[name]), group=stages.group)
        yield name, full


def _holders(stages: Axis, trained: Collection[str]) -> dict[str, int]:
    """The first pipeline rank that holds each weight; both ends hold a tied embedding."""
    if stages.size == 1:
        return {}
    names: list[Any] = [None] * stages.size
    dist.all_gather_object(names, list(trained), group=stages.group)
    return {name: rank for rank in reversed(range(stages.size)) for name in names[rank]}


def _full_weight(trained: Mapping[str, Tensor], scales: Mapping[str, float], name: str) -> Tensor:
    """The full weight with its low-rank update. Collective over the ranks that hold it."""
    full = _full(trained[name])
    module = name.removesuffix(".weight")
    if module not in scales:
        return full
    low, high = (_full(trained[f"{module}.{part}"]) for part in ("lora_A", "lora_B"))
    update = scales[module] * (high.float() @ low.float())
    return full + update.to(full.dtype)


def _low_rank(context: StepContext) -> dict[str, float]:
    """The adapted linear layers with the factor of their updates."""
    return {
        path: module.scale
        for part in context.parallel.parts
        for path, module in part.named_modules()
        if isinstance(module, AdaptedLinear) and module.lora_A is not None
    }


def _full(trained: Tensor) -> Tensor:
    """The full tensor of a sharded one. Collective."""
    sharded: Any = trained
    gathered: Tensor = sharded.full_tensor() if hasattr(trained, "full_tensor") else trained
    return gathered
