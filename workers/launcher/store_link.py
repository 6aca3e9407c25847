"""A supervisor's side of the store: hands checkpoints and artifacts to a copying process, and
fetches a checkpoint that this node lacks.

Work that is not done is kept in `store.json`, so a new supervisor or the agent continues it. The
training never waits for the store. Does not depend on a storage library.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

from pydantic import ValidationError

from workers.contracts.wire import encrypted_text
from workers.contracts.wire.maintenance.store import StoreProblem
from workers.contracts.wire.maintenance.store_work import StoreDone, StoreLogin, StoreWork
from workers.contracts.wire.node_messages import LaunchOrder
from workers.launcher import command, processes
from workers.launcher.rundir import RunDir, read_json, write_json
from workers.launcher.shipping.redis_link import Link

PENDING = "store.json"
_RESTART_S = 5.0
_FETCH_WAITS_S = (5.0, 15.0, 30.0, 60.0)


class StoreLink:
    """Copies of one attempt on this node; idle if the order names no store."""

    def __init__(self, run_dir: RunDir, order: LaunchOrder, link: Link) -> None:
        self._run_dir, self._order, self._link = run_dir, order, link
        self._file = run_dir.path / PENDING
        # nodes without a shared directory hold parts of a checkpoint, which are useless alone
        whole = order.nodes == 1 or (order.shared_dir is not None and order.node_rank == 0)
        self.active = order.store is not None and whole
        pending = read_json(self._file).get("pending") or [] if self.active else []
        self._pending = {work.number: work for work in map(StoreWork.from_dict, pending)}
        self._number = max(self._pending, default=0)
        self._child: subprocess.Popen[str] | None = None
        self._answers: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._restart_at = 0.0
        self._troubled = False

    @property
    def pending(self) -> int:
        """Pieces of work that are not done."""
        return len(self._pending)

    def checkpoint(self, data: Mapping[str, Any]) -> None:
        """Copy a complete checkpoint, from the data of its event."""
        if not self.active:
            return
        source = self._home / str(data["path"])
        about = {key: data.get(key) or 0 for key in ("step", "tokens")}
        about |= {"run": self._order.run, "attempt": self._order.attempt}
        hold = source.with_name(f".store-{self._order.attempt}-{source.name}")
        self._add("checkpoint", source, source.name, about, hold=str(hold))

    def artifact(self, data: Mapping[str, Any]) -> None:
        """Copy an artifact, from the data of its report."""
        if self.active:
            name = f"attempt-{self._order.attempt}-{data['name']}"[:200]
            self._add("artifact", self._home / str(data["path"]), name.replace("/", "-"), {})

    def poll(self) -> None:
        """Report what was copied, and start the copying process if there is work."""
        while True:
            try:
                line = self._answers.get_nowait()
            except queue.Empty:
                break
            if line is None:  # it was released, or killed with the attempt's processes
                self._forget()
            else:
                self._take(line)
        if not self._pending:
            self._release()
        if self._pending and self._child is None and time.monotonic() >= self._restart_at:
            self._start()

    def settle(self, seconds: float, *, flush: Callable[[], bool]) -> bool:
        """Wait until all work is done; False after `seconds`."""
        self._restart_at = 0.0
        deadline = time.monotonic() + seconds
        while self._pending and time.monotonic() < deadline:
            self.poll()
            flush()
            time.sleep(0.05)
        self.close()
        return not self._pending

    def close(self) -> None:
        """End the copying process."""
        if self._child is not None and self._child.stdin is not None:
            try:
                self._child.stdin.close()
                self._child.wait(5)
            except (OSError, subprocess.TimeoutExpired):
                self._child.kill()
                self._child.wait()
            self._child = None

    def fetch(
        self,
        key: str,
        target: Path,
        *,
        keep_waiting: Callable[[], bool],
        complete: Callable[[Path], bool],
        hint: str,
    ) -> str | None:
        """Read the copy into `target`; returns why that failed, None if it did not.

        `hint` says what to do if the copy is damaged.
        """
        problem: StoreProblem | None = None
        for wait_s in (*_FETCH_WAITS_S, 0.0):
            target.parent.mkdir(parents=True, exist_ok=True)
            child = self._popen("workers.store.fetch", key, str(target), hint)
            assert child.stdin is not None and child.stdout is not None
            child.stdin.write(self._login() + "\n")
            child.stdin.close()
            while child.poll() is None:
                if not keep_waiting():
                    child.kill()
                time.sleep(0.05)
            output = child.stdout.read()
            child.stdout.close()
            if complete(target):  # its exit code may be lost
                return None
            if not keep_waiting():
                return "the run was stopped meanwhile"
            problem = _problem(output)
            if problem.reason != "unreachable" or not wait_s:
                break
            self._report_problem(problem.model_copy(update={"retry_s": wait_s}))
            until = time.monotonic() + wait_s
            while time.monotonic() < until and keep_waiting():
                time.sleep(0.1)
        assert problem is not None
        return f"{problem.message} {problem.hint}"

    def _forget(self) -> None:
        """Collect a process that ended; one that failed is started again after a pause."""
        if self._child is None:
            return
        released = self._child.stdin is None or self._child.stdin.closed
        self._child.wait()
        self._child = None
        self._restart_at = 0.0 if released else time.monotonic() + _RESTART_S

    def _release(self) -> None:
        """Let an idle copying process end: it has 100 MB, and the next one starts in a second."""
        if self._child is not None and self._child.stdin is not None:
            with contextlib.suppress(OSError):
                self._child.stdin.close()

    @property
    def _home(self) -> Path:
        return command.node_home(self._run_dir, self._order)

    def _add(
        self, kind: Any, source: Path, name: str, about: dict[str, Any], hold: str | None = None
    ) -> None:
        self._number += 1
        work = StoreWork(
            number=self._number,
            kind=kind,
            source=str(source),
            run=self._order.run,
            name=name,
            hold=hold,
            about=about,
        )
        self._pending[work.number] = work
        self._save()
        self._send(work)
        self.poll()

    def _save(self) -> None:
        try:
            write_json(self._file, {"pending": [work.to_dict() for work in self._pending.values()]})
        except OSError as error:  # a full disk: the work continues while this process lives
            print(f"{self._file} was not written: {error}", flush=True)

    def _start(self) -> None:
        child = self._popen("workers.store.uploader")
        self._child = child
        threading.Thread(
            target=_read, args=(child.stdout, self._answers), name="store", daemon=True
        ).start()
        self._write(self._login())
        for work in list(self._pending.values()):
            self._send(work)

    def _popen(self, module: str, *arguments: str) -> subprocess.Popen[str]:
        env = {name: text for name, text in os.environ.items() if not name.startswith("ORRERY_")}
        env["PYTHONPATH"] = os.pathsep.join(
            part for part in (str(command.ROOT), env.get("PYTHONPATH", "")) if part
        )
        return subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=env,
            text=True,
            preexec_fn=processes.die_with_parent,
        )

    def _login(self) -> str:
        access = self._order.store
        assert access is not None
        first = float(os.environ.get("ORRERY_STORE_RETRY_S") or 5.0)
        if not access.credentials:
            return StoreLogin(access=access, first_wait_s=first).to_json()
        text = encrypted_text.decrypt(
            self._link.node.secret, access.credentials, purpose=self._order.store_purpose
        )
        login = json.loads(text)
        open_access = access.model_copy(update={"credentials": ""})
        return StoreLogin(
            access=open_access, key=login["key"], secret=login["secret"], first_wait_s=first
        ).to_json()

    def _send(self, work: StoreWork) -> None:
        if self._child is not None:
            self._write(work.to_json())

    def _write(self, line: str) -> None:
        assert self._child is not None and self._child.stdin is not None
        # one that ended or was released: the next one gets the work
        with contextlib.suppress(OSError, ValueError):
            self._child.stdin.write(line + "\n")
            self._child.stdin.flush()

    def _take(self, line: str) -> None:
        try:
            done = StoreDone.model_validate_json(line)
        except ValidationError:
            print(f"The copying process wrote: {line.rstrip()}", flush=True)
            return
        if done.problem is not None:
            self._report_problem(done.problem)
            return
        work = self._pending.pop(done.number, None)
        if work is None:
            return
        self._save()
        if done.stored is not None:
            self._troubled = False
            data = done.stored.to_dict()
            self._link.report("event", {"type": f"{work.kind}_stored", "data": data})
        elif done.dropped:
            data = {"name": work.name, "reason": done.dropped}
            self._link.report("event", {"type": "copy_dropped", "data": data})

    def _report_problem(self, problem: StoreProblem) -> None:
        self._link.report("event", {"type": "store_problem", "data": problem.to_dict()})


def _problem(output: str) -> StoreProblem:
    try:
        return StoreProblem.model_validate_json(output.strip().splitlines()[-1])
    except (ValidationError, IndexError):
        message = "The program that reads from the store ended without an answer."
        hint = "See supervisor.log in the run directory."
        return StoreProblem(reason="other", message=message, hint=hint)


def _read(stream: IO[str] | None, answers: queue.SimpleQueue[str | None]) -> None:
    assert stream is not None
    with stream:
        for line in stream:
            answers.put(line)
    answers.put(None)
