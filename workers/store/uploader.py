"""`python -m workers.store.uploader`: copies files into the store for one supervisor.

Reads work from standard input and answers on standard output (`contracts.wire.maintenance`).
Ends when its input ends. Runs at the lowest priority, so that training keeps the cores.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from workers.contracts.wire.maintenance.store import CopyStored, StoreProblem, copy_key
from workers.contracts.wire.maintenance.store_work import StoreDone, StoreLogin, StoreWork
from workers.store import copies
from workers.store.access import Store, explain, open_store
from workers.store.links import link_tree

LONGEST_WAIT_S = 300.0
Answer = Callable[[StoreDone], None]
MOST_WAITING = 2  # checkpoints; older ones are dropped while the store is slower than the run


class Uploader:
    """Works through pieces of work: the newest checkpoint first, then artifacts."""

    def __init__(self, store: Store, answer: Answer, *, first_wait_s: float = 5.0) -> None:
        self._store, self._answer, self._first_wait_s = store, answer, first_wait_s
        self._waiting: list[StoreWork] = []
        self._changed = threading.Condition()
        self._ended = False

    def add(self, work: StoreWork) -> None:
        """Queue a piece of work; holds a checkpoint's files at once."""
        if work.hold is not None:
            with contextlib.suppress(OSError):
                hold(Path(work.source), Path(work.hold))
        with self._changed:
            self._waiting.append(work)
            checkpoints = [each for each in self._waiting if each.kind == "checkpoint"]
            for old in checkpoints[:-MOST_WAITING]:
                self._waiting.remove(old)
                self._finish(old, StoreDone(number=old.number, dropped="newer checkpoints wait"))
            self._changed.notify()

    def end(self) -> None:
        """Let `run` return when no work is left."""
        with self._changed:
            self._ended = True
            self._changed.notify()

    def run(self) -> None:
        """Work until the input ended and everything is done."""
        while (work := self._next()) is not None:
            self._copy(work)

    def _next(self) -> StoreWork | None:
        with self._changed:
            while not self._waiting and not self._ended:
                self._changed.wait()
            if not self._waiting:
                return None
            newest = max(self._waiting, key=lambda each: (each.kind == "checkpoint", each.number))
            self._waiting.remove(newest)
            return newest

    def _copy(self, work: StoreWork) -> None:
        wait_s, reported = self._first_wait_s, ""
        while True:
            source = Path(work.hold) if work.hold is not None else Path(work.source)
            try:
                index = copies.describe(source, kind=work.kind, about=work.about)
            except (OSError, ValueError) as error:
                reason = f"{work.source} cannot be read: {error}"
                self._finish(work, StoreDone(number=work.number, dropped=reason[:300]))
                return
            started = time.monotonic()
            key = copy_key(work.run, work.kind, work.name, index.fingerprint)
            try:
                sent = copies.put(self._store, source, key, index)
            except Exception as error:  # libraries of stores raise errors of many kinds
                problem = explain(error, self._store)
                if problem.reason != reported:
                    reported = problem.reason
                    self._report(work, problem, wait_s)
                if self._superseded(work):
                    reason = "a newer checkpoint waits"
                    self._finish(work, StoreDone(number=work.number, dropped=reason))
                    return
                self._sleep(wait_s)
                wait_s = min(LONGEST_WAIT_S, wait_s * 2)
                continue
            done = CopyStored(
                key=key,
                bytes=index.bytes,
                fingerprint=index.fingerprint,
                step=work.about.get("step") if work.kind == "checkpoint" else None,
                name=work.name if work.kind == "artifact" else None,
                seconds=round(time.monotonic() - started, 3),
                sent_bytes=sent,
            )
            self._finish(work, StoreDone(number=work.number, stored=done))
            return

    def _report(self, work: StoreWork, problem: StoreProblem, wait_s: float) -> None:
        waits = problem.model_copy(update={"retry_s": wait_s})
        self._answer(StoreDone(number=work.number, problem=waits))

    def _superseded(self, work: StoreWork) -> bool:
        """Whether a newer checkpoint waits: it is tried next instead of this one."""
        with self._changed:
            return work.kind == "checkpoint" and any(
                each.kind == "checkpoint" and each.number > work.number for each in self._waiting
            )

    def _sleep(self, seconds: float) -> None:
        """Wait, but not while new work arrives."""
        with self._changed:
            self._changed.wait(seconds)

    def _finish(self, work: StoreWork, done: StoreDone) -> None:
        if work.hold is not None:
            shutil.rmtree(work.hold, ignore_errors=True)
        self._answer(done)


def hold(source: Path, target: Path) -> None:
    """Give a checkpoint's files a second name (hard links, else copies); nothing if it exists."""
    if target.is_dir():
        return
    temporary = target.with_name(f"{target.name}.{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    link_tree(source, temporary)
    os.rename(temporary, target)


def main() -> int:
    """Work until the input ends; an end without an empty line ends the work too."""
    with contextlib.suppress(OSError):
        os.nice(19)
    lines: TextIO = sys.stdin
    login = StoreLogin.model_validate_json(lines.readline())
    store = open_store(
        url=login.access.url,
        endpoint=login.access.endpoint,
        region=login.access.region,
        key=login.key,
        secret=login.secret,
    )
    lock = threading.Lock()

    def answer(done: StoreDone) -> None:
        with lock:
            print(done.to_json(), flush=True)

    uploader = Uploader(store, answer, first_wait_s=login.first_wait_s)
    threading.Thread(target=_read, args=(lines, uploader), daemon=True).start()
    uploader.run()
    return 0


def _read(lines: TextIO, uploader: Uploader) -> None:
    for line in lines:
        if not line.strip():
            uploader.end()
        else:
            uploader.add(StoreWork.model_validate_json(line))
    os._exit(0)  # the supervisor has ended


if __name__ == "__main__":
    sys.exit(main())
