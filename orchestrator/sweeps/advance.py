"""One pass over the running sweeps: read their runs, decide, start, pause, continue, stop.

The periodic job `sweeps` calls it under its lease. A pass may be repeated after any failure: each
trial commits with its run, and everything else is decided from stored rows.
"""

from __future__ import annotations

import logging
import math
import random
from collections import Counter
from collections.abc import Callable

from orchestrator.common import clock, conditional
from orchestrator.runs.models import Attempt
from orchestrator.sweeps import bayesian, decisions, space
from orchestrator.sweeps.definition import SweepDefinition
from orchestrator.sweeps.models import Sweep, SweepState, Trial, TrialState
from orchestrator.sweeps.trials import (
    OPEN,
    FilesDeleted,
    holds_devices,
    trial_observe,
    trial_pause,
    trial_read,
    trial_resume,
    trial_start,
    trial_stop,
)
from workers.contracts.wire.node_messages import RunState

log = logging.getLogger(__name__)
FAILURES = 3  # this many failed trials and no value end a sweep


def sweeps_advance(*, renew: Callable[[], None] = lambda: None) -> dict[str, int]:
    """Advance every running sweep; counts of trials started and of sweeps ended.

    A sweep whose pass fails does not hold up the others; the next pass tries again.
    """
    counts: Counter[str] = Counter()
    running = Sweep.objects.filter(state=SweepState.RUNNING).select_related("owner", "experiment")
    for sweep in running.order_by("pk"):
        renew()
        try:
            counts.update(SweepPass(sweep).run())
        except Exception:
            log.exception("sweep %s could not be advanced", sweep.pk)
            counts["errors"] += 1
    return {name: count for name, count in counts.items() if count}


def device_hours(sweep: Sweep) -> float:
    """Hours for which attempts of the sweep's runs have held devices, times devices."""
    now, seconds = clock.now(), 0.0
    attempts = Attempt.objects.filter(run__trial__sweep=sweep)
    for created, ended, devices in attempts.values_list("created", "ended", "run__devices"):
        seconds += devices * ((ended or now) - created).total_seconds()
    return seconds / 3600


