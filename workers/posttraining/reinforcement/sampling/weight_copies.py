"""Full copies of the trained weights in the compute dtype, one weight at a time.

Low-rank updates are added to the weights that they adapt. Does not depend on who uses the copies.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor

from workers.models.adapters.linear import AdaptedLinear
from workers.models.decoder import Decoder
from workers.training.loop.step_context import StepContext
from workers.training.numerics.precision import DTYPES
from workers.training.setup.spec_loading import TrainingRun


def empty_decoder(run: TrainingRun, device: torch.device) -> Decoder:
    """A decoder of the run's shape in its compute dtype, without values."""
    with torch.device("meta"):
        decoder = Decoder(run.model)
    for parameter in decoder.parameters():
        parameter.data = parameter.data.to(DTYPES[run.plan.precision])
    return decoder.to_empty(device=device).requires_grad_(False).eval()


@torch.no_grad()
def full_weights(context: StepContext, names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
    """The trained weights called `names`, in order of their names. Collective.

    Each is gathered from all ranks when it is requested: all of them would be a second model.
    """
    trained = context.parallel.weights()
    scales = _low_rank(context)
    for name in sorted(names):
        full = _full(trained[name])
        module = name.removesuffix(".weight")
        if module in scales:
            low, high = (_full(trained[f"{module}.{part}"]) for part in ("lora_A", "lora_B"))
            update = scales[module] * (high.float() @ low.float())
            full = full + update.to(full.dtype)
        yield name, full


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
