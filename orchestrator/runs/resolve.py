"""Turns the plan that a spec asks for, or leaves open, into the plan that will run. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from workers.contracts import ModelSource, ParallelPlan, RunSpec


@dataclass(frozen=True)
class Resolved:
    """The plan, None for runs that have none; `how` says in a sentence where it is from."""

    plan: ParallelPlan | None
    devices: int
    automatic: bool
    how: str


def resolve_plan(spec: RunSpec) -> Resolved:
    """A given plan as it is; for "auto" or none: plain data parallel over the devices asked for, in fp32."""
    if spec.kind == "external":
        return Resolved(None, 0, False, "The program runs elsewhere; Orrery places nothing.")
    if spec.plan_given and isinstance(spec.plan, ParallelPlan):
        # a script's own program decides what its processes do, so only their number counts
        devices = spec.resources.devices if spec.kind == "script" and spec.resources.devices else spec.plan.world_size
        return Resolved(spec.plan, devices, False, "As given.")
    devices = spec.resources.devices or 1
    accumulate = spec.train.accumulate if spec.train and spec.train.accumulate else 1
    plan = ParallelPlan(dp=devices, micro_batch_size=1, global_batch_size=devices * accumulate)
    asked = 'The plan is "auto"' if spec.plan_given else "No plan was given"
    ranks = "one device" if devices == 1 else f"plain data parallel over {devices} devices"
    return Resolved(plan, devices, True, f"{asked}: {ranks}, ZeRO 0, fp32, micro-batch 1.")


def model_label(spec: RunSpec) -> str:
    """What lists call the model: the preset, the shape's own name, or the last part of where its weights lie."""
    if isinstance(spec.model, str):
        return spec.model
    if isinstance(spec.model, ModelSource):
        where = spec.model.path or spec.model.package or ""
        return where.rstrip("/").rsplit("/", 1)[-1][:120]
    return spec.model.name[:120]
