"""Reads the files of registered data sets and copies them into the store, by a child process.

The child hashes and uploads (`workers.store.register`); this module records what it says. An
interrupted registration is continued: parts that the store has are not sent again.
"""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import IO, Final

from django.conf import settings
from django.db.models import Q, QuerySet
from pydantic import ValidationError

from orchestrator.common import clock, conditional
from orchestrator.runs.datasets.models import DataSetVersion
from orchestrator.runs.store import access, copies
from workers.contracts.wire.maintenance.data_sets import DataAnswer, DataRequest, data_key
from workers.contracts.wire.maintenance.store import CopyIndex, StoreProblem
from workers.contracts.wire.maintenance.store_work import StoreLogin

RETRY: Final = timedelta(minutes=5)  # after the store refused a copy
_RENEW_S: Final = 20.0
_FIND_S: Final = 60.0
_ROOT: Final = Path(__file__).resolve().parents[3]
_State = DataSetVersion.State


def waiting() -> QuerySet[DataSetVersion]:
    """Versions without fingerprint and, with a store, those whose copy is due."""
    rows = DataSetVersion.objects.filter(deleted=None)
    due = Q(state=_State.WAITING)
    if access.configured():
        now = clock.now()
        due |= Q(state=_State.FINGERPRINTED) & (Q(retry_at=None) | Q(retry_at__lte=now))
    return rows.filter(due).order_by("-state", "pk")  # those without fingerprint first


def register_waiting(*, dry_run: bool, renew: Callable[[], None]) -> dict[str, int]:
    """Read and copy what waits, or count it."""
    counts = {"data_sets": 0, "bytes": 0}
    for row in list(waiting()):
        if not dry_run:
            renew()
            counts["bytes"] += _register(row, renew)
        counts["data_sets"] += 1
    return counts


def find_copy(fingerprint: str) -> CopyIndex | None:
    """What the store has of these files; None if it has nothing, or no store is configured.

    Raises OSError if the store does not answer.
    """
    login = _login()
    if login is None:
        return None
    request = DataRequest(login=login, key=data_key(fingerprint))
    done = subprocess.run(
        _command(),
        input=request.to_json() + "\n",
        capture_output=True,
        text=True,
        cwd=_ROOT,
        env=_variables(),
        timeout=_FIND_S,
        check=False,
    )
    answers = [DataAnswer.model_validate_json(line) for line in done.stdout.splitlines()]
    if not answers or answers[-1].problem is not None:
        problem = answers[-1].problem if answers else None
        raise OSError(problem.message if problem is not None else done.stderr[-300:])
    return answers[-1].index


def remove_copies(*, dry_run: bool, renew: Callable[[], None]) -> dict[str, int]:
    """Delete copies of deleted versions from the store, or count them. Raises the store's errors.

    Equal content has one copy, which stays while another version has it.
    """
    counts = {"data_sets": 0, "bytes": 0}
    for row, freed in list(removable()):
        counts["data_sets"] += 1
        counts["bytes"] += freed
        if dry_run:
            continue
        renew()
        if not _is_shared(row):
            copies.remove_objects(row.key)
            # a version of equal content that was registered meanwhile is copied again
            not_copied(DataSetVersion.objects.filter(key=row.key, deleted=None))
        DataSetVersion.objects.filter(pk=row.pk).update(removed=clock.now())
    return counts


def removable() -> Iterator[tuple[DataSetVersion, int]]:
    """Deleted versions whose copy is still in the store, with the bytes that its removal frees."""
    gone = DataSetVersion.objects.filter(removed=None).exclude(deleted=None).order_by("pk")
    seen = set()
    for row in gone.exclude(key=""):
        yield row, 0 if row.key in seen or _is_shared(row) else row.bytes
        seen.add(row.key)


def confirm_copy(version: int, key: str) -> None:
    """Copy the version again later if its copy was deleted while the version was recorded.

    The child may have found the copy of a deleted version of equal content. Nothing changes if the
    store does not answer: an imported version has no files to copy again.
    """
    if copies.exists(key) is False:
        not_copied(DataSetVersion.objects.filter(pk=version, key=key, deleted=None))


