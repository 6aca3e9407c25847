"""Resolves the plan of a spec, which may be missing or "auto", to the plan that will run."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace

from orchestrator.runs.submission.prediction.training import choose_plan
from orchestrator.runs.submission.target_hardware import TargetHardware
from workers.contracts import ModelSource, ModelSpec, ParallelPlan, Problem, RunSpec
from workers.contracts.base import Refused, problem

MAX_DEVICES = 2**16  # of one data-parallel group


@dataclass(frozen=True)
class ResolvedPlan:
    """The plan, or None for runs without one; `how` explains it in one sentence.

    `problems` explain why the planner has no plan; `plan` is then a placeholder.
    """

    plan: ParallelPlan | None
    devices: int
    automatic: bool
    how: str
    problems: list[Problem] = field(default_factory=list)
    # of a run with autotune: the plans to try, fastest first
    candidates: list[ParallelPlan] = field(default_factory=list)


def resolve_plan(
    spec: RunSpec, hardware: TargetHardware | None, teacher: ModelSpec | None = None
) -> ResolvedPlan:
    """A given plan is returned unchanged; `teacher` is the shape of a distillation's teacher.

    For a training run with `"auto"`, or without a plan on several devices, the planner chooses for
    the hardware. All others run plain data parallelism over the requested devices, in fp32.
    """
    if spec.kind == "external":
        return ResolvedPlan(None, 0, False, "The program runs elsewhere; Orrery places nothing.")
    if spec.has_explicit_plan and isinstance(spec.plan, ParallelPlan):
        # a script's own program uses its processes as it likes, so only their number counts
        devices = (
            spec.resources.devices
            if spec.kind == "script" and spec.resources.devices
            else spec.plan.world_size + spec.rollout_devices
        )
        return ResolvedPlan(spec.plan, devices, False, "As given.")
    rollouts = spec.rollout_devices
    devices = (spec.resources.devices or 1 + rollouts) - rollouts
    if devices < 1:
        message = (
            f"{spec.resources.devices} devices leave none for training, rollouts have {rollouts}"
        )
        hint = f"Use at least {1 + rollouts}."
        none_left = problem("resources.devices", message, hint)
        return ResolvedPlan(ParallelPlan(), 1 + rollouts, True, message, [none_left])
    if devices > MAX_DEVICES:
        message = f"{devices} devices are more than a plan can use for data parallelism"
        too_many = problem("resources.devices", message, f"Use at most {MAX_DEVICES}.")
        return ResolvedPlan(ParallelPlan(), 1, True, message, [too_many])
    reason = 'The plan is "auto"' if spec.has_explicit_plan else "No plan was given"
    plannable = hardware is not None and spec.kind == "train" and spec.shape is not None
    chosen = spec.has_explicit_plan or devices > 1 or spec.autotune is not None
    if hardware is not None and plannable and chosen:
        resolved = _planned(spec, devices, reason, hardware, teacher)
    else:
        resolved = _data_parallel(spec, devices, reason)
    return replace(resolved, devices=resolved.devices + rollouts)


def _planned(
    spec: RunSpec,
    devices: int,
    reason: str,
    hardware: TargetHardware,
    teacher: ModelSpec | None,
) -> ResolvedPlan:
    try:
        count = spec.autotune.top_k if spec.autotune is not None else 1
        choice = choose_plan(spec, hardware, devices, teacher, count=count)
    except Refused as error:
        refused = Problem(field=error.field or "plan", message=error.message, hint=error.hint)
        return _unresolved(spec, devices, reason, [refused])
    if choice.plan is None:
        return _unresolved(spec, devices, reason, choice.problems)
    how = f"{reason}: {choice.how[:1].lower()}{choice.how[1:]}"
    return ResolvedPlan(choice.plan, devices, True, how, candidates=choice.candidates)


def _unresolved(spec: RunSpec, devices: int, reason: str, problems: list[Problem]) -> ResolvedPlan:
    plan_fields = [
        item
        if item.field.startswith(("plan", "train"))
        else item.model_copy(update={"field": "plan"})
        for item in problems
    ]
    placeholder = _data_parallel(spec, devices, reason)
    return ResolvedPlan(placeholder.plan, devices, True, placeholder.how, plan_fields)


def _data_parallel(spec: RunSpec, devices: int, reason: str) -> ResolvedPlan:
    accumulate = spec.train.accumulate if spec.train and spec.train.accumulate else 1
    plan = ParallelPlan(dp=devices, micro_batch_size=1, global_batch_size=devices * accumulate)
    ranks = "one device" if devices == 1 else f"plain data parallel over {devices} devices"
    return ResolvedPlan(plan, devices, True, f"{reason}: {ranks}, ZeRO 0, fp32, micro-batch 1.")


# the folder of a run, or one of its checkpoints
_OF_RUN = re.compile(r"(?:^|/)runs/(\d{1,18})(?:/checkpoints/step-(\d{1,18}))?/?$")


def model_label(spec: RunSpec) -> str:
    """The model's name in lists: the preset, the spec's name, the run that wrote it and its step,
    or the last part of its path.

    Of a produce run the server's model, if it is named; empty for programs of users, unless their
    spec names a model.
    """
    if spec.kind in ("external", "script") and "model" not in spec.model_fields_set:
        return ""
    if spec.produce is not None:
        return (spec.produce.server.model or "")[:120]
    if isinstance(spec.model, str):
        return spec.model
    if isinstance(spec.model, ModelSource):
        path = spec.model.path or spec.model.package or ""
        written = _OF_RUN.search(path)
        if written is not None:
            return f"run {written[1]}" + (f" step {int(written[2])}" if written[2] else "")
        return path.rstrip("/").rsplit("/", 1)[-1][:120]
    return spec.model.name[:120]
