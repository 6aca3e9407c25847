"""Runs child processes: start, restart with back-off, stop in order, leave no orphans."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

LOG_BYTES = 10_000_000
PR_SET_PDEATHSIG = 1


@dataclass
class Child:
    """One child process. A lower `stop_order` stops first; `stop_timeout_s`: time until SIGKILL."""

    name: str
    command: list[str]
    environ: Mapping[str, str]
    stop_order: int
    stop_timeout_s: float = 3.0
    on_orphan: int = signal.SIGTERM  # sent by the kernel if the manager is killed
    process: subprocess.Popen[bytes] | None = None
    fails: int = 0
    started: float = 0.0
    not_before: float = 0.0


@dataclass
class ProcessManager:
    """The children of this process; their pids are in `home/up.json`."""

    home: Path
    log: Callable[[str], None]
    children: list[Child] = field(default_factory=list)

    def start(self, child: Child) -> None:
        """Start the child and watch it."""
        self.children.append(child)
        self._spawn(child)

    def watch(self) -> None:
        """Check every child once; restart dead ones, with back-off if they die early."""
        now = time.monotonic()
        for child in self.children:
            if child.process is not None and child.process.poll() is not None:
                lived_s = now - child.started
                child.fails = 0 if lived_s > 30 else child.fails + 1
                child.not_before = now + min(10.0, 0.25 * 2**child.fails)
                self.log(
                    f"{child.name} ended ({_describe_exit(child.process.returncode)}) and is "
                    "restarted; "
                    f"see {self.log_path(child.name)}"
                )
                child.process = None
            if child.process is None and now >= child.not_before:
                self._spawn(child)

    def stop(self, total_s: float = 9.0) -> None:
        """Stop all children in order: SIGTERM, then SIGKILL after their timeout or `total_s`."""
        deadline = time.monotonic() + total_s
        for stop_order in sorted({child.stop_order for child in self.children}):
            group = [
                c for c in self.children if c.stop_order == stop_order and c.process is not None
            ]
            for child in group:
                _signal(child, signal.SIGTERM)
            for child in group:
                assert child.process is not None
                limit = min(deadline, time.monotonic() + child.stop_timeout_s)
                try:
                    child.process.wait(max(0.05, limit - time.monotonic()))
                except subprocess.TimeoutExpired:
                    _signal(child, signal.SIGKILL)
                    child.process.wait()
        self.children.clear()
        self._save_state()

    def stop_leftovers(self) -> None:
        """Stop the children of a manager that was killed, as listed in `home/up.json`."""
        try:
            listed = json.loads(self._state_file.read_text())
        except (OSError, ValueError):
            return
        left = []
        for entry in listed:
            try:
                process = psutil.Process(entry["pid"])
                if abs(process.create_time() - entry["created"]) < 1.0:
                    process.send_signal(entry["signal"])
                    left.append(process)
            except (psutil.Error, KeyError):
                continue
        _, alive = psutil.wait_procs(left, timeout=5)
        for process in alive:
            process.kill()
        psutil.wait_procs(alive, timeout=2)
        if left:
            self.log(f"stopped {len(left)} processes of an earlier start")

    def log_path(self, name: str) -> Path:
        """The child's log file."""
        return self.home / "logs" / f"{name}.log"

    @property
    def _state_file(self) -> Path:
        return self.home / "up.json"

    def _spawn(self, child: Child) -> None:
        path = self.log_path(child.name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.parent.chmod(0o700)
        if path.exists() and path.stat().st_size > LOG_BYTES:
            path.replace(path.with_suffix(".log.1"))
        with open(path, "ab") as log:
            child.process = subprocess.Popen(
                child.command,
                env=dict(child.environ),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # a Ctrl-C in the terminal reaches only the manager
                preexec_fn=_die_with_parent(child.on_orphan),
            )
        child.started = time.monotonic()
        self._save_state()

    def _save_state(self) -> None:
        entries = []
        for child in self.children:
            if child.process is None:
                continue
            try:
                created = psutil.Process(child.process.pid).create_time()
            except psutil.Error:
                continue
            entries.append(
                {
                    "name": child.name,
                    "pid": child.process.pid,
                    "created": created,
                    "signal": int(child.on_orphan),
                }
            )
        temporary = self._state_file.with_suffix(".tmp")
        temporary.write_text(json.dumps(entries))
        temporary.replace(self._state_file)


def _die_with_parent(number: int) -> Callable[[], None] | None:
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None, use_errno=True)
    parent = os.getpid()

    def prepare() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # may be inherited as ignored
        libc.prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)
        if os.getppid() != parent:  # the parent ended in between
            os.kill(os.getpid(), number)

    return prepare


def _signal(child: Child, number: int) -> None:
    assert child.process is not None
    if child.process.poll() is None:
        child.process.send_signal(number)


def _describe_exit(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
