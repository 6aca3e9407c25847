"""Autotune: before a training run starts, its devices try the plans that are predicted fastest.

Settings and their checks only; `wire.maintenance.plan_trials` has what nodes get and report.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Final

from pydantic import AfterValidator, Field

from workers.contracts.base import Contract, Problem, Refused, problem

if TYPE_CHECKING:
    from workers.contracts.specs.run import RunSpec

MOST_PLANS: Final = 16
LEAST_STEPS: Final = 3  # timed steps that a median requires


def _check_number(number: int) -> int:
    if not 2 <= number <= MOST_PLANS:
        message = f"{number} is not a number of plans that can be compared"
        raise Refused(message, f"Use 2 to {MOST_PLANS}, or no autotune.")
    return number


class Autotune(Contract):
    """Try the `top_k` plans that are predicted fastest, then train with the one measured fastest.

    Each trial takes `warmup_steps` steps that are not timed and up to `steps` timed ones. All
    trials together take at most `max_share` of the run's steps and `max_seconds`.
    """

    top_k: Annotated[int, AfterValidator(_check_number)] = 4
    steps: Annotated[int, Field(ge=LEAST_STEPS, le=200)] = 12
    warmup_steps: Annotated[int, Field(ge=1, le=100)] = 3
    max_share: Annotated[float, Field(gt=0, le=0.5)] = 0.05
    max_seconds: Annotated[float, Field(gt=0)] | None = None

    def budget_s(self, run_s: float) -> float:
        """Seconds that trials may take before a run whose steps take `run_s`."""
        return min(self.max_share * run_s, self.max_seconds or float("inf"))


def autotune_problems(spec: RunSpec) -> list[Problem]:
    """Why this run cannot try plans; empty without `autotune`. An explicit plan is not judged."""
    if spec.autotune is None:
        return []
    if spec.kind != "train" or spec.train is None:
        message = f"plans of {spec.kind} runs are not tried"
        return [problem("autotune", message, "Use kind train, or leave autotune out.")]
    if spec.train.policy is not None:
        message = f"{spec.train.objective} alternates sampling and training; no trial measures both"
        return [problem("autotune", message, "Use another objective, or leave autotune out.")]
    if spec.resources.min_devices is not None:
        message = "plans are tried on a fixed number of devices, this run may change it"
        return [problem("autotune", message, "Leave resources.min_devices or autotune out.")]
    return []
