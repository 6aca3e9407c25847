"""Elastic training: the sizes (numbers of devices) at which a plan keeps its global batch.

Only dp changes, and with it the accumulation of gradients; tp, pp, cp, ep and the micro-batch stay.
So every size trains on the same samples in the same steps. Does not depend on memory or speed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workers.contracts.base import Problem, problem
from workers.contracts.specs.legality import plan_problems
from workers.contracts.specs.plan import ParallelPlan
from workers.contracts.specs.run import RunSpec
from workers.contracts.specs.training_support import combination_problems, plan_engine_problems

MOST_SIZES = 32  # of one run, the largest ones
_MIN = "min_devices"
_FIELD = f"resources.{_MIN}"


def plan_at(plan: Mapping[str, Any], devices: int) -> dict[str, Any]:
    """The resolved plan on another number of devices: the same with another dp.

    Raises ValueError if the other degrees do not divide the number.
    """
    others = 1
    for name in ("tp", "pp", "cp"):
        others *= int(plan.get(name) or 1)
    if devices < 1 or devices % others:
        raise ValueError(f"tp x pp x cp = {others} does not divide {devices} devices")
    return {**plan, "dp": devices // others}


def spec_at(spec: Mapping[str, Any], plan: Mapping[str, Any], devices: int) -> dict[str, Any]:
    """The spec of one attempt: this plan and size, without what a fixed size implies or allows."""
    resources = {
        name: value for name, value in (spec.get("resources") or {}).items() if name != _MIN
    }
    train = {name: value for name, value in spec["train"].items() if name != "accumulate"}
    return {
        **spec,
        "train": train,
        "plan": dict(plan),
        "resources": {**resources, "devices": devices},
    }


def elastic_plans(spec: RunSpec) -> dict[int, ParallelPlan]:
    """`{devices: plan}` of the sizes from `min_devices` to the plan's, largest first.

    Each is legal, supported by the engine, and keeps global batch and micro-batch. Only the plan's
    own size for a run without `min_devices`. The spec's plan is resolved.
    """
    plan, least = spec.plan, spec.resources.min_devices
    assert isinstance(plan, ParallelPlan), "the plan is not resolved"
    if least is None:
        return {plan.world_size: plan}
    return {
        size: smaller
        for size, smaller in _legal_sizes(spec, plan).items()
        if size >= least or size == plan.world_size
    }


def possible_sizes(spec: RunSpec) -> list[int]:
    """The numbers of devices that `min_devices` could allow, smallest first; one if it is fixed.

    Empty for runs that are not training runs, or whose plan is not resolved.
    """
    if spec.train is None or spec.rollout_devices or not isinstance(spec.plan, ParallelPlan):
        return []
    return sorted(_legal_sizes(spec, spec.plan))


def elastic_problems(spec: RunSpec) -> list[Problem]:
    """Why the run cannot change its number of devices as requested; empty without `min_devices`."""
    least, plan = spec.resources.min_devices, spec.plan
    if least is None:
        return []
    if spec.train is None:
        message = f"only training runs can change their number of devices, kind is {spec.kind}"
        return [problem(_FIELD, message, "Leave the field out.")]
    if spec.rollout_devices:
        message = "rollouts on devices of their own need a fixed number of devices"
        return [problem(_FIELD, message, "Leave the field out, or leave rollout.devices out.")]
    if spec.train.checkpoint is None:
        message = "a run continues on fewer devices from its last checkpoint, and it saves none"
        return [problem(_FIELD, message, 'Use train.checkpoint {"every_steps": 100}.')]
    if not isinstance(plan, ParallelPlan):
        return []
    if least > plan.world_size:
        message = f"{least} is more than the {plan.world_size} devices of the plan"
        return [problem(_FIELD, message, f"Use at most {plan.world_size}.")]
    if least == plan.world_size:
        return []
    smaller = [size for size in _legal_sizes(spec, plan) if size < plan.world_size]
    if any(size >= least for size in smaller):
        return []
    fixed = ", ".join(
        f"{name} {getattr(plan, name)}" for name in ("tp", "pp", "cp", "ep") if _degree(plan, name)
    )
    message = (
        f"no size from {least} to {plan.world_size - 1} devices keeps global batch "
        f"{plan.global_batch_size} and micro-batch {plan.micro_batch_size}"
        f"{f' with {fixed}' if fixed else ''}"
    )
    sizes = ", ".join(map(str, [*reversed(smaller), plan.world_size]))
    hint = (
        f"Use at most {smaller[0]}; possible sizes are {sizes}."
        if smaller
        else "Use a plan with dp above 1 whose number of micro-batches smaller dp divide."
    )
    return [problem(_FIELD, message, hint)]


def _degree(plan: ParallelPlan, name: str) -> bool:
    return int(getattr(plan, name)) > 1


def _legal_sizes(spec: RunSpec, plan: ParallelPlan) -> dict[int, ParallelPlan]:
    """All legal sizes up to the plan's, largest first."""
    assert spec.train is not None
    others, sizes = plan.world_size // plan.dp, dict[int, ParallelPlan]()
    micro_batches = plan.global_batch_size // plan.micro_batch_size
    for dp in range(plan.dp, 0, -1):
        if micro_batches % dp:
            continue
        smaller = plan.model_copy(update={"dp": dp})
        if dp < plan.dp and (
            plan_problems(smaller, model=spec.trained_shape, seq_len=spec.train.seq_len)
            or plan_engine_problems(smaller)
            or combination_problems(spec.model_copy(update={"plan": smaller}))
        ):
            continue
        sizes[others * dp] = smaller
        if len(sizes) == MOST_SIZES:
            break
    return sizes
