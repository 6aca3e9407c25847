"""Exports a plan as the configuration of another engine.

Does not depend on the cost model.
"""

from __future__ import annotations

from collections.abc import Callable

from orchestrator.planner.interchange import accelerate, deepspeed, megatron, torchtitan
from orchestrator.planner.interchange.export_job import Exported, ExportJob, Inexpressible
from workers.contracts import ClusterSpec, ModelSpec, ParallelPlan

_WRITERS: dict[str, Callable[[ExportJob], Exported]] = {
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
    """The plan as a configuration of `kind` (one of KINDS); None: the engine's default.

    `notes` lists deviations from the plan. Raises Inexpressible, a ValueError, for an unknown kind,
    for an illegal plan, and for a plan that the engine cannot run.
    """
    if kind not in _WRITERS:
        raise Inexpressible(
            f"{kind!r} is not an engine to export to", f"Use one of {', '.join(KINDS)}."
        )
    job = ExportJob(model=model, plan=plan, cluster=cluster, seq_len=seq_len, steps=steps, lr=lr)
    return _WRITERS[kind](job)


__all__ = ["KINDS", "Exported", "Inexpressible", "export"]