def not_copied(rows: QuerySet[DataSetVersion]) -> None:
    """Record that these versions have no copy, which makes them due."""
    rows.update(state=_State.FINGERPRINTED, key="", retry_at=None)


def _is_shared(row: DataSetVersion) -> bool:
    """Whether a version that is not deleted has the same content."""
    return DataSetVersion.objects.filter(key=row.key, deleted=None).exists()


def _register(row: DataSetVersion, renew: Callable[[], None]) -> int:
    """Record what the child says about one version; returns the bytes that were sent."""
    sent = 0
    known = DataSetVersion.objects.filter(pk=row.pk, deleted=None)
    answered = False
    for answer in _answers(DataRequest(path=row.path, login=_login()), renew):
        answered = True
        if answer.unreadable:
            _refuse(row, answer.unreadable, "Correct it, then register it again.")
            return sent
        if answer.index is not None:
            if row.fingerprint and answer.index.fingerprint != row.fingerprint:
                _refuse(row, "Its files changed before they were copied.", "Register it again.")
                return sent
            _fingerprinted(row, answer.index)
        elif answer.stored is not None:
            sent += answer.sent_bytes
            conditional.update(
                known, state=_State.STORED, key=answer.stored, problem="", hint="", retry_at=None
            )
            confirm_copy(row.pk, answer.stored)
        elif answer.problem is not None:
            _postpone(row, answer.problem)
    if not answered:
        message = "The program that reads data sets ended without an answer."
        _postpone(row, StoreProblem(reason="other", message=message, hint="See the jobs' log."))
    return sent


def _fingerprinted(row: DataSetVersion, index: CopyIndex) -> None:
    files = {name: file.to_dict() for name, file in index.files.items()}
    waiting_row = DataSetVersion.objects.filter(pk=row.pk, state=_State.WAITING)
    conditional.update(
        waiting_row,
        state=_State.FINGERPRINTED,
        files=files,
        fingerprint=index.fingerprint,
        bytes=index.bytes,
        ready=clock.now(),
        problem="",
        hint="",
    )


def _refuse(row: DataSetVersion, message: str, hint: str) -> None:
    DataSetVersion.objects.filter(pk=row.pk).update(
        state=_State.FAILED, problem=message[:400], hint=hint
    )


def _postpone(row: DataSetVersion, problem: StoreProblem) -> None:
    DataSetVersion.objects.filter(pk=row.pk).update(
        problem=problem.message, hint=problem.hint, retry_at=clock.now() + RETRY
    )


def _answers(request: DataRequest, renew: Callable[[], None]) -> Iterator[DataAnswer]:
    """What the child prints; renews the job's lease while it works."""
    with subprocess.Popen(
        _command(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=_ROOT,
        env=_variables(),
        text=True,
    ) as child:
        assert child.stdin is not None and child.stdout is not None
        lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=_read, args=(child.stdout, lines), daemon=True).start()
        child.stdin.write(request.to_json() + "\n")
        child.stdin.close()
        try:
            while (line := _next(lines, renew)) is not None:
                try:
                    yield DataAnswer.model_validate_json(line)
                except ValidationError:  # a library's own output
                    continue
        finally:
            child.kill()


def _next(lines: queue.SimpleQueue[str | None], renew: Callable[[], None]) -> str | None:
    while True:
        try:
            return lines.get(timeout=_RENEW_S)
        except queue.Empty:
            renew()


def _read(stream: IO[str], lines: queue.SimpleQueue[str | None]) -> None:
    for line in stream:
        lines.put(line)
    lines.put(None)


def _login() -> StoreLogin | None:
    where, env = access.access(), settings.ENV
    if where is None:
        return None
    return StoreLogin(access=where, key=env.store_key, secret=env.store_secret)


def _command() -> list[str]:
    return [sys.executable, "-m", "workers.store.register"]


def _variables() -> dict[str, str]:
    """The child's environment: without Orrery's own settings; those of the store's library stay."""
    return {name: text for name, text in os.environ.items() if not name.startswith("ORRERY_")}
