"""Peak of a step with frozen and adapted weights, by torch's MemTracker on fake tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from workers.contracts.specs.model import ModelSpec
from workers.contracts.specs.plan import ParallelPlan
from workers.contracts.specs.train import TrainBody
from workers.models.adapters import nf4
from workers.models.decoder import Decoder
from workers.training.objectives.token_losses import token_loss, token_losses_at
from workers.training.parallel.mesh import World
from workers.training.parallel.transforms import BuildContext, apply_transforms
from workers.training.trace.memory_tracker import MemoryTracker

BUILT = ("freeze", "quantize_frozen", "cast", "recompute")


def tracked_step(
    model: ModelSpec, plan: ParallelPlan, train: TrainBody, *, trained_share: float = 1.0
) -> dict[str, int]:
    """Bytes by category at the peak of the second step's passes of the engine's decoder on one
    device, with AdamW and gradients freed between steps.

    With a `trained_share` the head computes logits of this many positions only.
    """
    with FakeTensorMode(), _fresh_levels():
        context = BuildContext(
            model,
            plan,
            World(0, 1, torch.device("cpu")),
            adapter=train.adapter,
            frozen=tuple(train.freeze),
        )
        [decoder] = apply_transforms([Decoder(model)], context, names=BUILT)
        trained = [each for each in decoder.parameters() if each.requires_grad]
        optimizer = torch.optim.AdamW(trained, foreach=False)
        for parameter in trained:  # states are there from the second step on
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        tracker = MemoryTracker(by_module=False)
        tracker.track_external(decoder, optimizer)
        with tracker:
            for _ in range(plan.accumulation):
                tokens = torch.zeros(plan.micro_batch_size, train.seq_len, dtype=torch.long)
                if trained_share == 1.0:
                    token_loss(decoder(tokens), tokens).backward()
                    continue
                at = torch.arange(int(trained_share * tokens.numel()))
                logits = decoder(tokens, None, None, False, at)
                token_losses_at(logits, tokens, at).sum().backward()
    [snapshot] = tracker.get_tracker_snapshot("peak").values()
    return {_name(kind): int(value) for kind, value in snapshot.items()}


@contextmanager
def _fresh_levels() -> Iterator[None]:
    """No level tables of another mode in the caches, during and after."""
    caches = [each for each in vars(nf4).values() if hasattr(each, "cache_clear")]
    for each in caches:
        each.cache_clear()
    yield
    for each in caches:
        each.cache_clear()


def _name(kind: Any) -> str:
    return str(getattr(kind, "value", kind))
