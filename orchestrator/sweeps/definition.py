"""What a user requests of a sweep, and the checks that need no database.

Grid, random, TPE (Bergstra et al. 2011), ASHA (Li et al. 2020) and PBT (Jaderberg et al. 2017).
"""

from __future__ import annotations

import copy
import math
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from workers.contracts.base import Contract, Problem

MOST_RUNS = 1000
MOST_PARAMETERS = 20
DEFAULT_RUNS = 20
Scalar = str | int | float | bool | None
Method = Literal["grid", "random", "tpe", "asha", "pbt"]
# fields that a checkpoint depends on: a fork cannot change them
_FIXED_IN_FORKS = ("model", "kind", "train.seq_len", "train.seed", "train.optimizer.name")
_LENGTH = "train.steps"


class Parameter(Contract):
    """The values of one field of the spec: a list, or a range."""

    values: Annotated[list[Scalar], Field(min_length=1, max_length=1000)] | None = None
    min: float | None = None
    max: float | None = None
    scale: Literal["linear", "log"] = "linear"
    integer: Annotated[bool, Field(description="whole numbers only")] = False
    points: Annotated[int, Field(ge=2, le=1000, description="of a range in a grid")] | None = None


class Metric(Contract):
    """The objective: a metric of the run, at its end or at its best."""

    name: Annotated[str, Field(min_length=1, max_length=120)] = "loss"
    goal: Literal["minimize", "maximize"] = "minimize"
    use: Annotated[Literal["last", "best"], Field(description="which value of the series")] = "last"


class Budget(Contract):
    """Limits of the whole sweep."""

    runs: Annotated[int, Field(ge=1, le=MOST_RUNS, description="default: by method")] | None = None
    device_hours: Annotated[float, Field(gt=0)] | None = None


class Asha(Contract):
    """Rungs at `min_steps`, times `factor` each; the best of each rung continue."""

    min_steps: Annotated[int, Field(ge=1)]
    factor: Annotated[int, Field(ge=2, le=10)] = 3


class Pbt(Contract):
    """At each interval the worst members continue from checkpoints of the best, perturbed."""

    population: Annotated[int, Field(ge=2, le=100)] = 8
    every_steps: Annotated[int, Field(ge=1)]
    quantile: Annotated[float, Field(gt=0, le=0.5)] = 0.25
    factors: Annotated[list[Annotated[float, Field(gt=0)]], Field(min_length=1, max_length=10)] = [
        0.8,
        1.25,
    ]


class SweepDefinition(Contract):
    """A base spec, parameters by path, a method, an objective and a budget.

    Parameters are in order of their paths: a database may not keep the order of JSON keys, and a
    grid's points depend on it.
    """

    spec: Annotated[dict[str, Any], Field(json_schema_extra={"x-contract": "RunSpec"})]
    parameters: Annotated[
        dict[str, Parameter], Field(description="by path in the spec: train.optimizer.lr")
    ]
    method: Method = "random"
    metric: Metric = Metric()
    budget: Budget = Budget()
    parallel: Annotated[int, Field(ge=1, le=100, description="runs at a time")] = 4
    seed: Annotated[int, Field(ge=0, le=2**31)] = 0
    asha: Asha | None = None
    pbt: Pbt | None = None
    force: Annotated[bool, Field(description="also plans that are predicted not to fit")] = False

    @field_validator("parameters")
    @classmethod
    def _order_by_path(cls, parameters: dict[str, Parameter]) -> dict[str, Parameter]:
        return dict(sorted(parameters.items()))

    @property
    def steps(self) -> int:
        """Steps of each run; 0 if the spec has none."""
        train = self.spec.get("train")
        steps = train.get("steps") if isinstance(train, dict) else None
        return steps if isinstance(steps, int) and not isinstance(steps, bool) else 0

    @property
    def most_runs(self) -> int:
        """Runs that the budget allows."""
        if self.budget.runs is not None:
            return self.budget.runs
        if self.method == "grid":
            return min(MOST_RUNS, grid_size(self.parameters))
        if self.method == "pbt" and self.pbt is not None:
            intervals = max(1, math.ceil(self.steps / self.pbt.every_steps))
            return min(MOST_RUNS, self.pbt.population * intervals)
        return DEFAULT_RUNS

    @property
    def boundaries(self) -> list[int]:
        """Steps at which ASHA and PBT compare runs; empty for other methods."""
        if self.method == "asha" and self.asha is not None:
            rungs = [self.asha.min_steps]
            while rungs[-1] * self.asha.factor < self.steps:
                rungs.append(rungs[-1] * self.asha.factor)
            return [rung for rung in rungs if rung < self.steps]
        if self.method == "pbt" and self.pbt is not None:
            return list(range(self.pbt.every_steps, self.steps, self.pbt.every_steps))
        return []


def grid_size(parameters: dict[str, Parameter]) -> int:
    """Points of the grid; a range without `points` counts as one."""
    return math.prod(
        len(parameter.values) if parameter.values is not None else parameter.points or 1
        for parameter in parameters.values()
    )


