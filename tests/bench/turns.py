"""Runs the contenders of one benchmark in turn, one process each: only one trains at a time.

A slow minute of the machine then affects all of them alike. Does not depend on what they train.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


class Turns:
    """The contender's side of the pipe.

    The contender calls `stepped` after each step; at the end of a turn it waits for the next one.
    """

    def __init__(self, descriptor: int) -> None:
        self._pipe = Connection(descriptor)
        self._wall_s: list[float] = []
        self._wanted = 0

    def begin(self) -> None:
        """Reports that setup is done and waits for the first turn."""
        self._pipe.send("ready")
        self._await()

    def stepped(self) -> None:
        """Records the end of a step and, after the last step of a turn, reports its times."""
        now = time.perf_counter()
        self._wall_s.append(now - self._since)
        self._since = now
        if len(self._wall_s) == self._wanted:
            self._pipe.send({"wall_s": self._wall_s, "cpu_s": time.process_time() - self._cpu_s})
            self._await()

    def end(self, **summary: Any) -> None:
        """Reports the contender's own summary after its last step."""
        self._pipe.send(summary)

    def _await(self) -> None:
        self._wanted, self._wall_s = self._pipe.recv(), []
        self._cpu_s, self._since = time.process_time(), time.perf_counter()


@dataclass
class Contender:
    """The benchmark's side: runs `module` with a pipe descriptor, a job file and an output folder.

    `python` runs it. If it is `helped`, it gets one more argument and torch's huge pages.
    """

    name: str
    module: str
    python: str = sys.executable
    arguments: tuple[str, ...] = ()  # more arguments of the module
    turns: list[float] = field(default_factory=list)  # seconds per step, one mean per turn
    cpu: list[float] = field(
        default_factory=list
    )  # CPU seconds per step, all threads, one mean per turn
    steps: list[float] = field(default_factory=list)  # seconds of each step
    summary: dict[str, Any] = field(default_factory=dict)

    def start(self, job: Path, folder: Path, *, threads: int, helped: bool) -> None:
        """Starts the process and waits until its setup is done."""
        self._pipe, remote = Pipe()
        command = [
            self.python,
            "-m",
            f"tests.bench.{self.module}",
            str(remote.fileno()),
            str(job),
            str(folder),
            *self.arguments,
        ]
        environ = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        if helped:
            command.append("helped")
            environ["THP_MEM_ALLOC_ENABLE"] = "1"
        folder.mkdir(parents=True)
        self._log = folder / "log"
        with open(self._log, "wb") as log:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environ,
                pass_fds=[remote.fileno()],
                stdout=log,
                stderr=log,
            )
        remote.close()
        self._receive()

    def turn(self, steps: int, *, counts: bool) -> None:
        """Lets the contender train `steps` steps; records their times if the turn counts."""
        self._pipe.send(steps)
        times = self._receive()
        if counts:
            self.steps += times["wall_s"]
            self.turns.append(sum(times["wall_s"]) / steps)
            self.cpu.append(times["cpu_s"] / steps)

    def end(self) -> None:
        """Receives the contender's summary and waits until it exits."""
        self._pipe.send(0)
        self.summary = self._receive()
        self.process.wait(60)

    def kill(self) -> None:
        """Kills the process."""
        self.process.kill()
        self.process.wait()

    def _receive(self) -> Any:
        try:
            return self._pipe.recv()
        except EOFError:
            raise SystemExit(
                f"{self.name} exited early:\n{self._log.read_text()[-3000:]}"
            ) from None


def run_in_turns(contenders: list[Contender], *, rounds: int, steps: int, warmup: int) -> None:
    """Runs an uncounted turn of `warmup` steps, then `rounds` turns of `steps` steps each.

    Every second round runs the contenders in reverse order.
    """
    for contender in contenders if warmup else ():
        contender.turn(warmup, counts=False)
    for number in range(rounds):
        for contender in contenders if number % 2 == 0 else reversed(contenders):
            contender.turn(steps, counts=True)
    for contender in contenders:
        contender.end()