class SweepPass:
    """One sweep at one time."""

    def __init__(self, sweep: Sweep) -> None:
        self.sweep = sweep
        self.definition = SweepDefinition.from_dict(sweep.definition)
        self.minimize = self.definition.metric.goal == "minimize"
        self.trials = list(sweep.trials.select_related("run__owner").order_by("number"))
        self.started = 0
        self.reached: list[Trial] = []  # passed a boundary and run on
        self.retries = False  # a start is left to the next pass

    def run(self) -> dict[str, int]:
        """Observe and decide; counts."""
        for trial in self.open():
            if trial_observe(trial, self.definition):
                self.reached.append(trial)
        if reason := self._hopeless():
            return self._end(SweepState.FAILED, reason)
        hours = self.definition.budget.device_hours
        if hours is not None and device_hours(self.sweep) >= hours:
            return self._end_of_budget(f"The budget of {hours:g} device-hours is used.")
        method = {"asha": self._asha, "pbt": self._pbt}.get(self.definition.method, self._points)
        method()
        if not self.open() and not self.retries:
            return self._end_of_budget("")
        return {"started": self.started}

    def open(self) -> list[Trial]:
        """Trials that have not ended."""
        return [trial for trial in self.trials if trial.state in OPEN]

    def _points(self) -> None:
        """Grid, random and TPE: as many runs at a time as requested."""
        while len(self.open()) < self.definition.parallel and self._start_next():
            pass

    def _start_next(self) -> bool:
        number = self.trials[-1].number + 1 if self.trials else 1
        if number > self.definition.most_runs:
            return False
        return self._start(self._next_point(number), number)

    def _start(
        self, point: space.Point, number: int, *, member: int = 0, parent: Trial | None = None
    ) -> bool:
        try:
            trial = trial_start(
                self.sweep, self.definition, point, number=number, member=member, parent=parent
            )
        except FilesDeleted:
            self.retries = True
            return False
        if trial is None:
            return False
        self.trials.append(trial)
        self.started += trial.run is not None
        return trial.run is not None or not self._hopeless()

    def _next_point(self, number: int) -> space.Point:
        definition = self.definition
        if definition.method == "grid":
            return space.grid_point(definition.parameters, number - 1)
        if definition.method == "tpe":
            return bayesian.tpe_point(
                definition.parameters,
                observed(self.trials),
                minimize=self.minimize,
                seed=definition.seed,
                number=number,
            )
        return space.random_point(definition.parameters, seed=definition.seed, number=number)

    def _asha(self) -> None:
        """Pause at rungs; continue the best of each rung, else start new points."""
        assert self.definition.asha is not None
        for trial in self.reached:
            trial.state = TrialState.PAUSED  # until it is promoted below
        held = sum(holds_devices(trial) for trial in self.open())
        later: set[int] = set()  # are still saving their checkpoints, or find no free place
        while (number := self._promotable(later)) is not None:
            trial = self._numbered(number)
            in_place = trial in self.reached
            if (in_place or held < self.definition.parallel) and self._resume(trial):
                held += not in_place
            else:
                later.add(number)
        while held < self.definition.parallel and not later and self._start_next():
            held += 1
        for trial in self.reached:
            if trial.state == TrialState.PAUSED:
                trial_pause(trial, by=self.sweep.owner)
        running = any(trial.state == TrialState.RUNNING for trial in self.trials)
        if not running and not later and not self.retries:
            self._asha_end()

    def _promotable(self, without: set[int]) -> int | None:
        assert self.definition.asha is not None
        return decisions.promotable(
            self._measured(without),
            factor=self.definition.asha.factor,
            rungs=len(self.definition.boundaries),
            minimize=self.minimize,
        )

    def _asha_end(self) -> None:
        """No run is left to start: the best one finishes, the others stop."""
        if not any(trial.state == TrialState.FINISHED for trial in self.trials):
            number = decisions.last_resort(self._measured(), minimize=self.minimize)
            if number is not None:
                self._resume(self._numbered(number))
                return
        for trial in self.open():
            step = self.definition.boundaries[max(trial.rung - 1, 0)]
            message = f"Not among the best at step {step}."
            trial_stop(trial, by=self.sweep.owner, message=message)

    def _numbered(self, number: int) -> Trial:
        return next(trial for trial in self.trials if trial.number == number)

    def _resume(self, trial: Trial) -> bool:
        return trial_resume(trial, by=self.sweep.owner)

    def _measured(self, without: set[int] | None = None) -> list[decisions.Measured]:
        return [
            decisions.Measured(
                number=trial.number,
                results=[math.nan if value is None else value for value in trial.results],
                waits=trial.state == TrialState.PAUSED and trial.number not in (without or ()),
            )
            for trial in self.trials
            if trial.results
        ]

    def _pbt(self) -> None:
        """Pause members at each interval; once all wait, the worst continue from the best."""
        assert self.definition.pbt is not None
        for trial in self.reached:
            trial_pause(trial, by=self.sweep.owner)
        if len(self.trials) < self.definition.pbt.population:
            for member in range(len(self.trials), self.definition.pbt.population):
                point = self._next_point(member + 1)
                if not self._start(point, member + 1, member=member):
                    return
            return
        members = self.open()
        waiting = [
            trial
            for trial in members
            if trial.state == TrialState.PAUSED
            and trial.run is not None
            and trial.run.state == RunState.PAUSED
        ]
        if members and len(waiting) == len(members):
            self._exploit(members)

    def _exploit(self, members: list[Trial]) -> None:
        options, rung = self.definition.pbt, max(trial.rung for trial in members)
        assert options is not None
        draw = random.Random(f"{self.definition.seed}:{self.sweep.pk}:{rung}")
        by_number = {trial.number: trial for trial in members}
        values = {
            trial.number: math.nan if trial.results[-1] is None else trial.results[-1]
            for trial in members
        }
        replaced = decisions.replacements(
            values, quantile=options.quantile, minimize=self.minimize, draw=draw
        )
        for number, source in replaced.items():
            self._replace(by_number[number], by_number[source], draw)
        for trial in members:
            if trial.state == TrialState.PAUSED:
                trial_resume(trial, by=self.sweep.owner)

    def _replace(self, worst: Trial, source: Trial, draw: random.Random) -> None:
        """Fork the source's checkpoint with perturbed parameters in the place of the worst."""
        number = self.trials[-1].number + 1
        if number > self.definition.most_runs:
            return
        assert self.definition.pbt is not None
        point = space.perturbed(
            self.definition.parameters,
            source.parameters,
            factors=self.definition.pbt.factors,
            draw=draw,
        )
        if self._start(point, number, member=worst.member, parent=source):
            if self.trials[-1].run is None:
                return  # refused: the worst continues
            message = f"Replaced by trial {number}, which continues trial {source.number}."
            trial_stop(worst, by=self.sweep.owner, message=message)

    def _hopeless(self) -> str:
        """Why no run of this sweep can give a value; empty if one may."""
        failed = [
            trial for trial in self.trials if trial.state in (TrialState.FAILED, TrialState.REFUSED)
        ]
        enough = min(FAILURES, self.definition.most_runs)
        if len(failed) < enough or any(trial.value is not None for trial in self.trials):
            return ""
        return f"The first {len(failed)} runs have no value of the metric. {failed[-1].message}"

    def _end_of_budget(self, message: str) -> dict[str, int]:
        for trial in self.open():
            trial_read(trial, self.definition)
        best = best_trial(self.trials, minimize=self.minimize)
        if best is None:
            name = self.definition.metric.name
            return self._end(SweepState.FAILED, f"{message} No run has a value of {name}.".strip())
        return self._end(SweepState.FINISHED, message)

    def _end(self, state: SweepState, message: str) -> dict[str, int]:
        for trial in self.open():
            trial_stop(trial, by=self.sweep.owner, message="The sweep has ended.")
        running = Sweep.objects.filter(pk=self.sweep.pk, state=SweepState.RUNNING)
        ended = conditional.update(running, state=state, message=message[:500], ended=clock.now())
        return {"started": self.started, "ended": int(ended)}


def observed(trials: list[Trial]) -> list[bayesian.Observed]:
    """Trials as a sampler sees them; refused ones count as failed."""
    return [
        bayesian.Observed(
            parameters=trial.parameters,
            value=trial.value if trial.state not in OPEN else None,
            failed=trial.state not in OPEN and trial.value is None,
        )
        for trial in trials
    ]


def best_trial(trials: list[Trial], *, minimize: bool) -> Trial | None:
    """The trial with the best value, of those stopped early too; None without values."""
    values = {trial.number: trial.value for trial in trials if trial.value is not None}
    if not values:
        return None
    number = decisions.better_first(values, minimize=minimize)[0]
    return next(trial for trial in trials if trial.number == number)
