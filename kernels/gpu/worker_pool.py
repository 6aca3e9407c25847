"""The processes of a run, from outside: jobs given to those that are free, answers as they come,
the dead replaced.

What hangs is ended after its job's time. Knows processes and time; knows no case and no GPU.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from kernels.gpu.worker_process import Answer, Job, serve

START_S = 120.0
NOT_REACHED = "not reached in time"


class NoWorker(RuntimeError):
    """No process can use the device; the text says why."""


class Worker:
    """One process. `job` is what it does now; `ready` False: it is starting."""

    def __init__(self, device: str, source: str, context: str) -> None:
        made: Any = multiprocessing.get_context(context)
        self.line: Connection
        self.line, theirs = made.Pipe()
        self._process = made.Process(target=serve, args=(theirs, device, source), daemon=True)
        self._process.start()
        theirs.close()
        self.ready = False
        self.job: Job | None = None
        self.deadline = time.monotonic() + START_S

    def give(self, job: Job) -> None:
        self.job, self.deadline = job, time.monotonic() + job.limit_s
        with contextlib.suppress(OSError):  # it has ended: heard next
            self.line.send(job)

    def heard(self) -> Answer | str | None:
        """What it said: an answer, or of its start None or why it cannot; Answer(lost=…) where it
        ended.
        """
        try:
            said: Answer | str | None = self.line.recv()
        except (EOFError, ConnectionError):
            self._process.join(10)
            return Answer(lost=f"its process ended, exit code {self._process.exitcode}")
        return said

    def end(self) -> None:
        self._process.kill()
        self._process.join(10)
        self.line.close()


class Workers:
    """Up to as many processes as are asked for, kept from one set of jobs to the next."""

    def __init__(self, device: str, source: str, context: str = "spawn") -> None:
        self._made = device, source, context
        self._all: list[Worker] = []
        self._unable: str | None = None  # why the last one that could not start could not

    def start(self, count: int) -> None:
        """Starts processes until there are `count`; they get ready on their own."""
        while len(self._all) < count:
            self._all.append(Worker(*self._made))

    def keep(self, count: int) -> None:
        """Ends all but the first `count`."""
        for worker in self._all[count:]:
            worker.end()
        del self._all[count:]

    def each(
        self, jobs: Sequence[Job], most: int, left_s: Callable[[], float]
    ) -> Iterator[tuple[Job, Answer]]:
        """Every job with its answer, in the order of answers; up to `most` at a time.

        A job whose process ended or took too long has Answer(lost=…), one that `left_s` left no
        time for
        Answer(lost=NOT_REACHED). Raises NoWorker.
        """
        waiting = deque(jobs)
        while waiting or self._busy():
            if left_s() <= 0:
                yield from self._given_up(waiting)
                return
            self._give(waiting, most)
            soonest = min(w.deadline for w in self._all if w.job or not w.ready)
            pause = max(0.0, min(soonest - time.monotonic(), left_s(), 1.0))
            heard = wait([w.line for w in self._all if w.job or not w.ready], pause)
            for worker in list(self._all):
                if worker.line in heard:
                    yield from self._heard(worker)
                elif (worker.job or not worker.ready) and time.monotonic() > worker.deadline:
                    yield from self._late(worker)

    def one(self, job: Job, left_s: Callable[[], float]) -> Answer:
        """The answer to one job."""
        return next(answer for _, answer in self.each([job], 1, left_s))

    def close(self) -> None:
        self.keep(0)

    def _busy(self) -> bool:
        return any(w.job for w in self._all)

    def _give(self, waiting: deque[Job], most: int) -> None:
        busy = sum(w.job is not None for w in self._all)
        for worker in self._all:
            if waiting and busy < most and worker.ready and worker.job is None:
                worker.give(waiting.popleft())
                busy += 1
        wanted = min(most, busy + len(waiting))
        if self._unable is None or not self._all:
            self.start(wanted)

    def _heard(self, worker: Worker) -> Iterator[tuple[Job, Answer]]:
        said, job = worker.heard(), worker.job
        worker.job = None
        if not worker.ready:
            if said is None:
                worker.ready = True
                return
            self._drop(worker)
            self._unable = said if isinstance(said, str) else str(getattr(said, "lost", said))
            if not self._all:
                raise NoWorker(f"No process can use the device: {self._unable}")
            return
        assert isinstance(said, Answer) and job is not None
        if said.lost or not said.sound:
            self._drop(worker)
        yield job, said

    def _late(self, worker: Worker) -> Iterator[tuple[Job, Answer]]:
        job, ready = worker.job, worker.ready
        self._drop(worker)
        if not ready:
            self._unable = f"a process did not start within {START_S:.0f} s"
            if not self._all:
                raise NoWorker(f"No process can use the device: {self._unable}.")
        elif job is not None:
            yield job, Answer(lost=f"it took longer than {job.limit_s:.0f} s and was ended")

    def _given_up(self, waiting: deque[Job]) -> Iterator[tuple[Job, Answer]]:
        for worker in list(self._all):
            if worker.job is not None:
                waiting.appendleft(worker.job)
                self._drop(worker)
        for job in waiting:
            yield job, Answer(lost=NOT_REACHED)

    def _drop(self, worker: Worker) -> None:
        worker.end()
        self._all.remove(worker)
