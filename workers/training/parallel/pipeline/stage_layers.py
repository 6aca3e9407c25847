"""Which pipeline rank holds which stages, and which layers a stage has.

Does not depend on how micro-batches run through the stages.
"""

from __future__ import annotations

from workers.contracts.specs.model import ModelSpec
from workers.contracts.specs.plan import V_SHAPED, ParallelPlan
from workers.models.decoder import Decoder, ModelPart
from workers.training.parallel.mesh import Axis


def stages_on_rank(plan: ParallelPlan, rank: int) -> list[int]:
    """Stages of pipeline rank `rank` by depth; V-shaped schedules fold the pipeline."""
    if plan.schedule in V_SHAPED:
        return sorted((rank, 2 * plan.pp - 1 - rank))
    return list(range(rank, plan.stages, plan.pp))


def rank_of_stage(plan: ParallelPlan, stage: int) -> int:
    """The pipeline rank that holds a stage."""
    if plan.schedule in V_SHAPED:
        return min(stage, 2 * plan.pp - 1 - stage)
    return stage % plan.pp


def stage_part(model: ModelSpec, plan: ParallelPlan, stage: int) -> ModelPart:
    """The layers of a stage."""
    counts = plan.layers_of_stages(model.layers)
    first = sum(counts[:stage])
    return ModelPart(
        range(first, first + counts[stage]), first=stage == 0, last=stage == plan.stages - 1
    )


def build_parts(model: ModelSpec, plan: ParallelPlan, axis: Axis) -> list[Decoder]:
    """This rank's parts in order of depth; without a pipeline, the full model is the only part."""
    if plan.pp == 1:
        return [Decoder(model)]
    return [
        Decoder(model, stage_part(model, plan, stage)) for stage in stages_on_rank(plan, axis.rank)
    ]
