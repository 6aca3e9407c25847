"""Stops an attempt on request: first a request to the ranks, then SIGTERM, then SIGKILL.

A request is the newest `request.json` (a ControlOrder); a stronger one replaces a weaker one. Does
not judge how the attempt exits.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from typing import Any

from workers.launcher import processes
from workers.launcher.rundir import RunDir, read_json, write_json

RANK_ACTIONS = {"cancel": "stop", "pause": "pause", "preempt": "preempt"}
# requests that do not stop the attempt
RANK_REQUESTS = {"checkpoint": "checkpoint", "profile": "profile", "memory": "memory_snapshot"}
_STRENGTH = {**dict.fromkeys(RANK_REQUESTS, 0), "pause": 1, "preempt": 2, "cancel": 3, "kill": 4}
_TERM_S = 2.0  # between SIGTERM and SIGKILL


class StopSequence:
    """Call `poll()` regularly.

    `reads_control`: whether the program reads control.json; otherwise it gets SIGTERM at once.
    """

    def __init__(self, run_dir: RunDir, fence: str, node: str, *, reads_control: bool) -> None:
        self._run_dir, self._fence, self._node = run_dir, fence, node
        self._reads_control = reads_control
        self._stamp = 0
        self._number = int(read_json(run_dir.control).get("id", 0))
        self._deadline = float("inf")
        self._sent_sigterm = False
        self._kill_after_s = _TERM_S
        self.action: str | None = None  # cancel, pause, preempt or kill, once requested
        self.requested_at: float | None = None  # Unix seconds
        self.reason: str | None = None
        # how long the exit report may wait for telemetry, if it is urgent
        self.settle_s: float | None = None

    def poll(self) -> None:
        """Read a newer request and escalate if the deadline passed."""
        try:
            stamp = os.stat(self._run_dir.request).st_mtime_ns
        except OSError:
            stamp = 0
        if stamp != self._stamp:
            self._stamp = stamp
            self.take(read_json(self._run_dir.request))
        if time.monotonic() >= self._deadline:
            self._escalate()

    def take(self, request: dict[str, Any]) -> None:
        """Act on a request if it is stronger than the current one."""
        action = request.get("action")
        if action not in _STRENGTH:
            return
        if action in RANK_REQUESTS:
            self._write_control(RANK_REQUESTS[action])
            return
        if self.action is not None and _STRENGTH[action] <= _STRENGTH[self.action]:
            return
        self.action = action
        self.reason = request.get("reason") or self.reason
        self.settle_s = request.get("settle_s", self.settle_s)
        self.requested_at = self.requested_at or time.time()
        grace_s = 0.0 if action == "kill" else float(request.get("grace_s", 30.0))
        now = time.monotonic()
        if action == "kill":
            self._sent_sigterm, self._deadline = True, now
            return
        self._write_control(RANK_ACTIONS[action], grace_s=grace_s)
        self._deadline = now + (grace_s if self._reads_control else 0.0)
        self._kill_after_s = _TERM_S if self._reads_control else max(_TERM_S, grace_s)

    def _write_control(self, action: str, **more: float) -> None:
        self._number += 1
        # with a full disk the attempt still stops: SIGTERM follows after the grace period
        with contextlib.suppress(OSError):
            write_json(self._run_dir.control, {"action": action, "id": self._number, **more})

    def _escalate(self) -> None:
        if not self._sent_sigterm:
            self._sent_sigterm = True
            self._deadline = time.monotonic() + self._kill_after_s
            for process in processes.members(self._fence, node=self._node, root=os.getpid()):
                with contextlib.suppress(Exception):
                    process.send_signal(signal.SIGTERM)
            return
        processes.kill_all(self._fence, node=self._node, root=os.getpid())
        self._deadline = time.monotonic() + 1.0
