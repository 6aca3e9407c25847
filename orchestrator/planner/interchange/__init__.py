"""A plan as another engine's own configuration.

Does not depend on what a plan costs.
"""

from __future__ import annotations

from collections.abc import Callable

from orchestrator.planner.interchange import accelerate, deepspeed, megatron, torchtitan
from orchestrator.planner.interchange.export_job import Exported, Inexpressible, Job
from workers.contracts import ClusterSpec, ModelSpec, ParallelPlan

_WRITERS: dict[str, Callable[[Job], Exported]] = {
    "torchtitan": torchtitan.write,
    "megatron": megatron.write,
    "deepspeed": deepspeed.write,
    "accelerate": accelerate.write,
}

KINDS = tuple(_WRITERS)


def export(
    kind: str,
    *,
    model: ModelSpec,
    plan: ParallelPlan,
    cluster: ClusterSpec,
    seq_len: int,
    steps: int | None = None,
    lr: float | None = None,
) -> Exported:
    """The plan as configuration of `kind` (one of KINDS); `steps` and `lr` are the engine's default
    where None.

    What the engine says otherwise stands in `notes`. Raises Inexpressible, a ValueError, for an
    unknown kind, a plan
    that is not legal for model, cluster and sequence, and one that the engine cannot run, naming
    one that can.
    """
    if kind not in _WRITERS:
        raise Inexpressible(f"{kind!r} is not an engine to export to; one of {', '.join(KINDS)}")
    job = Job(model=model, plan=plan, cluster=cluster, seq_len=seq_len, steps=steps, lr=lr)
    return _WRITERS[kind](job)


__all__ = ["KINDS", "Exported", "Inexpressible", "export"]
