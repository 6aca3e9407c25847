"""The pool of worker processes: assigns jobs to idle processes, yields answers, replaces failed
processes.

A job that exceeds its time limit is killed. Does not depend on cases or the GPU.
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
    """No process can use the device; the message says why."""


class Worker:
    """One process. `job` is its current job; `ready` False: it is starting."""

    def __init__(self, device: str, source: str, context: str) -> None:
        process_context: Any = multiprocessing.get_context(context)
        self.line: Connection
        self.line, child_end = process_context.Pipe()
        self._process = process_context.Process(
            target=serve, args=(child_end, device, source), daemon=True
        )
        self._process.start()
        child_end.close()
        self.ready = False
        self.job: Job | None = None
        self.deadline = time.monotonic() + START_S

    def assign(self, job: Job) -> None:
        """Sends a job to the process."""
        self.job, self.deadline = job, time.monotonic() + job.limit_s
        with contextlib.suppress(OSError):  # the process has exited: receive() reports it
            self.line.send(job)

    def receive(self) -> Answer | str | None:
        """The process's message: an answer; at its start None, or why it cannot start;
        Answer(lost=…) if it exited.
        """
        try:
            message: Answer | str | None = self.line.recv()
        except (EOFError, ConnectionError):
            self._process.join(10)
            return Answer(lost=f"its process ended, exit code {self._process.exitcode}")
        return message

    def stop(self) -> None:
        """Kills the process."""
        self._process.kill()
        self._process.join(10)
        self.line.close()


class WorkerPool:
    """Up to the requested number of processes, reused for further jobs."""

    def __init__(self, device: str, source: str, context: str = "spawn") -> None:
        self._process_args = device, source, context
        self._workers: list[Worker] = []
        self._start_error: str | None = None  # why the last process that failed to start failed

    def start(self, count: int) -> None:
        """Starts processes until there are `count`; they become ready asynchronously."""
        while len(self._workers) < count:
            self._workers.append(Worker(*self._process_args))

    def stop_extra(self, count: int) -> None:
        """Stops all but the first `count`."""
        for worker in self._workers[count:]:
            worker.stop()
        del self._workers[count:]

    def run_jobs(
        self, jobs: Sequence[Job], max_running: int, left_s: Callable[[], float]
    ) -> Iterator[tuple[Job, Answer]]:
        """Yields every job with its answer, in the order of answers; runs up to `max_running` at a
        time.

        Answer(lost=…) marks a job whose process exited or took too long, Answer(lost=NOT_REACHED)
        one without time left. Raises NoWorker.
        """
        waiting = deque(jobs)
        while waiting or self._busy():
            if left_s() <= 0:
                yield from self._abandon(waiting)
                return
            self._assign(waiting, max_running)
            soonest = min(w.deadline for w in self._workers if w.job or not w.ready)
            pause = max(0.0, min(soonest - time.monotonic(), left_s(), 1.0))
            receive = wait([w.line for w in self._workers if w.job or not w.ready], pause)
            for worker in list(self._workers):
                if worker.line in receive:
                    yield from self._receive(worker)
                elif (worker.job or not worker.ready) and time.monotonic() > worker.deadline:
                    yield from self._time_out(worker)

    def run_job(self, job: Job, left_s: Callable[[], float]) -> Answer:
        """Runs one job and returns its answer."""
        return next(answer for _, answer in self.run_jobs([job], 1, left_s))

    def close(self) -> None:
        """Stops all processes."""
        self.stop_extra(0)

    def _busy(self) -> bool:
        return any(w.job for w in self._workers)

    def _assign(self, waiting: deque[Job], max_running: int) -> None:
        busy = sum(w.job is not None for w in self._workers)
        for worker in self._workers:
            if waiting and busy < max_running and worker.ready and worker.job is None:
                worker.assign(waiting.popleft())
                busy += 1
        target = min(max_running, busy + len(waiting))
        if self._start_error is None or not self._workers:
            self.start(target)

    def _receive(self, worker: Worker) -> Iterator[tuple[Job, Answer]]:
        message, job = worker.receive(), worker.job
        worker.job = None
        if not worker.ready:
            if message is None:
                worker.ready = True
                return
            self._drop(worker)
            self._start_error = (
                message if isinstance(message, str) else str(getattr(message, "lost", message))
            )
            if not self._workers:
                raise NoWorker(f"No process can use the device: {self._start_error}")
            return
        assert isinstance(message, Answer) and job is not None
        if message.lost or not message.sound:
            self._drop(worker)
        yield job, message

    def _time_out(self, worker: Worker) -> Iterator[tuple[Job, Answer]]:
        job, ready = worker.job, worker.ready
        self._drop(worker)
        if not ready:
            self._start_error = f"a process did not start within {START_S:.0f} s"
            if not self._workers:
                raise NoWorker(f"No process can use the device: {self._start_error}.")
        elif job is not None:
            yield job, Answer(lost=f"it took longer than {job.limit_s:.0f} s and was stopped")

    def _abandon(self, waiting: deque[Job]) -> Iterator[tuple[Job, Answer]]:
        for worker in list(self._workers):
            if worker.job is not None:
                waiting.appendleft(worker.job)
                self._drop(worker)
        for job in waiting:
            yield job, Answer(lost=NOT_REACHED)

    def _drop(self, worker: Worker) -> None:
        worker.stop()
        self._workers.remove(worker)
