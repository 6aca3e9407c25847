"""Holds the ranks of a run between two steps while a test runs.

A rank reads `control.json` before every step. The gate replaces it by a pipe, which is read to its
end: the rank waits until the test has opened and closed the pipe. A request of Orrery replaces the
pipe by a file, and works as usual.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from tests.flows.embedded import Orrery
from workers.contracts.wire.progress import read_progress

T = TypeVar("T")
# pauses between two looks at the gate: short between steps, longer while no rank comes for a second
LEAST_S, MOST_S, GROWTH = 0.002, 0.02, 1.02


class Gate:
    """Before the steps of a run's first attempts, none of which has begun."""

    def __init__(self, orrery: Orrery, run: str, *, attempts: int = 1, place: str = "") -> None:
        """`place`: the folder of the node with rank 0, where nodes of a run share theirs."""
        self._orrery = orrery
        self._folders = [orrery.folder(run, number) / place for number in range(1, attempts + 1)]
        # a rank that waits at an open pipe continues when it is closed
        self._met: dict[Path, int] = {}
        self._lock = threading.Lock()
        self._free, self._closed = threading.Event(), threading.Event()
        for folder in self._folders:
            folder.mkdir(parents=True)
            os.mkfifo(folder / "gate")
            # two names, since a request takes one of them
            os.link(folder / "gate", folder / "control.json")
        self._thread = threading.Thread(target=self._attend, name="gate", daemon=True)
        self._thread.start()

    def until(self, condition: Callable[[], T | None], what: str, seconds: float = 240) -> T:
        """Lets the ranks go step by step until the condition holds; after that they wait before the
        next one.
        """
        deadline = time.monotonic() + seconds
        pause_s = LEAST_S
        while True:
            # first: ranks that wait cannot make the condition true later
            waiting = self._meet(self._folders)
            if value := condition():
                return value
            if time.monotonic() > deadline:
                raise AssertionError(f"{what}: not within {seconds} s\n{self._orrery.last_lines()}")
            self._let_go(self._folders)
            if waiting:
                pause_s = LEAST_S
            else:
                time.sleep(pause_s)
                pause_s = min(MOST_S, GROWTH * pause_s)

    def to(self, step: int, attempt: int = 1) -> int:
        """The last step of the attempt that is finished, when no other one will be."""
        rank = self._folders[attempt - 1] / "rank-0"

        def reached() -> int | None:
            progress = read_progress(rank, now_ns=time.monotonic_ns())
            return progress.step if progress is not None and progress.step >= step else None

        return self.until(reached, f"step {step} of attempt {attempt}")

    def open(self) -> None:
        """From now on they go as they like."""
        self._free.set()

    def close(self) -> None:
        """Release all ranks, in whatever state the test has ended."""
        for folder in self._folders:
            if _is_shut(folder):
                (folder / "control.json").unlink()
        self.open()
        time.sleep(0.05)  # who has just begun to wait is let go
        self._closed.set()
        self._thread.join()

    def _attend(self) -> None:
        """Lets go who may go without the test: everybody, or those whom a request waits for."""
        pause_s = LEAST_S
        while not self._closed.is_set():
            free = self._free.is_set()
            folders = (
                self._folders if free else [each for each in self._folders if not _is_shut(each)]
            )
            passed = self._meet(folders)
            self._let_go(folders)
            if passed or not free:
                pause_s = LEAST_S
            if not passed:
                self._closed.wait(pause_s if free else 0.05)
                pause_s = min(MOST_S, GROWTH * pause_s)

    def _meet(self, folders: list[Path]) -> bool:
        """Whether anybody waits."""
        with self._lock:
            for folder in folders:
                if folder not in self._met:
                    with contextlib.suppress(OSError):  # no rank waits
                        self._met[folder] = os.open(folder / "gate", os.O_WRONLY | os.O_NONBLOCK)
            return any(folder in self._met for folder in folders)

    def _let_go(self, folders: list[Path]) -> None:
        with self._lock:
            for folder in folders:
                if folder in self._met:
                    os.close(self._met.pop(folder))


def _is_shut(folder: Path) -> bool:
    return (folder / "control.json").is_fifo()


@contextlib.contextmanager
def drained(orrery: Orrery) -> Iterator[None]:
    """Meanwhile no attempt starts."""
    assert orrery.client is not None
    nodes = [
        node["id"]
        for node in orrery.until(lambda: orrery.get("nodes")["items"], 120, "a node joined")
    ]
    for node in nodes:
        assert orrery.client.post(f"nodes/{node}/drain").is_success
    try:
        yield
    finally:
        for node in nodes:
            assert orrery.client.post(f"nodes/{node}/undrain").is_success


@contextlib.contextmanager
def submitted(
    orrery: Orrery, spec: dict[str, Any], *, attempts: int = 1, place: str = "", name: str = "flow"
) -> Iterator[tuple[str, Gate]]:
    """A run and the gate that its first attempts come to; later ones go as they like."""
    with drained(orrery):
        run = orrery.submit(spec, name)
        gate = Gate(orrery, run, attempts=attempts, place=place)
    try:
        yield run, gate
    finally:
        gate.close()