def with_parameters(spec: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """A copy of the spec with fields set by path. ValueError if a path leads into a value."""
    changed = copy.deepcopy(spec)
    for path, value in values.items():
        *parents, last = path.split(".")
        place = changed
        for name in parents:
            child = place.setdefault(name, {})
            if not isinstance(child, dict):
                raise ValueError(f"{name} is {child!r} in the spec, not an object")
            place = child
        place[last] = value
    return changed


def definition_problems(sweep: SweepDefinition) -> list[Problem]:
    """What is wrong between the fields of a sweep, apart from the spec itself."""
    problems = _parameter_problems(sweep)
    if sweep.spec.get("kind") not in ("train", "script"):
        kind = sweep.spec.get("kind")
        message = f"a sweep trains; the spec has kind {kind!r}"
        problems.append(Problem(field="spec.kind", message=message, hint="Use train or script."))
    if sweep.method == "grid":
        problems += _grid_problems(sweep)
    if sweep.method in ("asha", "pbt"):
        problems += _pausing_problems(sweep)
    if sweep.method == "pbt":
        problems += _pbt_problems(sweep)
    train = sweep.spec.get("train")
    if (
        sweep.metric.name.startswith("val_")
        and isinstance(train, dict)
        and not train.get("eval")
        and not any(path.startswith("train.eval") for path in sweep.parameters)
    ):
        message = f"{sweep.metric.name} never appears: the spec has no validation"
        hint = 'Add "eval": {"every_steps": 50, "batches": 4} to train.'
        problems.append(Problem(field="metric.name", message=message, hint=hint))
    return problems


def _parameter_problems(sweep: SweepDefinition) -> list[Problem]:
    problems = []
    if not 1 <= len(sweep.parameters) <= MOST_PARAMETERS:
        message = f"a sweep has 1 to {MOST_PARAMETERS} parameters, not {len(sweep.parameters)}"
        problems.append(
            Problem(field="parameters", message=message, hint="Add a parameter, or remove some.")
        )
    for path, parameter in sweep.parameters.items():
        field, ends = f"parameters.{path}", (parameter.min, parameter.max)
        if (parameter.values is None) == (ends == (None, None)):
            message = "a parameter has either values, or min and max"
            problems.append(
                Problem(field=field, message=message, hint='Write {"min": 1e-4, "max": 0.1}.')
            )
        elif parameter.values is None:
            low, high = ends
            if low is None or high is None or not low < high:
                message = f"the range from {low} to {high} is empty"
                problems.append(Problem(field=field, message=message, hint="Use a min below max."))
            elif parameter.scale == "log" and low <= 0:
                message = f"a logarithmic range cannot start at {low}"
                problems.append(Problem(field=field, message=message, hint="Use a min above 0."))
    return problems


def _grid_problems(sweep: SweepDefinition) -> list[Problem]:
    problems = [
        Problem(
            field=f"parameters.{path}",
            message="a grid needs values, or a number of points of the range",
            hint='Add "points": 5.',
        )
        for path, parameter in sweep.parameters.items()
        if parameter.values is None and parameter.points is None
    ]
    size = grid_size(sweep.parameters)
    if size > MOST_RUNS and sweep.budget.runs is None:
        message = f"the grid has {size:,} points; a sweep has at most {MOST_RUNS:,} runs"
        hint = "Use fewer values, or method random or tpe with a budget of runs."
        problems.append(Problem(field="parameters", message=message, hint=hint))
    return problems


def _pausing_problems(sweep: SweepDefinition) -> list[Problem]:
    """ASHA and PBT pause and continue training runs by their checkpoints."""
    name = sweep.method
    options = sweep.asha if name == "asha" else sweep.pbt
    if options is None:
        hint = (
            'Add {"min_steps": 100}.'
            if name == "asha"
            else 'Add {"population": 8, "every_steps": 100}.'
        )
        return [Problem(field=name, message=f"method {name} needs options", hint=hint)]
    if sweep.spec.get("kind") != "train" or not sweep.steps:
        message = f"{name} pauses training runs by their steps"
        return [
            Problem(field="spec.kind", message=message, hint="Use kind train with train.steps.")
        ]
    problems = []
    if not sweep.boundaries:
        first = sweep.asha.min_steps if sweep.asha and name == "asha" else sweep.pbt
        first = first.every_steps if isinstance(first, Pbt) else first
        message = f"the first comparison at step {first} is not before the end at {sweep.steps}"
        problems.append(Problem(field=name, message=message, hint=f"Use fewer than {sweep.steps}."))
    if _LENGTH in sweep.parameters:
        message = f"{name} compares runs at equal steps; {_LENGTH} must be the same in all"
        problems.append(
            Problem(field=f"parameters.{_LENGTH}", message=message, hint="Remove it, or use tpe.")
        )
    return problems


def _pbt_problems(sweep: SweepDefinition) -> list[Problem]:
    problems = []
    train = sweep.spec.get("train")
    checkpoint = train.get("checkpoint") if isinstance(train, dict) else None
    if not (isinstance(checkpoint, dict) and checkpoint.get("every_steps")):
        every = sweep.pbt.every_steps if sweep.pbt is not None else 100
        problems.append(
            Problem(
                field="spec.train.checkpoint",
                message="PBT copies checkpoints between runs; the spec saves none",
                hint=f'Add "checkpoint": {{"every_steps": {every}}} to train.',
            )
        )
    for path in sweep.parameters:
        if path in _FIXED_IN_FORKS or path.startswith("model."):
            message = "a run that continues from a checkpoint cannot change it"
            problems.append(
                Problem(field=f"parameters.{path}", message=message, hint="Use tpe or asha.")
            )
    if sweep.pbt is not None and sweep.most_runs < sweep.pbt.population:
        message = f"a budget of {sweep.most_runs} runs is below the population"
        problems.append(
            Problem(field="budget.runs", message=message, hint=f"Use {sweep.pbt.population}.")
        )
    return problems
