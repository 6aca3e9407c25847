"""Stores the captured code of a run, and reads it for launch orders, pages, REST and bundles.

A file's content is stored once per fingerprint of a program. Does not read folders.
"""

from __future__ import annotations

from typing import Any

from orchestrator.common import clock
from orchestrator.runs.code.capture import Captured
from orchestrator.runs.models import ProgramSnapshot, Run, RunCode
from workers.contracts.wire.programs.program_files import ProgramFiles, ProgramOrder


def store(run: Run, code: Captured | None) -> None:
    """Store the code of a new run; within the transaction of its submit."""
    if code is None:
        return
    snapshot, new = ProgramSnapshot.objects.get_or_create(
        fingerprint=code.files.fingerprint,
        defaults={
            "packed": code.files.packed(),
            "files": len(code.files.files),
            "bytes": code.files.size,
        },
    )
    if not new:
        _use(snapshot.pk)
        emptied = ProgramSnapshot.objects.filter(pk=snapshot.pk, packed=b"")
        emptied.update(packed=code.files.packed())
    RunCode.objects.create(
        run=run,
        snapshot=snapshot,
        folder=code.folder,
        start=code.start,
        originals=code.originals,
        git=code.git,
        commit=code.commit,
        branch=code.branch,
        remote=code.remote,
        submodules=code.submodules,
        diff=code.diff,
        notes=code.notes,
    )


def reserve(run: Run) -> None:
    """Protect the run's stored files from retention until the transaction commits.

    Afterwards the run needs them, if it was queued.
    """
    key = RunCode.objects.filter(run=run).values_list("snapshot", flat=True).first()
    if key is not None:
        _use(key)


def _use(key: int) -> None:
    """Lock the program's row; retention that waits for it then sees that it is not old."""
    ProgramSnapshot.objects.filter(pk=key).update(created=clock.now())


def code_of(run: Run) -> RunCode | None:
    """The stored code; None for other kinds, and for runs of earlier releases."""
    if run.kind != "script":
        return None
    return RunCode.objects.select_related("snapshot").filter(run=run).first()


def unusable(run: Run) -> str:
    """Why the run cannot start again: its stored files were deleted; empty if it can."""
    code = code_of(run)
    if code is None or code.snapshot.packed:
        return ""
    return f"The stored code of run {run.pk} was deleted (ORRERY_RETAIN_PROGRAMS_DAYS)."


def program_order(run: Run) -> dict[str, Any] | None:
    """The program of a launch order (`ProgramOrder`); None if the run has no stored code."""
    code = code_of(run)
    if code is None:
        return None
    return {
        "packed": ProgramOrder.text_of(bytes(code.snapshot.packed)),
        "fingerprint": code.snapshot.fingerprint,
        "folder": code.folder,
        "start": code.start,
        "originals": code.originals,
        "commit": code.commit,
    }


def files_of(code: RunCode) -> ProgramFiles:
    """The files of the stored code; none if they were deleted."""
    if not code.snapshot.packed:
        return ProgramFiles(files={})
    return ProgramFiles.unpacked(bytes(code.snapshot.packed))


def diff_text(code: RunCode) -> str:
    """The diff; bytes that are not UTF-8 are replaced."""
    return bytes(code.diff).decode(errors="replace")


def document(code: RunCode) -> dict[str, Any]:
    """The code of a run for REST: origin, files with sizes, and the diff."""
    return {
        "fingerprint": code.snapshot.fingerprint,
        "git": code.git,
        "commit": code.commit or None,
        "branch": code.branch or None,
        "remote": code.remote or None,
        "submodules": code.submodules,
        "folder": code.folder,
        "start": code.start,
        "files": [
            {"name": name, "bytes": len(file.data), "link": file.link}
            for name, file in sorted(files_of(code).files.items())
        ],
        "originals": code.originals,
        "notes": code.notes,
        "diff": diff_text(code),
    }
