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

from workers.contracts.wire.node_messages import (
    AttemptSeen,
    AttemptState,
    ControlOrder,
    LaunchOrder,
)
from workers.launcher import command, processes
from workers.launcher.recovery import is_reported, recover, supervisor_alive
from workers.launcher.rundir import RunDir, read_json, run_dirs, write_json
from workers.launcher.shipping.redis_link import Link
from workers.launcher.supervisor import unwritable_verdict

log = logging.getLogger(__name__)
_START_S = 20.0  # how long a supervisor may take to write supervisor.json


class Attempts:
    """The attempts of this node by fence."""

    def __init__(self, home: Path, node: str, node_file: Path) -> None:
        self.home, self._node, self._node_file = home, node, node_file
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
                if not run_dir.claim(order.to_dict()):
                    log.info("Attempt %s was already launched", order.attempt_id)
                    return "launched before"
                write_json(run_dir.agent, {"node": self._node, "node_file": str(self._node_file)})
                self._claimed[order.fence] = time.monotonic()
                self._active[order.fence] = run_dir
                self._spawn(run_dir, order.fence)
            except OSError as error:
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
            if fence in self._recovering or supervisor_alive(run_dir):
                continue
            if is_reported(run_dir):
                self._active.pop(fence, None)
            elif (
                run_dir.supervisor.exists()
                or time.monotonic() - self._claimed.get(fence, -_START_S) > _START_S
            ):
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
            state = read_json(run_dir.supervisor).get("state", "launching")
            attempts.append(AttemptSeen(fence=fence, state=AttemptState(state)))
        return attempts

    def rank_pids(self) -> dict[int, list[int]]:
        """Processes of living ranks by device index."""
        pids: dict[int, list[int]] = {}
        for run_dir in list(self._active.values()):
            order = read_json(run_dir.order)
            for local, device in enumerate(order.get("local_devices", [])):
                folder = run_dir.rank(order.get("rank_offset", 0) + local)
                pid = read_json(folder / "process.json").get("pid")
                if pid and not (folder / "status.json").exists():
                    pids.setdefault(device, []).append(pid)
        return pids

    def stop_all(self, *, grace_s: float, patience_s: float) -> None:
        """Request preemption of every attempt, wait, then kill what is left."""
        active = dict(self._active)
        for fence, run_dir in active.items():
            order = {"attempt_id": str(read_json(run_dir.order).get("attempt_id")), "fence": fence}
            try:
                write_json(
                    run_dir.request,
                    {
                        **order,
                        "action": "preempt",
                        "grace_s": grace_s,
                        "reason": "This node is stopping.",
                        "settle_s": 1.0,
                    },
                )
            except OSError:
                processes.kill_all(fence, node=self._node)
        deadline = time.monotonic() + patience_s
        while active and time.monotonic() < deadline:
            active = {
                fence: run_dir for fence, run_dir in active.items() if supervisor_alive(run_dir)
            }
            time.sleep(0.05)
        for fence in active:
            processes.kill_all(fence, node=self._node, patience_s=1.0)

    def _spawn(self, run_dir: RunDir, fence: str) -> None:
        path = os.pathsep.join(
            part for part in (str(command.ROOT), os.environ.get("PYTHONPATH", "")) if part
        )
        with open(run_dir.path / "supervisor.log", "ab") as output:
            child = subprocess.Popen(
                [sys.executable, "-m", "workers.launcher", "--dir", str(run_dir.path)],
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
            recover(run_dir, self._node_file)
        except Exception:
            log.exception(
                "Attempt in %s could not be recovered; retrying at the next start", run_dir
            )
        finally:
            with self._lock:
                self._active.pop(fence, None)
                self._recovering.discard(fence)

    def _report_failed(self, run_dir: RunDir, order: LaunchOrder, error: OSError) -> None:
        log.error("Attempt %s cannot be started: %s", order.attempt_id, error)
        link = Link(self._node_file, order)
        link.report("exited", unwritable_verdict(run_dir, error, self._node).to_dict())
        deadline = time.monotonic() + 10
        while not link.flush() and time.monotonic() < deadline:
            time.sleep(0.1)
