"""Ending an attempt on request: first a word to the ranks, then SIGTERM, then SIGKILL to every
process of it.

A request is the newest `request.json` (a ControlOrder); a stronger one replaces a weaker. Does not
judge how it ended.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from typing import Any

from workers.launcher import processes
from workers.launcher.rundir import RunDir, read_json, write_json

RANK_WORDS = {"cancel": "stop", "pause": "pause", "preempt": "preempt"}
# training goes on
WISHES = {"checkpoint": "checkpoint", "profile": "profile", "memory": "memory_snapshot"}
_STRENGTH = {**dict.fromkeys(WISHES, 0), "pause": 1, "preempt": 2, "cancel": 3, "kill": 4}
_TERM_S = 2.0  # between SIGTERM and SIGKILL


class Stopping:
    """`poll()` once a turn.

    `listens`: whether the program reads control.json; another gets SIGTERM at once.
    """

    def __init__(self, run_dir: RunDir, fence: str, node: str, *, listens: bool) -> None:
        self._run_dir, self._fence, self._node, self._listens = run_dir, fence, node, listens
        self._stamp = 0
        self._number = int(read_json(run_dir.control).get("id", 0))
        self._deadline = float("inf")
        self._termed = False
        self._kill_after_s = _TERM_S
        self.action: str | None = None  # cancel, pause, preempt or kill, once asked for
        self.asked_at: float | None = None  # Unix seconds
        self.reason: str | None = None
        # how long the exit report may wait for telemetry, where it is urgent
        self.settle_s: float | None = None

    def poll(self) -> None:
        """Take in a newer request and do what is due by now."""
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
        action = request.get("action")
        if action not in _STRENGTH:
            return
        if action in WISHES:
            self._tell(WISHES[action])
            return
        if self.action is not None and _STRENGTH[action] <= _STRENGTH[self.action]:
            return
        self.action = action
        self.reason = request.get("reason") or self.reason
        self.settle_s = request.get("settle_s", self.settle_s)
        self.asked_at = self.asked_at or time.time()
        grace_s = 0.0 if action == "kill" else float(request.get("grace_s", 30.0))
        now = time.monotonic()
        if action == "kill":
            self._termed, self._deadline = True, now
            return
        self._tell(RANK_WORDS[action], grace_s=grace_s)
        self._deadline = now + (grace_s if self._listens else 0.0)
        self._kill_after_s = _TERM_S if self._listens else max(_TERM_S, grace_s)

    def _tell(self, word: str, **more: float) -> None:
        self._number += 1
        # a full disk is no reason not to stop: SIGTERM comes after the grace
        with contextlib.suppress(OSError):
            write_json(self._run_dir.control, {"action": word, "id": self._number, **more})

    def _escalate(self) -> None:
        if not self._termed:
            self._termed = True
            self._deadline = time.monotonic() + self._kill_after_s
            for process in processes.members(self._fence, node=self._node, root=os.getpid()):
                with contextlib.suppress(Exception):
                    process.send_signal(signal.SIGTERM)
            return
        processes.end_all(self._fence, node=self._node, root=os.getpid())
        self._deadline = time.monotonic() + 1.0
