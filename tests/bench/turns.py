"""Contenders of one benchmark, a process each, that take turns: while one trains its steps the
others wait.

A slow minute of the machine then hits all alike. Knows processes and seconds; does not know what is
trained.
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
    """The contender's side.

    `stepped` at each step's end; at the end of a turn it waits for the next one.
    """

    def __init__(self, descriptor: int) -> None:
        self._pipe = Connection(descriptor)
        self._wall_s: list[float] = []
        self._wanted = 0

    def begin(self) -> None:
        """All is built: wait for the first turn."""
        self._pipe.send("ready")
        self._await()

    def stepped(self) -> None:
        now = time.perf_counter()
        self._wall_s.append(now - self._since)
        self._since = now
        if len(self._wall_s) == self._wanted:
            self._pipe.send({"wall_s": self._wall_s, "cpu_s": time.process_time() - self._cpu_s})
            self._await()

    def end(self, **told: Any) -> None:
        """After the last step: what the contender says of itself."""
        self._pipe.send(told)

    def _await(self) -> None:
        self._wanted, self._wall_s = self._pipe.recv(), []
        self._cpu_s, self._since = time.process_time(), time.perf_counter()


@dataclass
class Contender:
    """The other end: `module` is run with a descriptor, the job's file and an output folder as its
    arguments.

    One that is `helped` has one argument more, and torch's huge pages.
    """

    name: str
    module: str
    turns: list[float] = field(default_factory=list)  # seconds of a step, a mean for each turn
    cpu: list[float] = field(default_factory=list)  # CPU seconds of a step, all threads, likewise
    steps: list[float] = field(default_factory=list)  # seconds of every step
    told: dict[str, Any] = field(default_factory=dict)

    def start(self, job: Path, folder: Path, *, threads: int, helped: bool) -> None:
        self._pipe, theirs = Pipe()
        command = [
            sys.executable,
            "-m",
            f"tests.bench.{self.module}",
            str(theirs.fileno()),
            str(job),
            str(folder),
        ]
        environ = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        if helped:
            command.append("helped")
            environ["THP_MEM_ALLOC_ENABLE"] = "1"
        folder.mkdir(parents=True)
        with open(folder / "words", "wb") as words:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=environ,
                pass_fds=[theirs.fileno()],
                stdout=words,
                stderr=words,
            )
        theirs.close()
        self._words = folder / "words"
        self._heard()

    def turn(self, steps: int, *, counts: bool) -> None:
        self._pipe.send(steps)
        found = self._heard()
        if counts:
            self.steps += found["wall_s"]
            self.turns.append(sum(found["wall_s"]) / steps)
            self.cpu.append(found["cpu_s"] / steps)

    def end(self) -> None:
        self._pipe.send(0)
        self.told = self._heard()
        self.process.wait(60)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def _heard(self) -> Any:
        try:
            return self._pipe.recv()
        except EOFError:
            raise SystemExit(
                f"{self.name} ended early:\n{self._words.read_text()[-3000:]}"
            ) from None


def interleaved(contenders: list[Contender], *, rounds: int, steps: int, warmup: int) -> None:
    """A first turn of `warmup` steps that does not count, then `rounds` of `steps` each; every
    other round backward.
    """
    for each in contenders:
        each.turn(warmup, counts=False)
    for number in range(rounds):
        for each in contenders if number % 2 == 0 else reversed(contenders):
            each.turn(steps, counts=True)
    for each in contenders:
        each.end()
