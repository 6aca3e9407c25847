"""The attempts of this node: starts supervisors, forwards requests, re-attaches, cleans up.

Supervisors are detached; all state is in the run directories. Does not depend on Celery or
heartbeats.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path, PurePosixPath
from typing import Any

from workers.contracts.wire import versions
from workers.contracts.wire.node_messages import (
    AttemptSeen,
    AttemptState,
    ControlOrder,
    KeepOrder,
    LaunchOrder,
)
from workers.launcher import command, processes
from workers.launcher.checkpoint_pin import pin_checkpoint
from workers.launcher.exits.classification import Verdict
from workers.launcher.exits.own_verdicts import unwritable_verdict
from workers.launcher.isolation.acting import acting_as, as_owner, prepare_folders
from workers.launcher.isolation.run_user import NoRunUser, RunAs, RunUser, run_gid
from workers.launcher.recovery import is_reported, recover, supervisor_alive
from workers.launcher.rundir import (
    SHIPPING,
    RunDir,
    open_to_append,
    read_json,
    run_dirs,
    write_json,
)
from workers.launcher.shipping.redis_link import Link

log = logging.getLogger(__name__)
_START_S = 20.0  # how long a supervisor may take to write supervisor.json


class Attempts:
    """The attempts of this node by fence."""

    def __init__(self, home: Path, node: str, node_file: Path, run_as: RunAs | None = None) -> None:
        self.home, self._node, self._node_file = home, node, node_file
        self._run_as = run_as
        self._active: dict[str, RunDir] = {}  # by fence
        self._claimed: dict[str, float] = {}
        # fences that were cancelled before their launch order arrived
        self._cancelled_early: set[str] = set()
        self._recovering: set[str] = set()
        self._lock = threading.RLock()
        self._starting: list[subprocess.Popen[bytes]] = []

    def attach(self) -> int:
        """Re-attach to every attempt whose exit is not reported yet; returns how many are alive."""
        for run_dir in run_dirs(self.home):
            with as_owner(run_dir.path):
                if read_json(run_dir.agent).get("node") == self._node and not is_reported(run_dir):
                    fence = str(read_json(run_dir.order).get("fence", ""))
                    self._active[fence] = run_dir
        self.watch()
        return len(self._active) - len(self._recovering)

    def launch(self, order: LaunchOrder) -> str:
        """Start the order's supervisor unless it was started before; returns what was done."""
        path = PurePosixPath(order.run_dir)
        if path.is_absolute() or ".." in path.parts or path.parts[:1] != ("runs",):
            log.error(
                "Order for attempt %s refused: its directory %s is not under runs/",
                order.attempt_id,
                path,
            )
            return "refused"
        run_dir = RunDir(self.home / path)
        with self._lock:
            if order.fence in self._cancelled_early:
                return "cancelled before it arrived"
            try:
                user = self._user(order)
                prepare_folders(self.home, order.run, user)
                with as_owner(run_dir.path):
                    if not run_dir.claim(order.to_dict()):
                        log.info("Attempt %s was already launched", order.attempt_id)
                        return "launched before"
                    facts = {"node": self._node, "node_file": str(self._node_file)}
                    write_json(run_dir.agent, facts)
                self._claimed[order.fence] = time.monotonic()
                self._active[order.fence] = run_dir
                self._spawn(run_dir, order.fence, user)
            except (OSError, NoRunUser) as error:
                self._active.pop(order.fence, None)
                self._report_failed(run_dir, order, error)
                return "failed"
        return "launched"

    def control(self, order: ControlOrder) -> str:
        """Forward the request to the attempt's supervisor, or kill what a dead one left."""
        with self._lock:
            run_dir = self._active.get(order.fence)
            if run_dir is None and order.action in ("cancel", "kill", "preempt", "pause"):
                self._cancelled_early.add(order.fence)
                processes.kill_all(order.fence, node=self._node)
                return "unknown"
        if run_dir is None:
            return "unknown"
        try:
            with as_owner(run_dir.path):
                write_json(run_dir.request, order.to_dict())
        except OSError as error:  # a full disk: killing needs no file
            log.error(
                "Request %s for attempt %s cannot be written: %s",
                order.action,
                order.attempt_id,
                error,
            )
            processes.kill_all(order.fence, node=self._node)
        return "passed on"

    def watch(self) -> None:
        """Detect dead supervisors and finish their work, each in its own thread."""
        self._starting = [child for child in self._starting if child.poll() is None]
        for fence, run_dir in list(self._active.items()):
            with as_owner(run_dir.path):
                if fence in self._recovering or supervisor_alive(run_dir):
                    continue
                reported, started = is_reported(run_dir), run_dir.supervisor.exists()
            if reported:
                self._active.pop(fence, None)
            elif started or time.monotonic() - self._claimed.get(fence, -_START_S) > _START_S:
                self._recovering.add(fence)
                threading.Thread(
                    target=self._recover,
                    args=(fence, run_dir),
                    name=f"recover-{fence}",
                    daemon=True,
                ).start()

    def active(self) -> list[AttemptSeen]:
        """Attempts whose supervisor is alive or starting, or whose exit is being reported."""
        attempts = []
        for fence, run_dir in list(self._active.items()):
            with as_owner(run_dir.path):
                seen = read_json(run_dir.supervisor)
            state = seen.get("state", "launching")
            if state == SHIPPING:  # its exit is reported; only telemetry remains to be sent
                continue
            attempts.append(_seen(fence, seen, state))
        return attempts

    def rank_pids(self) -> dict[int, list[int]]:
        """Processes of living ranks by device index."""
        pids: dict[int, list[int]] = {}
        for run_dir in list(self._active.values()):
            with as_owner(run_dir.path):
                order = read_json(run_dir.order)
                for local, device in enumerate(order.get("local_devices", [])):
                    folder = run_dir.rank(order.get("rank_offset", 0) + local)
                    pid = read_json(folder / "process.json").get("pid")
                    if isinstance(pid, int) and not (folder / "status.json").exists():
                        pids.setdefault(device, []).append(pid)
        return pids

    def stop_all(self, *, grace_s: float, patience_s: float) -> None:
        """Request preemption of every attempt, wait, then kill what is left."""
        active = dict(self._active)
        for fence, run_dir in active.items():
            request = {
                "fence": fence,
                "action": "preempt",
                "grace_s": grace_s,
                "reason": "This node is stopping.",
                "settle_s": 1.0,
            }
            try:
                with as_owner(run_dir.path):
                    request["attempt_id"] = str(read_json(run_dir.order).get("attempt_id"))
                    write_json(run_dir.request, request)
            except OSError:
                processes.kill_all(fence, node=self._node)
        deadline = time.monotonic() + patience_s
        while active and time.monotonic() < deadline:
            for fence, run_dir in list(active.items()):
                with as_owner(run_dir.path):
                    if not supervisor_alive(run_dir):
                        del active[fence]
            time.sleep(0.05)
        for fence in active:
            processes.kill_all(fence, node=self._node, patience_s=1.0)

    def _user(self, order: LaunchOrder) -> RunUser | None:
        """Under which user the run executes; None for the agent's own."""
        if self._run_as is None:
            return None
        owner = order.owner.to_dict() if order.owner is not None else None
        return self._run_as.user(owner, order.run, tuple(order.reads))

    def pin(self, order: KeepOrder) -> bool:
        """Pin a checkpoint for another run; False if it is not on this node."""
        source, target = PurePosixPath(order.source), PurePosixPath(order.target)
        if self._run_as is not None and target.parts[:1] == ("runs",) and len(target.parts) > 2:
            owner = order.owner.to_dict() if order.owner is not None else None
            user = self._run_as.user(owner, target.parts[1], ())
            prepare_folders(self.home, target.parts[1], user)
            # the control plane checked that the fork's owner may see the source's run
            with acting_as(user.uid, run_gid(source.parts[1])):
                return pin_checkpoint(self.home, order.source, order.target)
        return pin_checkpoint(self.home, order.source, order.target)

    def _spawn(self, run_dir: RunDir, fence: str, user: RunUser | None) -> None:
        path = os.pathsep.join(
            part for part in (str(command.ROOT), os.environ.get("PYTHONPATH", "")) if part
        )
        arguments = [sys.executable, "-m", "workers.launcher", "--dir", str(run_dir.path)]
        arguments += ["--node-file", str(self._node_file)]
        arguments += ["--run-as", user.to_argument()] if user is not None else []
        with as_owner(run_dir.path):
            output = open_to_append(run_dir.path / "supervisor.log")
        with output:
            child = subprocess.Popen(
                arguments,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env={
                    **os.environ,
                    "PYTHONPATH": path,
                    "ORRERY_FENCE": fence,
                    "ORRERY_NODE": self._node,
                },
            )
        self._starting.append(child)

    def _recover(self, fence: str, run_dir: RunDir) -> None:
        try:
            log.warning("The supervisor of %s died; killing its processes and reporting", run_dir)
            with as_owner(run_dir.path):
                recover(run_dir, self._node_file)
        except Exception:
            log.exception(
                "Attempt in %s could not be recovered; retrying at the next start", run_dir
            )
        finally:
            with self._lock:
                self._active.pop(fence, None)
                self._recovering.discard(fence)

    def _report_failed(
        self, run_dir: RunDir, order: LaunchOrder, error: OSError | NoRunUser
    ) -> None:
        log.error("Attempt %s cannot be started: %s", order.attempt_id, error)
        link = Link(self._node_file, order)
        if isinstance(error, NoRunUser):
            verdict = Verdict("infrastructure", f"{error} (node {self._node})", time=time.time())
        else:
            verdict = unwritable_verdict(run_dir, error, self._node)
        link.report("exited", verdict.to_dict())
        deadline = time.monotonic() + 10
        while not link.flush() and time.monotonic() < deadline:
            time.sleep(0.1)


def _seen(fence: str, supervisor: dict[str, Any], state: str) -> AttemptSeen:
    """What a heartbeat says about an attempt; its supervisor may be of another release."""
    known = state in AttemptState.__members__.values()
    # one that has not started yet will be of this release; 0.1 names none
    stated = supervisor or {"release": versions.RELEASE, "wire": str(versions.WIRE)}
    return AttemptSeen(
        fence=fence,
        state=AttemptState(state) if known else AttemptState.RUNNING,
        release=str(stated["release"])[:40] if "release" in stated else None,
        wire=str(stated["wire"])[:40] if "wire" in stated else None,
    )
