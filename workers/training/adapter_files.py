"""PEFT's files of an adapter in training: tensors gathered from all ranks, written with a
checkpoint.

Does not depend on optimizer state or on how checkpoints are stored.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from workers.contracts.specs.finetuning.adapters import AdapterSpec
from workers.contracts.specs.model import ModelSpec
from workers.models.adapters.peft_files import fingerprint, write_adapter
from workers.models.weights.reader import Weights
from workers.training.parallel.parallelize import Parallel


@dataclass(frozen=True, slots=True)
class BaseWeights:
    """The weights that an adapter is trained over: where they are, and their digest."""

    path: str
    fingerprint: str


def base_of(weights: Weights) -> BaseWeights:
    """The base of an adapter's files and manifest."""
    return BaseWeights(weights.where, fingerprint(weights))


@torch.no_grad()
def adapter_writer(
    parallel: Parallel, adapter: AdapterSpec, model: ModelSpec, base: BaseWeights
) -> Callable[[Path], None]:
    """What writes the adapter's files as of now. Collective; only rank 0's writes something."""
    full = {name: _full(each) for name, each in parallel.parameters().items()}
    if parallel.plan.pp > 1:
        axis = parallel.world.axis("pp")
        stages: list[Any] = [None] * axis.size
        dist.all_gather_object(stages, full, group=axis.group)
        full = {name: each for stage in stages for name, each in stage.items()}

    def write(folder: Path) -> None:
        write_adapter(
            folder,
            full,
            adapter=adapter,
            model=model,
            base=base.path,
            fingerprint=base.fingerprint,
        )

    return write


def _full(parameter: Tensor) -> Tensor:
    """A copy of the full tensor on the CPU."""
    sharded: Any = parameter
    whole: Tensor = sharded.full_tensor() if hasattr(parameter, "to_local") else parameter
    return whole.detach().to("cpu", copy=True)
