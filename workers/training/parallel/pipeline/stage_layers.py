"""Which layers stand on which stage of a pipeline, and the parts of the model that this rank holds.

Knows where stages lie; does not know how micro-batches go through them.
"""

from __future__ import annotations

from workers.contracts.specs.model import ModelSpec
from workers.contracts.specs.plan import V_SHAPED, ParallelPlan
from workers.models.decoder import Decoder, Part
from workers.training.parallel.mesh import Axis


def stages_of(plan: ParallelPlan, rank: int) -> list[int]:
    """The stages of pipeline rank `rank`, in order of depth; V-shaped schedules fold the pipeline
    in two.
    """
    if plan.schedule in V_SHAPED:
        return sorted((rank, 2 * plan.pp - 1 - rank))
    return list(range(rank, plan.stages, plan.pp))


def rank_of_stage(plan: ParallelPlan, stage: int) -> int:
    """The pipeline rank that holds a stage."""
    if plan.schedule in V_SHAPED:
        return min(stage, 2 * plan.pp - 1 - stage)
    return stage % plan.pp


def part_of_stage(model: ModelSpec, plan: ParallelPlan, stage: int) -> Part:
    counts = plan.layers_of_stages(model.layers)
    first = sum(counts[:stage])
    return Part(
        range(first, first + counts[stage]), first=stage == 0, last=stage == plan.stages - 1
    )


def parts_of(model: ModelSpec, plan: ParallelPlan, axis: Axis) -> list[Decoder]:
    """This rank's parts, in order of depth; without a pipeline the whole model is one."""
    if plan.pp == 1:
        return [Decoder(model)]
    return [
        Decoder(model, part_of_stage(model, plan, stage)) for stage in stages_of(plan, axis.rank)
    ]
