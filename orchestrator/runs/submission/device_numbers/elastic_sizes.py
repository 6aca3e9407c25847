"""The sizes of an elastic run with their predicted step times, and which of them fit in memory.

Reads the pool's engine. Writes nothing.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

from orchestrator.fleet import selectors as fleet
from orchestrator.runs.submission.prediction.training import predict_training
from orchestrator.runs.submission.target_hardware import TargetHardware
from workers.contracts import ModelSpec, ParallelPlan, Problem, RunSpec
from workers.contracts.base import problem
from workers.contracts.catalog.units import GIB
from workers.contracts.specs.training_rules.elastic import (
    elastic_plans,
    elastic_problems,
    possible_sizes,
)

log = logging.getLogger(__name__)

_FIELD = "resources.min_devices"


@dataclass(frozen=True)
class ElasticSizes:
    """`sizes` as stored with the run, largest first; empty if its size is fixed.

    `misfits`: smaller sizes of the requested range are predicted not to fit in memory.
    """

    sizes: list[dict[str, Any]] = field(default_factory=list)
    misfits: list[Problem] = field(default_factory=list)


def range_problems(spec: RunSpec) -> list[Problem]:
    """Why the requested range of devices is impossible; `spec` has the resolved plan."""
    if spec.resources.min_devices is None:
        return []
    pool = spec.resources.pool or "default"
    if (engine := fleet.engine_of_pool(pool)) is not None:
        message = (
            f"pool {pool} belongs to the engine {engine}, whose jobs have a fixed number of devices"
        )
        return [
            problem(_FIELD, message, "Leave the field out, or choose a pool of Orrery's own nodes.")
        ]
    return elastic_problems(spec)


def allowed_sizes(spec: RunSpec) -> list[int]:
    """The numbers of devices that `min_devices` could allow, smallest first.

    `spec` has the resolved plan. Empty if the run cannot be elastic or has one size only.
    """
    if spec.autotune is not None or fleet.engine_of_pool(spec.resources.pool or "default"):
        return []
    sizes = possible_sizes(spec)
    return sizes if len(sizes) > 1 else []


def elastic_sizes(
    spec: RunSpec, hardware: TargetHardware, teacher: ModelSpec | None = None
) -> ElasticSizes:
    """Predict each size of the range; `spec` has the resolved plan and no problems."""
    if spec.resources.min_devices is None or spec.train is None:
        return ElasticSizes()
    plans = elastic_plans(spec)
    if len(plans) < 2:
        return ElasticSizes()
    sizes = [_size(spec, plan, hardware, teacher) for plan in plans.values()]
    return ElasticSizes(sizes, _misfits(sizes, hardware) if hardware.known else [])


def _size(
    spec: RunSpec, plan: ParallelPlan, hardware: TargetHardware, teacher: ModelSpec | None
) -> dict[str, Any]:
    """One size; without numbers if the planner fails: a submission does not depend on it."""
    size: dict[str, Any] = {
        "devices": plan.world_size,
        "dp": plan.dp,
        "accumulation": plan.accumulation,
        "step_time_s": None,
        "total_bytes": None,
        "fits": None,
    }
    try:
        predicted = predict_training(spec, plan, hardware, teacher)
    except Exception:
        log.exception("The planner failed on a size of an elastic run")
        return size
    if predicted is None:
        return size
    return {
        **size,
        "step_time_s": predicted.document["step_time_s"],
        "total_bytes": predicted.document["memory"]["total_bytes"],
        "fits": predicted.fits,
    }


def _misfits(sizes: list[dict[str, Any]], hardware: TargetHardware) -> list[Problem]:
    """One problem if a size below the largest does not fit; the largest is the plan itself."""
    large = [size for size in sizes[1:] if size["fits"] is False]
    if not large or sizes[0]["fits"] is False:
        return []
    smallest = sizes[-1]
    worst = large[-1]
    has = hardware.entry.memory_bytes / GIB
    message = (
        f"on {worst['devices']} devices the run needs {worst['total_bytes'] / GIB:.1f} GiB per "
        f"device, {hardware.entry.name} has {has:.1f} GiB"
    )
    fitting = [size["devices"] for size in sizes if size["fits"] is not False]
    hint = (
        f"Use min_devices {fitting[-1]}."
        if fitting[-1] != smallest["devices"]
        else "Use a smaller model."
    )
    return [problem(_FIELD, message, hint)]
