"""Turns the plan that a spec asks for, or leaves open, into the plan that will run. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from orchestrator.planner.search.auto_plan import Choice
from workers.contracts import ModelSource, ParallelPlan, Problem, RunSpec
from workers.contracts.base import Refused, problem

MOST_DEVICES = 2**16  # of one data-parallel group


@dataclass(frozen=True)
class Resolved:
    """The plan, None for runs that have none; `how` says in a sentence where it is from.

    `problems` say why the planner found none; the plan is then a plain one that nobody should run.
    """

    plan: ParallelPlan | None
    devices: int
    automatic: bool
    how: str
    problems: list[Problem] = field(default_factory=list)


def resolve_plan(spec: RunSpec, choose: Callable[[RunSpec, int], Choice] | None = None) -> Resolved:
    """A given plan as it is. "auto" of a training run asks the planner by `choose`, and so does no
    plan on several
    devices; no plan on one device, and every other kind, is plain data parallel over the devices
    asked for, in fp32.
    """
    if spec.kind == "external":
        return Resolved(None, 0, False, "The program runs elsewhere; Orrery places nothing.")
    if spec.plan_given and isinstance(spec.plan, ParallelPlan):
        # a script's own program decides what its processes do, so only their number counts
        devices = (
            spec.resources.devices
            if spec.kind == "script" and spec.resources.devices
            else spec.plan.world_size
        )
        return Resolved(spec.plan, devices, False, "As given.")
    devices = spec.resources.devices or 1
    if devices > MOST_DEVICES:
        message = f"{devices} devices are more than a plan can spread data over"
        return Resolved(
            ParallelPlan(),
            1,
            True,
            message,
            [problem("resources.devices", message, f"at most {MOST_DEVICES}")],
        )
    asked = 'The plan is "auto"' if spec.plan_given else "No plan was given"
    if (
        choose is not None
        and spec.kind == "train"
        and spec.shape is not None
        and (spec.plan_given or devices > 1)
    ):
        return _chosen(spec, devices, asked, choose)
    return _plain(spec, devices, asked)


def _chosen(
    spec: RunSpec, devices: int, asked: str, choose: Callable[[RunSpec, int], Choice]
) -> Resolved:
    try:
        found = choose(spec, devices)
    except Refused as error:
        return _none(
            spec,
            devices,
            asked,
            [Problem(field=error.field or "plan", message=error.message, hint=error.hint)],
        )
    if found.plan is None:
        return _none(spec, devices, asked, found.problems)
    return Resolved(found.plan, devices, True, f"{asked}: {found.how[:1].lower()}{found.how[1:]}")


def _none(spec: RunSpec, devices: int, asked: str, problems: list[Problem]) -> Resolved:
    told = [
        item
        if item.field.startswith(("plan", "train"))
        else item.model_copy(update={"field": "plan"})
        for item in problems
    ]
    plain = _plain(spec, devices, asked)
    return Resolved(plain.plan, devices, True, plain.how, told)


def _plain(spec: RunSpec, devices: int, asked: str) -> Resolved:
    accumulate = spec.train.accumulate if spec.train and spec.train.accumulate else 1
    plan = ParallelPlan(dp=devices, micro_batch_size=1, global_batch_size=devices * accumulate)
    ranks = "one device" if devices == 1 else f"plain data parallel over {devices} devices"
    return Resolved(plan, devices, True, f"{asked}: {ranks}, ZeRO 0, fp32, micro-batch 1.")


def model_label(spec: RunSpec) -> str:
    """What lists call the model: the preset, the shape's own name, or the last part of where its
    weights lie.
    """
    if isinstance(spec.model, str):
        return spec.model
    if isinstance(spec.model, ModelSource):
        where = spec.model.path or spec.model.package or ""
        return where.rstrip("/").rsplit("/", 1)[-1][:120]
    return spec.model.name[:120]
