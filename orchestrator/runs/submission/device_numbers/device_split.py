"""Splits a run's devices between training and separate rollouts, where a spec leaves it open.

`rollout.devices` "auto": of all splits the one with the shortest predicted time per update. Reads
no database.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from orchestrator.planner.search.auto_plan import Choice
from orchestrator.planner.search.device_splits import split_numbers
from orchestrator.runs.submission.prediction.training import choose_plan
from orchestrator.runs.submission.target_hardware import TargetHardware
from workers.contracts import ModelSpec, ParallelPlan, Problem, RunSpec
from workers.contracts.base import Refused, problem
from workers.contracts.catalog.units import format_time


@dataclass(frozen=True)
class Split:
    """A split of the devices and the best plan of its training part; `step_time_s` per update."""

    rollouts: int
    training: int
    choice: Choice

    def to_dict(self) -> dict[str, Any]:
        """As stored with a prediction."""
        return {
            "training": self.training,
            "rollouts": self.rollouts,
            "plan": None if self.choice.plan is None else self.choice.plan.to_dict(),
            "step_time_s": self.choice.step_time_s,
            "fits": self.choice.fits,
        }


@dataclass(frozen=True)
class ChosenSplit:
    """The spec with a number of devices for rollouts, and the splits that were compared.

    `how` explains the choice in one sentence.
    """

    spec: RunSpec
    splits: list[Split] = field(default_factory=list)
    how: str = ""
    problems: list[Problem] = field(default_factory=list)


def choose_split(
    spec: RunSpec, hardware: TargetHardware | None, teacher: ModelSpec | None = None
) -> ChosenSplit:
    """The spec unchanged if it names a number.

    With an explicit plan rollouts get the devices that it leaves; else each split gets the fastest
    plan of its training devices. One problem if there is nothing to split.
    """
    policy = None if spec.train is None else spec.train.policy
    if policy is None or not policy.rollout.splits_devices:
        return ChosenSplit(spec)
    name = f"train.{spec.train.objective}.rollout.devices" if spec.train is not None else ""
    total, plan = spec.resources.devices, spec.plan
    if total is None or total < 2:
        message = "auto splits resources.devices between training and rollouts"
        message += ", which is not set" if total is None else f"; {total} cannot be split"
        hint = "Use resources.devices 4, or a number here."
        return ChosenSplit(with_rollout_devices(spec, 1), problems=[problem(name, message, hint)])
    if spec.has_explicit_plan and isinstance(plan, ParallelPlan):
        left = total - plan.world_size
        if left < 1:
            message = (
                f"the plan uses {plan.world_size} of {total} devices, which leaves no device for "
                "rollouts"
            )
            hint = f"Use resources.devices {plan.world_size + 1}."
            return ChosenSplit(
                with_rollout_devices(spec, 1), problems=[problem(name, message, hint)]
            )
        return ChosenSplit(with_rollout_devices(spec, left))
    if hardware is None or spec.shape is None:
        return ChosenSplit(with_rollout_devices(spec, 1))
    splits = [_split(spec, hardware, total, number, teacher) for number in split_numbers(total)]
    usable = [each for each in splits if each.choice.plan is not None]
    fitting = [each for each in usable if each.choice.fits] or usable
    timed = [each for each in fitting if each.choice.step_time_s is not None] or fitting
    if not timed:
        return ChosenSplit(with_rollout_devices(spec, 1), splits)
    best = min(timed, key=lambda each: (each.choice.step_time_s or 0.0, each.rollouts))
    compared = f"the fastest of {len(timed)} splits" if len(timed) > 1 else "the only split"
    took = format_time(best.choice.step_time_s) if best.choice.step_time_s else "an unknown time"
    how = (
        f"Of {total} devices {best.training} train and {best.rollouts} sample: {compared} that "
        f"fit, with {took} per update."
    )
    return ChosenSplit(with_rollout_devices(spec, best.rollouts), splits, how)


def with_rollout_devices(spec: RunSpec, number: int) -> RunSpec:
    """The spec with this number of devices for rollouts."""
    train = spec.train
    assert train is not None and train.policy is not None
    rollout = train.policy.rollout.model_copy(update={"devices": number})
    body = train.policy.model_copy(update={"rollout": rollout})
    return spec.model_copy(update={"train": train.model_copy(update={str(train.objective): body})})


def _split(
    spec: RunSpec,
    hardware: TargetHardware,
    total: int,
    rollouts: int,
    teacher: ModelSpec | None,
) -> Split:
    training = total - rollouts
    changed = with_rollout_devices(spec, rollouts)
    try:
        choice = choose_plan(changed, hardware, training, teacher)
    except Refused as error:
        refused = Problem(field=error.field or "plan", message=error.message, hint=error.hint)
        choice = Choice(None, error.message, False, None, [refused])
    return Split(rollouts, training, choice)
