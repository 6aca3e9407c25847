"""Tries plans one after the other in one set of processes, and writes what they measured.

A plan that fails ends the processes: the supervisor records it and starts them again without it.
Writes no point and no checkpoint of the run, and uses no state of its data.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from workers.contracts.specs.plan import ParallelPlan
from workers.contracts.wire.maintenance.plan_trials import TrialResult, TrialsOrder, TrialsState
from workers.metrics.beacon import Beacon
from workers.runtime.environment import Environment
from workers.runtime.exit_codes import Outcome
from workers.training.data.rows import RowSource
from workers.training.loop.rank_sync import broadcast_decision
from workers.training.parallel.mesh import World, start_world
from workers.training.setup.attempt import Attempt, finish_attempt
from workers.training.setup.spec_loading import TrainingRun
from workers.training.trials import policy
from workers.training.trials.policy import Limits, NextTrial
from workers.training.trials.state import plans_of, result_of, write_state
from workers.training.trials.trial import Trial, TrialRequests, trial_run


def run_trials(
    run: TrainingRun, order: TrialsOrder, environment: Environment, *, began: float
) -> Outcome:
    """Try the plans; `began` is when the supervisor started this (Unix seconds). Never raises."""
    return finish_attempt(Trials(run, order, environment, began=began))


class Trials(Attempt):
    """All trials of one start of the processes, on this rank."""

    def __init__(
        self, run: TrainingRun, order: TrialsOrder, environment: Environment, *, began: float
    ) -> None:
        super().__init__(run, environment)
        # requests to the run are in the folder of the attempt
        self.control = self.requests = TrialRequests(
            environment.directory.parent, reads_file=environment.leads_node
        )
        self.order, self.limits, self.plans = order, Limits.of(order), plans_of(order)
        self.records = {each.index: each for each in policy.records_of(order)}
        self.results = {each.index: each for each in order.results}
        self._offset_s = time.monotonic() - max(0.0, time.time() - began) if began else None
        self._worlds: dict[str, World] = {}
        self._timed: list[float] = []
        self._seen = 0

    @property
    def spent_s(self) -> float:
        """Seconds that trials have taken so far, with those of earlier attempts."""
        since = self._offset_s if self._offset_s is not None else time.monotonic()
        return self.order.spent_s + time.monotonic() - since

    def execute(self) -> Outcome:
        """Try plans until the policy ends it, or until the run must stop."""
        environment = self.environment
        environment.rank_directory.mkdir(parents=True, exist_ok=True)
        (environment.rank_directory / "exit.json").unlink(missing_ok=True)
        self.beacon = Beacon(environment.rank_directory, stages=environment.world_size)
        world = self.world_of(self.run.plan)
        self.control.listen(too_late=self._leave_at_once)
        samples, _ = self.open_samples(world)
        while True:
            decided = broadcast_decision(world, self._decide, leads=world.rank == 0)
            if isinstance(decided, str):
                self._save(ended=decided)
                return Outcome("ok", f"{len(self.results)} plans tried: {decided}")
            self._save(current=decided.index)
            received = self._try(decided, samples)
            if received is not None:
                kind = "cancelled" if received == "stop" else "preempted"
                return Outcome(kind, f"{received} was requested during trials of plans")

    def _decide(self) -> NextTrial | str:
        return policy.next_trial(list(self.records.values()), self.limits, spent_s=self.spent_s)

    def _try(self, decided: NextTrial, samples: RowSource) -> str | None:
        """One trial on all ranks; the request to stop the run, if there was one."""
        assert self.beacon is not None
        index, warmup = decided.index, self.limits.warmup_steps
        print(f"plan {index + 1} of {len(self.plans)}, {decided.steps} steps", flush=True)
        began = time.monotonic()
        self.requests.end_trial = None
        self._timed, self._seen = [], 0
        self._best_s = policy.best_step_s(
            [each for each in self.records.values() if each.index != index]
        )
        trial = Trial(
            trial_run(self.run, self.plans[index], steps=warmup + decided.steps),
            self.environment,
            control=self.requests,
            beacon=self.beacon,
            on_point=self._stepped,
        )
        try:
            trial.train_steps(self.world_of(self.plans[index]), samples)
            numbers = {
                "received": self.requests.received,
                "ended": self.requests.end_trial,
                "peak_bytes": trial.peak_bytes,
            }
        finally:
            trial.release_model()
        ranks = self._gather(numbers)
        took_s, steps_s = time.monotonic() - began, sum(trial.step_seconds)
        received = next((each["received"] for each in ranks if each["received"]), None)
        if self._timed and received is None:
            self._record(index, ranks, took_s=took_s, setup_s=max(0.0, took_s - steps_s))
        return received

    def _record(
        self, index: int, ranks: list[dict[str, Any]], *, took_s: float, setup_s: float
    ) -> None:
        before = self.results.get(index)
        record = self.records[index].visited(
            self._timed, setup_s=setup_s, slower=ranks[0]["ended"] == "slower"
        )
        self.records[index] = record
        self.results[index] = result_of(
            record,
            peak_bytes=max(
                [each["peak_bytes"] for each in ranks] + [before.peak_bytes or 0.0 if before else 0]
            ),
            seconds=took_s + (before.seconds if before else 0.0),
        )

    def _stepped(self, tokens: int, values: Mapping[str, float]) -> None:
        """After each step: rank 0 decides whether the trial ends early."""
        self._seen += 1
        if self._seen > self.limits.warmup_steps:
            self._timed.append(values["step_time_s"])
        if self.environment.rank == 0 and self.requests.end_trial is None:
            self.requests.end_trial = policy.early_end(
                self._timed,
                best_s=self._best_s,
                spent_s=self.spent_s,
                budget_s=policy.budget_s(list(self.records.values()), self.limits),
            )

    def _gather(self, numbers: dict[str, Any]) -> list[dict[str, Any]]:
        if self.environment.world_size == 1 or not dist.is_initialized():
            return [numbers]
        ranks: list[Any] = [None] * self.environment.world_size
        dist.all_gather_object(ranks, numbers)
        return ranks

    def world_of(self, plan: ParallelPlan) -> World:
        """The plan's mesh, shared by plans of one shape: process groups are not freed."""
        parts = (plan.dp, plan.tp, plan.pp, plan.cp, plan.ep, plan.dp_replicate)
        shape = str((*parts, plan.zero >= 2, plan.offloads_weights))
        if shape not in self._worlds:
            self._worlds[shape] = start_world(self.environment, plan)
        return self._worlds[shape]

    def _save(self, *, current: int | None = None, ended: str = "") -> None:
        """Write the state for this node's supervisor."""
        if not self.environment.leads_node:
            return
        results: list[TrialResult] = [self.results[index] for index in sorted(self.results)]
        write_state(
            self.environment.directory,
            TrialsState(results=results, current=current, spent_s=self.spent_s, ended=ended),
        )

    _best_s: float | None = None
