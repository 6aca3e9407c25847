"""Supervises one attempt on one node, from torchrun's start to the exit report.

Polls requests, files, Redis, processes and limits about seven times per second. Does not decide on
retries.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from dataclasses import replace
from functools import partial
from typing import Any

from workers.contracts.wire import encrypted_text
from workers.contracts.wire.node_messages import LaunchOrder
from workers.launcher import command, preflight, processes, rendezvous
from workers.launcher.exits.classification import Verdict, judge, rank_verdict
from workers.launcher.exits.own_verdicts import (
    limit_verdict,
    requested,
    unwritable_verdict,
    with_server_reason,
)
from workers.launcher.hangs import hang_events
from workers.launcher.hangs.hang_detector import RankWatch
from workers.launcher.hangs.stack_dump import dump_stacks
from workers.launcher.inputs.checkpoints import provide_checkpoint
from workers.launcher.inputs.data_sets import DataSets
from workers.launcher.isolation import containers, start
from workers.launcher.isolation.acting import before_program
from workers.launcher.isolation.run_user import RunUser
from workers.launcher.lease import Lease
from workers.launcher.plan_trials.outcome import Chosen
from workers.launcher.plan_trials.phase import TrialPhase
from workers.launcher.programs import environment
from workers.launcher.rundir import (
    RunDir,
    read_json,
    write_json,
)
from workers.launcher.shipping import final_report
from workers.launcher.shipping.disk_guard import DiskGuard
from workers.launcher.shipping.file_reports import FileReports
from workers.launcher.shipping.rank_exits import read_rank_exits, tail
from workers.launcher.shipping.redis_link import Link
from workers.launcher.shipping.telemetry_sender import TelemetrySender
from workers.launcher.stopping import StopSequence
from workers.launcher.store_link import StoreLink

BUSY_POLL_S = 0.01  # while a program floods its log, so that its files stay small
POLL_S = 0.15  # a poll costs 1.2 ms of a core: below 1%
# how long a supervisor remains after its attempt while the store does not take copies
STORE_PATIENCE_S = 6 * 3600.0


class Supervisor:
    """Runs one attempt on this node; call `run` once."""

    def __init__(
        self,
        run_dir: RunDir,
        order: LaunchOrder,
        link: Link,
        user: RunUser | None = None,
        *,
        term_grace_s: float = 5.0,
        store_patience_s: float = STORE_PATIENCE_S,
    ) -> None:
        self.run_dir, self.order, self.link, self._user = run_dir, order, link, user
        self._term_grace_s = term_grace_s  # for a checkpoint after SIGTERM to this process
        self.ranks = range(order.rank_offset, order.rank_offset + order.local_ranks)
        self.stopping = StopSequence(
            run_dir, order.fence, link.node.node, reads_control=order.kind in command.OWN_PROGRAMS
        )
        self.store, self._store_patience_s = StoreLink(run_dir, order, link), store_patience_s
        self.data_sets = DataSets(order, run_dir, link, user)
        self.sender = TelemetrySender(run_dir, order, link, on_event=FileReports(link, self.store))
        self.disk_guard = DiskGuard(self.sender.log_collectors, self.sender.outboxes)
        self.watch = RankWatch(
            run_dir.rank,
            self.ranks,
            pipeline_stage=lambda rank: command.pipeline_stage(self.order, rank),
            node=link.node.node,
            synchronized=order.kind != "serve" or (order.plan or {}).get("dp", 1) == 1,
        )
        self.lease = Lease(
            fence=order.fence,
            node=link.node.node,
            lease_s=order.lease_s,
            redis_url=lambda: link.node.redis_url,
        )
        self.torchrun: subprocess.Popen[bytes] | None = None
        self._running_since: float | None = None
        self._limit_from: float | None = None  # start of the trials of plans, if there were any
        self._state_stored = False  # "running", in supervisor.json
        # whether the packages of a script are still being prepared
        self._preparing = environment.environment_of(order) is not None
        # verdict of the supervisor itself: a limit, a hang, an unwritable folder
        self._own_verdict: Verdict | None = None
        self._oom_kills = processes.oom_kill_count()
        self._has_group, self._group_oom_kills = False, 0

    def run(self) -> Verdict:
        """Run the attempt; afterwards its processes have exited and a verdict is reported."""
        signal.signal(
            signal.SIGTERM,
            lambda number, frame: self.stopping.take(
                {"action": "preempt", "grace_s": self._term_grace_s}
            ),
        )
        self.lease.start()
        try:
            verdict = self._attempt()
        except command.Unlaunchable as error:
            verdict = Verdict("user_error", str(error))
        except start.NotSupported as error:
            verdict = Verdict("infrastructure", f"{error} (node {self.link.node.node})")
        except encrypted_text.Undecryptable:
            message = "The node joined again after this order was sent; its secrets are unreadable."
            verdict = Verdict("infrastructure", message)
        except OSError as error:
            verdict = unwritable_verdict(self.run_dir, error, self.link.node.node)
        self._kill_programs()
        self.disk_guard.close()
        try:
            write_json(self.run_dir.exit, {**verdict.to_dict(), "reported": False})
        except OSError as error:
            # ranks could not write their status either, which explains their exit
            if verdict.signal == "vanished":
                verdict = unwritable_verdict(self.run_dir, error, self.link.node.node)
        final_report.send(
            verdict,
            self.run_dir,
            self.link,
            self.sender,
            self.store,
            urgent_s=self.stopping.settle_s,
            store_patience_s=self._store_patience_s,
        )
        self.lease.close()
        return verdict

    def _attempt(self) -> Verdict:
        self.link.report("launching", {"pid": os.getpid()})
        self.link.flush()
        write_json(self.run_dir.spec, _resolved_spec(self.order))
        start.unpack(self.order, self.run_dir)
        start.check(self.order, self.run_dir)  # raises before any waiting
        self._provide_inputs()
        self._probe()
        if self._own_verdict is not None:
            return self._own_verdict
        self._try_plans()
        if self._own_verdict is not None:
            return self._own_verdict
        if self.stopping.action is None:
            self.torchrun = self._spawn(self.order, self.run_dir)
        if self.torchrun is not None:
            self.disk_guard.start()
            while self.torchrun is not None and self.torchrun.poll() is None:
                self._poll()
                time.sleep(BUSY_POLL_S if self.sender.behind else POLL_S)
        return self._verdict()

    def _provide_inputs(self) -> None:
        """Have checkpoint and data sets on this node; what is missing is the attempt's verdict."""
        self._own_verdict = provide_checkpoint(
            self.order,
            self.run_dir,
            self.link,
            self.store,
            keep_waiting=self._no_stop_requested,
        ) or self.data_sets.provide(self.store, keep_waiting=self._no_stop_requested)
        if self.order.inputs and self._own_verdict is None:
            spec = self.data_sets.with_local_paths(_resolved_spec(self.order))
            self.order = self.order.model_copy(update={"spec": spec})  # a script's words and env
            write_json(self.run_dir.spec, spec)

    def _probe(self) -> None:
        """Measure the devices if the order requests it; a shortfall is the attempt's verdict."""
        if self.stopping.action is None and self._own_verdict is None:
            self._own_verdict = preflight.check(
                self.order,
                self.run_dir,
                self.link,
                keep_waiting=self._no_stop_requested,
                user=self._user,
            )

    def _no_stop_requested(self) -> bool:
        self._poll_stop_requests()
        self.link.flush()
        return self.stopping.action is None

    def _try_plans(self) -> None:
        """Measure the plans that the order lists, if any, and continue with the fastest one."""
        if self.order.trials is None or self.stopping.action is not None:
            return
        phase = TrialPhase(
            self.order,
            self.run_dir,
            self.link,
            spawn=self._spawn,
            poll=self._poll_trials,
            clean_up=self._kill_programs,
            out_of_time=self._is_out_of_time,
        )
        self._limit_from = time.monotonic()
        ended = phase.run()
        if isinstance(ended, Verdict):
            self._own_verdict = ended
        if isinstance(ended, Chosen):
            self.order = self.order.model_copy(update={"plan": ended.plan, "trials": None})
            write_json(self.run_dir.spec, _resolved_spec(self.order))

    def _poll_trials(self) -> bool:
        self.sender.pump()  # lines of this supervisor
        return self._no_stop_requested() and self._own_verdict is None

    def _is_out_of_time(self, since: float) -> bool:
        """Whether the run has reached its limit; then that is the attempt's verdict."""
        limit = self.order.max_seconds
        if limit is None or time.monotonic() - since <= limit:
            return False
        self._own_verdict = limit_verdict(limit)
        return True

    def _kill_programs(self) -> None:
        processes.kill_all(self.order.fence, node=self.link.node.node, root=os.getpid())
        containers.remove(self.order, before=partial(before_program, self._user))

    def _spawn(
        self, order: LaunchOrder, run_dir: RunDir, *, purpose: str = ""
    ) -> subprocess.Popen[bytes] | None:
        """Start torchrun once all nodes are there; None if a stop was requested meanwhile."""
        host, port = rendezvous.meet(
            order, self.link, keep_waiting=self._no_stop_requested, purpose=purpose
        )
        while not self.lease.granted and self._no_stop_requested():
            time.sleep(POLL_S)  # the run may have been given up while its launch order waited
        if self.stopping.action is not None:
            return None
        loopback = (order.rendezvous.host or "").startswith(command.LOOPBACK)
        prepared = start.prepare(
            order,
            run_dir,
            self._user,
            host=host,
            port=port,
            address="127.0.0.1" if loopback else self.link.node.address,
            local_address=self.link.node.address,
            secrets=self._secrets(),
        )
        self._has_group = prepared.group
        return start.spawn(prepared, run_dir, self._user)

    def _count_oom_kills(self) -> None:
        """Read the counter of the program's own control group, which ends with the program."""
        if self._has_group:
            files = [self.run_dir.rank(rank) / "process.json" for rank in self.ranks]
            pids = [pid for file in files if isinstance(pid := read_json(file).get("pid"), int)]
            kills = [processes.oom_kills_in_group_of(pid) for pid in pids]
            self._group_oom_kills = max([self._group_oom_kills, *kills])

    def _secrets(self) -> dict[str, str]:
        purpose = self.order.secret_purpose
        return {
            name: encrypted_text.decrypt(self.link.node.secret, text, purpose=purpose)
            for name, text in self.order.secrets.items()
        }

    def _poll_stop_requests(self) -> None:
        """Requests of the control plane, and of the lease if it runs out or is revoked."""
        self.stopping.poll()
        stop = self.lease.stop_request
        if stop is not None and self.stopping.action not in ("kill", stop.action):
            grace_s = self.order.lease_s or 0.0
            self.stopping.take({"action": stop.action, "grace_s": grace_s, "reason": stop.reason})

    def _poll(self) -> None:
        self._poll_stop_requests()
        self.link.flush()
        self.sender.pump()
        self.store.poll()
        self._report_environment()
        if self._running_since is None:
            if all((self.run_dir.rank(rank) / "process.json").exists() for rank in self.ranks):
                self._running_since = time.monotonic()
                self.link.report("running", {"ranks": list(self.ranks)})
                self.link.flush()
        elif not self._state_stored:
            with contextlib.suppress(OSError):  # a full disk; the next poll tries again
                state = {**read_json(self.run_dir.supervisor), "state": "running"}
                write_json(self.run_dir.supervisor, state)
                self._state_stored = True
        if self._running_since is not None and self._own_verdict is None:
            self._check_limits(time.monotonic(), self._running_since)
        self._count_oom_kills()
        processes.reap(spare=self.torchrun.pid if self.torchrun else None)

    def _report_environment(self) -> None:
        """Report once with which packages the program starts."""
        if not self._preparing:
            return
        report = environment.read_report(self.run_dir)
        if report:
            self._preparing = False
        if report.get("state") == "ready":
            data = environment.event_of(report)
            self.link.report("event", {"type": "environment_prepared", "data": data})

    def _check_limits(self, now: float, since: float) -> None:
        limit = self.order.max_seconds
        if (
            limit is not None
            and now - (self._limit_from or since) > limit
            and self.stopping.action is None
        ):
            if self.order.kind == "serve":  # reaching the limit is a successful end
                message = f"Served for {limit:g} s (resources.max_seconds)."
                self.stopping.take(
                    {"action": "cancel", "grace_s": self.order.grace_s, "reason": message}
                )
                return
            self._own_verdict = limit_verdict(limit)
            self.stopping.take({"action": "cancel", "grace_s": self.order.grace_s})
            return
        if self.order.kind not in command.OWN_PROGRAMS:
            return
        observation = self.watch.look(now)
        # progress by the engine's beacons; of another program, by points
        quiet_s = (
            now - (self.sender.last_point or since)
            if self.watch.quiet_s is None
            else self.watch.quiet_s
        )
        in_step = (
            self.watch.in_a_step
            if self.watch.quiet_s is not None
            else self.sender.last_point is not None
        )
        limit_s = hang_events.limit_s(self.order.hang_s, in_step=in_step)
        event = hang_events.event(observation, nodes=self.order.nodes, ends_after_s=limit_s)
        if event is not None:
            self.link.report("event", event)
        if quiet_s > limit_s:
            self._own_verdict = hang_events.verdict(self.watch.rank_progress(), quiet_s)
            if self.watch.stall is None:
                self.link.report(
                    "event",
                    hang_events.hang(self.watch.rank_progress(), quiet_s, nodes=self.order.nodes),
                )
            dump_stacks(self.run_dir, self.ranks, self.order.fence, node=self.link.node.node)
            self.stopping.take({"action": "kill"})

    def _verdict(self) -> Verdict:
        ends = read_rank_exits(self.run_dir, self.ranks, self.sender.collectors)
        oom_killed = processes.oom_kill_count() > self._oom_kills or self._group_oom_kills > 0
        code = self.torchrun.returncode if self.torchrun else None
        output = tail(self.run_dir.path / "torchrun.log")
        self._report_environment()  # of a program that has ended at once
        verdict = (
            self._own_verdict
            or environment.failure(self.run_dir, self.order)
            or judge(ends, torchrun_code=code, torchrun_output=output, oom_killed=oom_killed)
        )
        if self.order.kind == "serve" and verdict.exit_class == "ok":
            verdict = with_server_reason(verdict, ends, self.stopping)
        requested_at = self.stopping.requested_at
        on_request = verdict.exit_class != "ok" and (
            verdict.time is None or requested_at is None or verdict.time >= requested_at
        )
        if self._own_verdict is None and self.stopping.action is not None and on_request:
            verdict = requested(self.stopping, verdict)
            if self.lease.stop_request is not None:  # no user requested the end: the run continues
                verdict = replace(verdict, exit_class="preempted")
        elif verdict.exit_class not in ("ok", "preempted", "cancelled"):
            for end in ends:
                if end.code != 0:
                    own = rank_verdict(end, oom_killed=oom_killed, stopped_for=self._own_verdict)
                    data = {
                        "code": end.code,
                        "signal": own.signal,
                        "class": own.exit_class,
                        "step": own.step,
                    }
                    self.link.report(
                        "event", {"type": "rank_exited", "rank": end.rank, "data": data}
                    )
        return verdict


def _resolved_spec(order: LaunchOrder) -> dict[str, Any]:
    """The spec with the control plane's plan, as the engine reads it."""
    return {**order.spec, "plan": order.plan} if order.plan else order.spec
