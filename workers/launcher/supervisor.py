"""One attempt on one node, from torchrun's start to the last acknowledged line and the exit report.

Turns ten times a second: requests, files, Redis, processes, limits. Knows no database; retries are
not its business.
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
from workers.launcher.checkpoint_pin import keep
from workers.launcher.exit_verdict import RankEnd, Verdict, judge, of_rank
from workers.launcher.hangs import hang_events
from workers.launcher.hangs.rank_watch import Watch, is_stopped
from workers.launcher.rundir import RunDir, read_json, write_json
from workers.launcher.shipping.redis_link import Link
from workers.launcher.shipping.telemetry_sender import Shipping
from workers.launcher.stopping import Stopping

TURN_S = 0.15  # a look costs 1.2 ms of a core: below 1% of it
SETTLE_S = 5.0  # how long the exit report waits for telemetry to be acknowledged
# how long the exit report waits for Redis; then the agent reports it at its next start
REDIS_PATIENCE_S = 3600.0
DUMP_S = 10.0  # how long ranks that hang may take to write their stacks
PATIENT_FACTOR = 3.0  # for loading, compiling, first steps, saving, validation


class Supervisor:
    def __init__(self, run_dir: RunDir, order: LaunchOrder, link: Link) -> None:
        self.run_dir, self.order, self.link = run_dir, order, link
        self.ranks = range(order.rank_offset, order.rank_offset + order.local_ranks)
        self.stopping = Stopping(
            run_dir, order.fence, link.node.node, listens=order.kind in command.OWN_PROGRAMS
        )
        self.shipping = Shipping(run_dir, order, link, on_event=self._on_event)
        self.watch = Watch(
            run_dir.rank,
            self.ranks,
            stage_of=lambda rank: command.stage_of(order, rank),
            node=link.node.node,
            together=order.kind != "serve" or (order.plan or {}).get("dp", 1) == 1,
        )
        self.torchrun: subprocess.Popen[bytes] | None = None
        self._running_since: float | None = None
        # by this supervisor itself: a limit, a hang, an unwritable folder
        self._decided: Verdict | None = None
        self._oom_kills = processes.oom_kills()

    def run(self) -> Verdict:
        """Everything.

        Whatever happens, the attempt's processes have ended and a verdict is reported.
        """
        signal.signal(
            signal.SIGTERM,
            lambda number, frame: self.stopping.take({"action": "preempt", "grace_s": 5.0}),
        )
        try:
            verdict = self._attempt()
        except command.Unlaunchable as error:
            verdict = Verdict("user_error", str(error))
        except OSError as error:
            verdict = unwritable(self.run_dir, error, self.link.node.node)
        processes.end_all(self.order.fence, node=self.link.node.node, root=os.getpid())
        try:
            write_json(self.run_dir.exit, {**verdict.to_dict(), "reported": False})
        except OSError as error:
            # ranks could not write their status either: that is why they ended
            if verdict.signal == "vanished":
                verdict = unwritable(self.run_dir, error, self.link.node.node)
        self._finish(verdict)
        return verdict

    def _attempt(self) -> Verdict:
        self.link.report("launching", {"pid": os.getpid()})
        self.link.flush()
        write_json(self.run_dir.spec, _resolved_spec(self.order))
        command.program(self.order, self.run_dir)  # refuses before anything is waited for
        self._keep_origin()
        host, port = rendezvous.meet(self.order, self.link, keep_on=self._not_asked_to_end)
        if self.stopping.action is None:
            self._start(host, port)
            while self.torchrun is not None and self.torchrun.poll() is None:
                self._turn()
                time.sleep(TURN_S)
        return self._verdict()

    def _keep_origin(self) -> None:
        """A fork's first attempt has its checkpoint under a name of its own, whatever becomes of
        its parent's.
        """
        origin = self.order.resume_from
        if origin is None or origin.source is None:
            return
        home = command.home_of(self.run_dir, self.order)
        if not keep(home, origin.source, origin.path):
            message = (
                f"The checkpoint of step {origin.step} that this run goes on from is not on "
                "this node any more"
            )
            raise command.Unlaunchable(
                f"{message} ({home / origin.source}); fork from one that is kept."
            )

    def _not_asked_to_end(self) -> bool:
        self.stopping.poll()
        self.link.flush()
        return self.stopping.action is None

    def _start(self, host: str, port: int) -> None:
        _, folder = command.program(self.order, self.run_dir)
        words = command.torchrun(
            self.order, self.run_dir, host=host, port=port, local_address=self.link.node.address
        )
        alone = (self.order.rendezvous.host or "").startswith(command.LOOPBACK)
        address = "127.0.0.1" if alone else self.link.node.address
        env = command.environment(self.order, self.run_dir, host=host, address=address)
        with open(self.run_dir.path / "torchrun.log", "ab") as log:
            self.torchrun = subprocess.Popen(
                words,
                cwd=folder,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=processes.die_with_parent,
            )

    def _turn(self) -> None:
        self.stopping.poll()
        self.link.flush()
        self.shipping.pump()
        if self._running_since is None:
            if all((self.run_dir.rank(rank) / "process.json").exists() for rank in self.ranks):
                self._running_since = time.monotonic()
                self.link.report("running", {"ranks": list(self.ranks)})
                self.link.flush()
                write_json(
                    self.run_dir.supervisor,
                    {**read_json(self.run_dir.supervisor), "state": "running"},
                )
        elif self._decided is None:
            self._check_limits(time.monotonic(), self._running_since)
        processes.reap(spare=self.torchrun.pid if self.torchrun else None)

    def _check_limits(self, now: float, since: float) -> None:
        limit = self.order.max_seconds
        if limit is not None and now - since > limit and self.stopping.action is None:
            if self.order.kind == "serve":  # serves as long as it was told to, and ends well
                message = f"Served for its {limit:g} s (resources.max_seconds)."
                self.stopping.take(
                    {"action": "cancel", "grace_s": self.order.grace_s, "reason": message}
                )
                return
            message = (
                f"Reached its limit of {limit:g} s (resources.max_seconds); allow more time, "
                "or ask for fewer steps."
            )
            self._decided = Verdict("user_error", message, time=time.time())
            self.stopping.take({"action": "cancel", "grace_s": self.order.grace_s})
            return
        if self.order.kind not in command.OWN_PROGRAMS:
            return
        hang_s = self.order.hang_s
        news = hang_events.event(self.watch.look(now), nodes=self.order.nodes, ends_after_s=hang_s)
        if news is not None:
            self.link.report("event", news)
        # the beacons of this engine; of another program, points
        quiet_s = (
            now - (self.shipping.last_point or since)
            if self.watch.quiet_s is None
            else self.watch.quiet_s
        )
        hurried = (
            self.watch.in_a_step
            if self.watch.quiet_s is not None
            else self.shipping.last_point is not None
        )
        if quiet_s > (hang_s if hurried else PATIENT_FACTOR * hang_s):
            self._decided = hang_events.verdict(self.watch.standings(), quiet_s)
            if self.watch.stall is None:
                self.link.report(
                    "event",
                    hang_events.hang(self.watch.standings(), quiet_s, nodes=self.order.nodes),
                )
            self._dump_stacks()
            self.stopping.take({"action": "kill"})

    def _dump_stacks(self) -> None:
        """SIGABRT: PYTHONFAULTHANDLER makes every rank write the stacks of its threads and end.

        A stopped rank does neither; the others are waited for, on a busy machine up to DUMP_S.
        """
        asked = []
        for rank in self.ranks:
            folder = self.run_dir.rank(rank)
            if pid := read_json(folder / "process.json").get("pid"):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGABRT)
                    asked += [] if is_stopped(pid) else [folder / "status.json"]
        deadline = time.monotonic() + DUMP_S
        while time.monotonic() < deadline and not all(status.exists() for status in asked):
            time.sleep(0.05)

    def _verdict(self) -> Verdict:
        ends = rank_ends(self.run_dir, self.ranks, self.shipping)
        oom_killed = processes.oom_kills() > self._oom_kills
        code = self.torchrun.returncode if self.torchrun else None
        words = _tail(self.run_dir.path / "torchrun.log")
        verdict = self._decided or judge(
            ends, torchrun_code=code, torchrun_words=words, oom_killed=oom_killed
        )
        # stopped: by whom, and after how much
        if self.order.kind == "serve" and verdict.exit_class == "ok":
            told = next(
                (str(end.told["reason"]) for end in ends if end.told.get("reason")), verdict.reason
            )
            verdict = replace(
                verdict, reason=" ".join(filter(None, (self.stopping.reason, f"Rank 0 {told}.")))
            )
        asked_at = self.stopping.asked_at
        on_request = verdict.exit_class != "ok" and (
            verdict.time is None or asked_at is None or verdict.time >= asked_at
        )
        if self._decided is None and self.stopping.action is not None and on_request:
            verdict = requested(self.stopping, verdict)
        elif verdict.exit_class not in ("ok", "preempted", "cancelled"):
            for end in ends:
                if end.code != 0:
                    own = of_rank(end, oom_killed=oom_killed)
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
        told = verdict.to_dict()
        for message in self.shipping.skipped():
            print(message, flush=True)
        started = time.monotonic()
        settle_s = self.stopping.settle_s if self.stopping.settle_s is not None else SETTLE_S
        settled_by = started + settle_s
        while time.monotonic() < started + REDIS_PATIENCE_S:
            try:
                self.shipping.pump(final=True)
                settled = self.shipping.settled()
            except OSError:
                settled = True  # the disk is what ended this attempt
            if not self.link.flush():
                # Redis is away: telemetry has not had its chance yet
                settled_by = time.monotonic() + settle_s
            elif settled or time.monotonic() > settled_by:
                break
            time.sleep(0.05)
        self.link.report("exited", told)
        while not self.link.flush() and time.monotonic() < started + REDIS_PATIENCE_S:
            time.sleep(0.2)
        with contextlib.suppress(OSError):
            self.shipping.save()
            write_json(self.run_dir.exit, {**told, "reported": self.link.flush()})


def requested(stopping: Stopping, verdict: Verdict) -> Verdict:
    """The verdict on ranks that ended because they were asked to."""
    words = {
        "cancel": ("cancelled", "Cancelled on request."),
        "kill": ("cancelled", "Ended by order of the control plane."),
        "pause": ("preempted", "Paused on request."),
        "preempt": ("preempted", "Asked to make room; left after its last step."),
    }
    exit_class, reason = words[stopping.action or "cancel"]
    return Verdict(
        exit_class,
        stopping.reason or reason,
        step=verdict.step,
        code=verdict.code,
        time=verdict.time,
    )


def rank_ends(run_dir: RunDir, ranks: range, shipping: Shipping) -> list[RankEnd]:
    """What each local rank left; ranks that torchrun never started are left out."""
    found = []
    for rank in ranks:
        folder = run_dir.rank(rank)
        status = read_json(folder / "status.json")
        if not status and not (folder / "process.json").exists():
            continue
        collector = shipping.collectors.get(rank)
        if collector is not None:
            with contextlib.suppress(OSError):
                collector.collect(final=True)
        told = read_json(folder / "exit.json")
        words = list(collector.last_words) if collector else _tail(folder / "stderr.log")
        found.append(
            RankEnd(rank, status.get("code"), float(status.get("time", time.time())), told, words)
        )
    return found


def unwritable(run_dir: RunDir, error: OSError, node: str) -> Verdict:
    """The verdict on a run directory or a rendezvous that failed this node."""
    if isinstance(error, rendezvous.NoRendezvous):
        return Verdict("infrastructure", str(error), time=time.time())
    what = error.strerror or error
    message = (
        f"Run directory {run_dir} on node {node} cannot be used: {what}. Free space or "
        "permissions there."
    )
    return Verdict("infrastructure", message, time=time.time())


def _resolved_spec(order: LaunchOrder) -> dict[str, Any]:
    """The spec with the control plane's plan in it, as the engine reads it."""
    return {**order.spec, "plan": order.plan} if order.plan else order.spec


def _tail(path: Any) -> list[str]:
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.stat(path).st_size - 16384))
            return file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return []
