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
from pathlib import Path
from typing import Any

from workers.contracts.wire.node_messages import LaunchOrder
from workers.contracts.wire.serving_reports import EVALUATED, QUANTIZED, SERVED
from workers.launcher import command, processes, rendezvous
from workers.launcher.checkpoint_pin import pin_checkpoint
from workers.launcher.exit_verdict import RankExit, Verdict, judge, rank_verdict
from workers.launcher.hangs import hang_events
from workers.launcher.hangs.hang_detector import RankWatch, is_stopped
from workers.launcher.rundir import RunDir, read_json, write_json
from workers.launcher.shipping.redis_link import Link
from workers.launcher.shipping.telemetry_sender import TelemetrySender
from workers.launcher.stopping import StopSequence

POLL_S = 0.15  # a poll costs 1.2 ms of a core: below 1%
SETTLE_S = 5.0  # how long the exit report waits for telemetry to be acknowledged
# how long the exit report waits for Redis; after that the agent reports it at its next start
REDIS_PATIENCE_S = 3600.0
DUMP_S = 10.0  # how long hanging ranks may take to write their stacks
PATIENT_FACTOR = 3.0  # for loading, compiling, first steps, saving, validation


class Supervisor:
    """Runs one attempt on this node; call `run` once."""

    def __init__(self, run_dir: RunDir, order: LaunchOrder, link: Link) -> None:
        self.run_dir, self.order, self.link = run_dir, order, link
        self.ranks = range(order.rank_offset, order.rank_offset + order.local_ranks)
        self.stopping = StopSequence(
            run_dir, order.fence, link.node.node, reads_control=order.kind in command.OWN_PROGRAMS
        )
        self.sender = TelemetrySender(run_dir, order, link, on_event=self._on_event)
        self.watch = RankWatch(
            run_dir.rank,
            self.ranks,
            pipeline_stage=lambda rank: command.pipeline_stage(order, rank),
            node=link.node.node,
            synchronized=order.kind != "serve" or (order.plan or {}).get("dp", 1) == 1,
        )
        self.torchrun: subprocess.Popen[bytes] | None = None
        self._running_since: float | None = None
        # verdict of the supervisor itself: a limit, a hang, an unwritable folder
        self._own_verdict: Verdict | None = None
        self._oom_kills = processes.oom_kill_count()

    def run(self) -> Verdict:
        """Run the attempt; afterwards its processes have exited and a verdict is reported."""
        signal.signal(
            signal.SIGTERM,
            lambda number, frame: self.stopping.take({"action": "preempt", "grace_s": 5.0}),
        )
        try:
            verdict = self._attempt()
        except command.Unlaunchable as error:
            verdict = Verdict("user_error", str(error))
        except OSError as error:
            verdict = unwritable_verdict(self.run_dir, error, self.link.node.node)
        processes.kill_all(self.order.fence, node=self.link.node.node, root=os.getpid())
        try:
            write_json(self.run_dir.exit, {**verdict.to_dict(), "reported": False})
        except OSError as error:
            # ranks could not write their status either, which explains their exit
            if verdict.signal == "vanished":
                verdict = unwritable_verdict(self.run_dir, error, self.link.node.node)
        self._finish(verdict)
        return verdict

    def _attempt(self) -> Verdict:
        self.link.report("launching", {"pid": os.getpid()})
        self.link.flush()
        write_json(self.run_dir.spec, _resolved_spec(self.order))
        command.program(self.order, self.run_dir)  # raises before any waiting
        self._pin_origin()
        host, port = rendezvous.meet(self.order, self.link, keep_waiting=self._no_stop_requested)
        if self.stopping.action is None:
            self._start(host, port)
            while self.torchrun is not None and self.torchrun.poll() is None:
                self._poll()
                time.sleep(POLL_S)
        return self._verdict()

    def _pin_origin(self) -> None:
        """Pin the checkpoint of a fork's first attempt, so that the parent may delete its own."""
        origin = self.order.resume_from
        if origin is None or origin.source is None:
            return
        home = command.node_home(self.run_dir, self.order)
        if not pin_checkpoint(home, origin.source, origin.path):
            raise command.Unlaunchable(
                f"The checkpoint of step {origin.step} that this run continues from is no longer "
                f"on this node ({home / origin.source}); fork from an existing one."
            )

    def _no_stop_requested(self) -> bool:
        self.stopping.poll()
        self.link.flush()
        return self.stopping.action is None

    def _start(self, host: str, port: int) -> None:
        _, folder = command.program(self.order, self.run_dir)
        arguments = command.torchrun(
            self.order, self.run_dir, host=host, port=port, local_address=self.link.node.address
        )
        loopback = (self.order.rendezvous.host or "").startswith(command.LOOPBACK)
        address = "127.0.0.1" if loopback else self.link.node.address
        env = command.environment(self.order, self.run_dir, host=host, address=address)
        with open(self.run_dir.path / "torchrun.log", "ab") as log:
            self.torchrun = subprocess.Popen(
                arguments,
                cwd=folder,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=processes.die_with_parent,
            )

    def _poll(self) -> None:
        self.stopping.poll()
        self.link.flush()
        self.sender.pump()
        if self._running_since is None:
            if all((self.run_dir.rank(rank) / "process.json").exists() for rank in self.ranks):
                self._running_since = time.monotonic()
                self.link.report("running", {"ranks": list(self.ranks)})
                self.link.flush()
                write_json(
                    self.run_dir.supervisor,
                    {**read_json(self.run_dir.supervisor), "state": "running"},
                )
        elif self._own_verdict is None:
            self._check_limits(time.monotonic(), self._running_since)
        processes.reap(spare=self.torchrun.pid if self.torchrun else None)

    def _check_limits(self, now: float, since: float) -> None:
        limit = self.order.max_seconds
        if limit is not None and now - since > limit and self.stopping.action is None:
            if self.order.kind == "serve":  # reaching the limit is a successful end
                message = f"Served for {limit:g} s (resources.max_seconds)."
                self.stopping.take(
                    {"action": "cancel", "grace_s": self.order.grace_s, "reason": message}
                )
                return
            message = (
                f"Reached its limit of {limit:g} s (resources.max_seconds); allow more time, "
                "or request fewer steps."
            )
            self._own_verdict = Verdict("user_error", message, time=time.time())
            self.stopping.take({"action": "cancel", "grace_s": self.order.grace_s})
            return
        if self.order.kind not in command.OWN_PROGRAMS:
            return
        hang_s = self.order.hang_s
        event = hang_events.event(self.watch.look(now), nodes=self.order.nodes, ends_after_s=hang_s)
        if event is not None:
            self.link.report("event", event)
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
        if quiet_s > (hang_s if in_step else PATIENT_FACTOR * hang_s):
            self._own_verdict = hang_events.verdict(self.watch.rank_progress(), quiet_s)
            if self.watch.stall is None:
                self.link.report(
                    "event",
                    hang_events.hang(self.watch.rank_progress(), quiet_s, nodes=self.order.nodes),
                )
            self._dump_stacks()
            self.stopping.take({"action": "kill"})

    def _dump_stacks(self) -> None:
        """Send SIGABRT: PYTHONFAULTHANDLER makes every rank write its threads' stacks and exit.

        Waits up to DUMP_S for all but stopped ranks, which do neither.
        """
        pending = []
        for rank in self.ranks:
            folder = self.run_dir.rank(rank)
            if pid := read_json(folder / "process.json").get("pid"):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGABRT)
                    pending += [] if is_stopped(pid) else [folder / "status.json"]
        deadline = time.monotonic() + DUMP_S
        while time.monotonic() < deadline and not all(status.exists() for status in pending):
            time.sleep(0.05)

    def _verdict(self) -> Verdict:
        ends = read_rank_exits(self.run_dir, self.ranks, self.sender)
        oom_killed = processes.oom_kill_count() > self._oom_kills
        code = self.torchrun.returncode if self.torchrun else None
        output = _tail(self.run_dir.path / "torchrun.log")
        verdict = self._own_verdict or judge(
            ends, torchrun_code=code, torchrun_output=output, oom_killed=oom_killed
        )
        # why a server stopped, and after how many requests
        if self.order.kind == "serve" and verdict.exit_class == "ok":
            reason = next(
                (str(end.record["reason"]) for end in ends if end.record.get("reason")),
                verdict.reason,
            )
            verdict = replace(
                verdict, reason=" ".join(filter(None, (self.stopping.reason, f"Rank 0 {reason}.")))
            )
        requested_at = self.stopping.requested_at
        on_request = verdict.exit_class != "ok" and (
            verdict.time is None or requested_at is None or verdict.time >= requested_at
        )
        if self._own_verdict is None and self.stopping.action is not None and on_request:
            verdict = requested(self.stopping, verdict)
        elif verdict.exit_class not in ("ok", "preempted", "cancelled"):
            for end in ends:
                if end.code != 0:
                    own = rank_verdict(end, oom_killed=oom_killed)
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

    def _on_event(self, row: dict[str, Any]) -> None:
        data = row.get("data")
        if not isinstance(data, dict):
            return
        for file in (
            data.get("files") or () if row.get("type") in (EVALUATED, QUANTIZED, SERVED) else ()
        ):
            self.link.report("artifact", {key: file[key] for key in ("name", "path", "bytes")})
        if not data.get("path"):
            return
        if row.get("type") in ("profile_saved", "memory_profile"):
            name = f"{Path(str(data['path'])).parent.name}-{data.get('name') or row['type']}"
            self.link.report(
                "artifact", {"name": name, "path": data["path"], "bytes": data.get("bytes") or 0}
            )
        if row.get("type") == "checkpoint_saved":
            self.link.report(
                "checkpoint",
                {key: data.get(key) or 0 for key in ("step", "tokens", "bytes", "path")},
            )

    def _finish(self, verdict: Verdict) -> None:
        """Ship the rest, then `exited`, then mark it as reported."""
        report = verdict.to_dict()
        for message in self.sender.skipped():
            print(message, flush=True)
        started = time.monotonic()
        settle_s = self.stopping.settle_s if self.stopping.settle_s is not None else SETTLE_S
        settled_by = started + settle_s
        while time.monotonic() < started + REDIS_PATIENCE_S:
            try:
                self.sender.pump(final=True)
                settled = self.sender.settled()
            except OSError:
                settled = True  # the disk failed this attempt
            if not self.link.flush():
                # Redis is unreachable: telemetry could not be sent yet
                settled_by = time.monotonic() + settle_s
            elif settled or time.monotonic() > settled_by:
                break
            time.sleep(0.05)
        self.link.report("exited", report)
        while not self.link.flush() and time.monotonic() < started + REDIS_PATIENCE_S:
            time.sleep(0.2)
        with contextlib.suppress(OSError):
            self.sender.save()
            write_json(self.run_dir.exit, {**report, "reported": self.link.flush()})


