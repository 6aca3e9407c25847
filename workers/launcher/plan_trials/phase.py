"""Runs the trials of an attempt on this node and reports them; returns the plan to run with.

The ranks decide what they try (`workers.training.trials`); this starts them, again after a plan
that ended them, watches for hangs, and reports. Does not start the run.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

from pydantic import ValidationError

from workers.contracts.wire.maintenance.plan_trials import (
    BEGAN,
    CHOSEN,
    TRIAL,
    TRIAL_BEGAN,
    TrialResult,
    TrialsOrder,
    TrialsState,
)
from workers.contracts.wire.node_messages import LaunchOrder
from workers.launcher import processes
from workers.launcher.exits.classification import Verdict, judge
from workers.launcher.hangs import hang_events
from workers.launcher.hangs.hang_detector import RankWatch
from workers.launcher.plan_trials.outcome import (
    Chosen,
    as_failure,
    blames_plan,
    choose,
    failure_of,
    interrupted_twice,
)
from workers.launcher.rundir import RunDir, read_json, write_json
from workers.launcher.shipping.rank_exits import read_rank_exits, tail
from workers.launcher.shipping.redis_link import Link

FOLDER: Final = "trials"
_STATE: Final = "state.json"
_POLL_S: Final = 0.1
# of an earlier start
_OLD: Final = ("process.json", "status.json", "exit.json", "beacon", "pulse.json", "stderr.log")
_QUIET_S: Final = 60.0  # in a step, after which a plan hangs; at most the run's own limit


class Spawn(Protocol):
    """Starts torchrun for an order in a folder; `purpose` names its rendezvous."""

    def __call__(
        self, order: LaunchOrder, run_dir: RunDir, *, purpose: str
    ) -> subprocess.Popen[bytes] | None:
        """None if a stop was requested meanwhile. Raises OSError, Unlaunchable."""
        ...


class TrialPhase:
    """Call `run` once. `poll` reads requests and sends reports; False once a stop is requested."""

    def __init__(
        self,
        order: LaunchOrder,
        run_dir: RunDir,
        link: Link,
        *,
        spawn: Spawn,
        poll: Callable[[], bool],
        clean_up: Callable[[], None],
        out_of_time: Callable[[float], bool],
    ) -> None:
        assert order.trials is not None
        self.trials: TrialsOrder = order.trials
        self.run_dir = RunDir(run_dir.path / FOLDER)
        self.order = order.model_copy(update={"run_dir": f"{order.run_dir}/{FOLDER}"})
        self.link, self._spawn, self._poll, self._clean_up = link, spawn, poll, clean_up
        self._out_of_time = out_of_time
        self.ranks = range(order.rank_offset, order.rank_offset + order.local_ranks)
        self.results = {each.index: each for each in order.trials.results}
        self._plans = {each.index: each for each in order.trials.candidates}
        self._began = time.monotonic()
        self._current: int | None = None
        self._current_since = 0.0
        self._running = False
        self._oom_kills = processes.oom_kill_count()

    @property
    def spent_s(self) -> float:
        """Seconds of all trials of the run, with those of earlier attempts."""
        return self.trials.spent_s + time.monotonic() - self._began

    def run(self) -> Chosen | Verdict | None:
        """The chosen plan, the attempt's verdict, or None if a stop was requested meanwhile."""
        self.run_dir.path.mkdir(exist_ok=True)
        self._report(BEGAN, {"count": len(self._plans)})
        for failed in interrupted_twice(self.trials):
            self._store(failed)
        for start in range(len(self._plans) + 1):
            if all(self._has_failed(index) for index in self._plans):
                return choose(self.trials, self._all(), "")
            ended = self._one_start(start)
            if isinstance(ended, str):
                return self._chosen(choose(self.trials, self._all(), ended))
            if isinstance(ended, Verdict) or not self._poll():
                return ended
        return self._chosen(choose(self.trials, self._all(), "the ranks ended too often"))

    def _one_start(self, number: int) -> str | Verdict | None:
        """Start the ranks once: why trials ended, the attempt's verdict, or None to start again."""
        self._write_files()
        torchrun = self._spawn(self.order, self.run_dir, purpose=f"trials-{number}")
        if torchrun is None:
            return None
        watch = RankWatch(
            self.run_dir.rank,
            self.ranks,
            pipeline_stage=lambda rank: 0,  # it differs between plans
            node=self.link.node.node,
        )
        hung: Verdict | None = None
        while torchrun.poll() is None:
            going_on = self._poll()
            self._read_state()
            self._report_running()
            if going_on and hung is None:
                hung = self._hang(watch)
                if hung is not None or self._out_of_time(self._began):
                    self._clean_up()
            processes.reap(spare=torchrun.pid)
            time.sleep(_POLL_S)
        state = self._read_state()
        self._clean_up()
        if not self._poll():
            return None
        if self._out_of_time(self._began):
            return None
        if hung is None and torchrun.returncode == 0 and state is not None and state.ended:
            return state.ended
        return self._failed(hung or self._judge(torchrun.returncode))

    def _failed(self, verdict: Verdict) -> Verdict | None:
        """Record the failure of the plan that was tried; the attempt's verdict if none was."""
        if self._current is None or not blames_plan(verdict, nodes=self.order.nodes):
            return verdict
        candidate = self._plans[self._current]
        seconds = time.monotonic() - self._current_since
        before = self.results.get(self._current)
        self._store(failure_of(candidate, as_failure(verdict), seconds=seconds, before=before))
        self._current = None
        return None

    def _write_files(self) -> None:
        self._current = None
        usable = [each for each in self.trials.candidates if not self._has_failed(each.index)]
        for name in (_STATE, *(f"rank-{rank}/{file}" for rank in self.ranks for file in _OLD)):
            (self.run_dir.path / name).unlink(missing_ok=True)
        write_json(self.run_dir.spec, {**self.order.spec, "plan": usable[0].plan})
        known = self.trials.model_copy(update={"results": self._all(), "spent_s": self.spent_s})
        write_json(self.run_dir.path / "trials.json", {**known.to_dict(), "began": time.time()})

    def _read_state(self) -> TrialsState | None:
        """The ranks' newest state; new results and a new trial are reported."""
        document = read_json(self.run_dir.path / _STATE)
        try:
            state = TrialsState.from_dict(document) if document else None
        except ValidationError:
            return None
        if state is None:
            return None
        for result in state.results:
            if result.index in self._plans and result != self.results.get(result.index):
                self._store(result)
        if state.current != self._current:
            self._current, self._current_since = state.current, time.monotonic()
            if state.current in self._plans:
                tried = len(self.results)
                data = {
                    "index": state.current,
                    "tried": tried,
                    "count": len(self._plans),
                    "again": state.current in self.results,
                }
                self._report(TRIAL_BEGAN, data)
        return state

    def _report_running(self) -> None:
        files = [self.run_dir.rank(rank) / "process.json" for rank in self.ranks]
        if not self._running and all(file.exists() for file in files):
            self._running = True
            self.link.report("running", {"ranks": list(self.ranks)})

    def _hang(self, watch: RankWatch) -> Verdict | None:
        watch.look(time.monotonic())
        in_step = watch.in_a_step
        most = min(_QUIET_S, self.order.hang_s) if in_step else self.order.hang_s
        limit_s = hang_events.limit_s(most, in_step=in_step)
        if watch.quiet_s is None or watch.quiet_s <= limit_s:
            return None
        return hang_events.verdict(watch.rank_progress(), watch.quiet_s)

    def _judge(self, code: int | None) -> Verdict:
        return judge(
            read_rank_exits(self.run_dir, self.ranks, {}),
            torchrun_code=code,
            torchrun_output=tail(self.run_dir.path / "torchrun.log"),
            oom_killed=processes.oom_kill_count() > self._oom_kills,
        )

    def _store(self, result: TrialResult) -> None:
        self.results[result.index] = result
        self._report(TRIAL, result.to_dict())

    def _chosen(self, chosen: Chosen | Verdict) -> Chosen | Verdict:
        if isinstance(chosen, Chosen):
            data = {"index": chosen.index, "plan": chosen.plan, "reason": chosen.reason}
            results = [each.to_dict() for each in self._all()]
            self._report(CHOSEN, {**data, "results": results})
        return chosen

    def _report(self, type_: str, data: dict[str, Any]) -> None:
        """Report an event from the first node; all nodes know the same."""
        if self.order.node_rank == 0:
            elapsed = time.monotonic() - self._began
            data |= {"spent_s": round(self.spent_s, 3), "elapsed_s": round(elapsed, 3)}
            self.link.report("event", {"type": type_, "data": data})
            self.link.flush()

    def _has_failed(self, index: int) -> bool:
        result = self.results.get(index)
        return result is not None and result.state == "failed"

    def _all(self) -> Sequence[TrialResult]:
        return [self.results[index] for index in sorted(self.results)]
