"""The attempts of this node: start a supervisor, pass on requests, find them again after a restart,
end what is left.

Supervisors are detached; the run directories tell everything. Does not know Celery or heartbeats.
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
from workers.launcher.recovery import recover, reported, supervisor_alive
from workers.launcher.rundir import RunDir, read_json, run_dirs, write_json
from workers.launcher.shipping.redis_link import Link
from workers.launcher.supervisor import unwritable

log = logging.getLogger(__name__)
_START_S = 20.0  # how long a supervisor may take to name itself


class Attempts:
    def __init__(self, home: Path, node: str, node_file: Path) -> None:
        self.home, self._node, self._node_file = home, node, node_file
        self._active: dict[str, RunDir] = {}  # by fence
        self._claimed: dict[str, float] = {}
        # fences that were to be ended before their launch order came
        self._ended_before: set[str] = set()
        self._recovering: set[str] = set()
        self._lock = threading.RLock()
        self._starting: list[subprocess.Popen[bytes]] = []

    def attach(self) -> int:
        """Takes up every attempt of this node whose end is not reported yet; returns how many live."""
        for run_dir in run_dirs(self.home):
            if read_json(run_dir.agent).get("node") == self._node and not reported(run_dir):
                fence = str(read_json(run_dir.order).get("fence", ""))
                self._active[fence] = run_dir
        self.watch()
        return len(self._active) - len(self._recovering)

    def launch(self, order: LaunchOrder) -> str:
        """Starts the order's supervisor, or does nothing where it was started before; returns what
        was done.
        """
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
            if order.fence in self._ended_before:
                return "ended before it came"
            try:
                if not run_dir.claim(order.to_dict()):
                    log.info("Attempt %s was launched before; nothing to do", order.attempt_id)
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
        """Passes the request to the attempt's supervisor, or ends what a dead one left."""
        with self._lock:
            run_dir = self._active.get(order.fence)
            if run_dir is None and order.action in ("cancel", "kill", "preempt", "pause"):
                self._ended_before.add(order.fence)
                processes.end_all(order.fence, node=self._node)
                return "unknown"
        if run_dir is None:
            return "unknown"
        try:
            write_json(run_dir.request, order.to_dict())
        except OSError as error:  # a full disk: the supervisor's own SIGTERM path needs no file
            log.error(
                "Request %s for attempt %s cannot be written: %s",
                order.action,
                order.attempt_id,
                error,
            )
            processes.end_all(order.fence, node=self._node)
        return "passed on"

    def watch(self) -> None:
        """Finds supervisors that have gone and finishes their work, each in a thread of its own."""
        self._starting = [child for child in self._starting if child.poll() is None]
        for fence, run_dir in list(self._active.items()):
            if fence in self._recovering or supervisor_alive(run_dir):
                continue
            if reported(run_dir):
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

    def seen(self) -> list[AttemptSeen]:
        """Attempts whose supervisor lives, or is starting, or whose end is being reported."""
        found = []
        for fence, run_dir in list(self._active.items()):
            state = read_json(run_dir.supervisor).get("state", "launching")
            found.append(AttemptSeen(fence=fence, state=AttemptState(state)))
        return found

    def ranks(self) -> dict[int, list[int]]:
        """Processes of living ranks by device index."""
        found: dict[int, list[int]] = {}
        for run_dir in list(self._active.values()):
            order = read_json(run_dir.order)
            for local, device in enumerate(order.get("local_devices", [])):
                folder = run_dir.rank(order.get("rank_offset", 0) + local)
                pid = read_json(folder / "process.json").get("pid")
                if pid and not (folder / "status.json").exists():
                    found.setdefault(device, []).append(pid)
        return found

    def stop_all(self, *, grace_s: float, patience_s: float) -> None:
        """Asks every supervisor to preempt its ranks, waits, then ends what is left."""
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
                processes.end_all(fence, node=self._node)
        deadline = time.monotonic() + patience_s
        while active and time.monotonic() < deadline:
            active = {
                fence: run_dir for fence, run_dir in active.items() if supervisor_alive(run_dir)
            }
            time.sleep(0.05)
        for fence in active:
            processes.end_all(fence, node=self._node, patience_s=1.0)

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
            log.warning("The supervisor of %s is gone; ending its processes and reporting", run_dir)
            recover(run_dir, self._node_file)
        except Exception:
            log.exception(
                "Attempt in %s could not be recovered; tried again at the next start", run_dir
            )
        finally:
            with self._lock:
                self._active.pop(fence, None)
                self._recovering.discard(fence)

    def _report_failed(self, run_dir: RunDir, order: LaunchOrder, error: OSError) -> None:
        log.error("Attempt %s cannot be started: %s", order.attempt_id, error)
        link = Link(self._node_file, order)
        link.report("exited", unwritable(run_dir, error, self._node).to_dict())
        deadline = time.monotonic() + 10
        while not link.flush() and time.monotonic() < deadline:
            time.sleep(0.1)