def requested(stopping: StopSequence, verdict: Verdict) -> Verdict:
    """The verdict on ranks that exited because a stop was requested."""
    reasons = {
        "cancel": ("cancelled", "Cancelled on request."),
        "kill": ("cancelled", "Killed by the control plane."),
        "pause": ("preempted", "Paused on request."),
        "preempt": ("preempted", "Preempted on request; exited after its last step."),
    }
    exit_class, reason = reasons[stopping.action or "cancel"]
    return Verdict(
        exit_class,
        stopping.reason or reason,
        step=verdict.step,
        code=verdict.code,
        time=verdict.time,
    )


def read_rank_exits(run_dir: RunDir, ranks: range, sender: TelemetrySender) -> list[RankExit]:
    """How each local rank exited, without ranks that torchrun never started."""
    exits = []
    for rank in ranks:
        folder = run_dir.rank(rank)
        status = read_json(folder / "status.json")
        if not status and not (folder / "process.json").exists():
            continue
        collector = sender.collectors.get(rank)
        if collector is not None:
            with contextlib.suppress(OSError):
                collector.collect(final=True)
        record = read_json(folder / "exit.json")
        lines = list(collector.last_lines) if collector else _tail(folder / "stderr.log")
        at = float(status.get("time", time.time()))
        exits.append(RankExit(rank, status.get("code"), at, record, lines))
    return exits


def unwritable_verdict(run_dir: RunDir, error: OSError, node: str) -> Verdict:
    """The verdict if the run directory or the rendezvous failed on this node."""
    if isinstance(error, rendezvous.NoRendezvous):
        return Verdict("infrastructure", str(error), time=time.time())
    message = (
        f"Run directory {run_dir} on node {node} cannot be used: {error.strerror or error}. Check "
        "free space and permissions there."
    )
    return Verdict("infrastructure", message, time=time.time())


def _resolved_spec(order: LaunchOrder) -> dict[str, Any]:
    """The spec with the control plane's plan, as the engine reads it."""
    return {**order.spec, "plan": order.plan} if order.plan else order.spec


def _tail(path: Any) -> list[str]:
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.stat(path).st_size - 16384))
            return file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return []
