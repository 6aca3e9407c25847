"""What runs stored, for `--artifacts`: the copies in the store, or without a store the run folders
of this machine.

Copies never change, so they fit a database that was read shortly before.
"""

from __future__ import annotations

import os
import shutil
import tarfile
from pathlib import Path, PurePosixPath
from typing import Final

from django.conf import settings

from orchestrator.runs.models import StoredCopy
from orchestrator.runs.store import access

_STORE: Final = "store/"
_RUNS: Final = "runs/"


def add_all(archive: tarfile.TarFile, prefix: str) -> int:
    """Add the objects to the archive; returns how many. Those deleted meanwhile are left out."""
    return _add_store(archive, prefix) if access.configured() else _add_runs(archive, prefix)


def put(archive: tarfile.TarFile, member: tarfile.TarInfo, name: str) -> None:
    """Write one object back. Objects of a store need a configured store; raises ValueError."""
    if ".." in PurePosixPath(name).parts:
        raise ValueError(f"the archive names {name}, outside its folder")
    source = archive.extractfile(member)
    assert source is not None
    if name.startswith(_STORE):
        fs, root = access.open_store()
        path = f"{root}/{name.removeprefix(_STORE)}"
        if fs.exists(path):
            return  # copies never change
        with fs.open(path, "wb") as file:
            shutil.copyfileobj(source, file, 1 << 20)
        return
    target = Path(settings.ENV.home) / name
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".restoring-{target.name}")
    with open(temporary, "wb") as out:
        shutil.copyfileobj(source, out, 1 << 20)
    os.replace(temporary, target)


def _add_store(archive: tarfile.TarFile, prefix: str) -> int:
    fs, root = access.open_store()
    count = 0
    for key in StoredCopy.objects.filter(deleted=None).values_list("key", flat=True):
        for path, facts in sorted(fs.find(f"{root}/{key}", detail=True).items()):
            info = tarfile.TarInfo(f"{prefix}{_STORE}{path.removeprefix(root).lstrip('/')}")
            info.size, info.mode = int(facts["size"]), 0o600
            try:
                with fs.open(path, "rb") as file:
                    archive.addfile(info, file)
            except FileNotFoundError:
                continue
            count += 1
    return count


def _add_runs(archive: tarfile.TarFile, prefix: str) -> int:
    root = Path(settings.ENV.media_runs)
    count = 0
    for folder, names, files in os.walk(root):
        names[:] = sorted(name for name in names if not name.startswith("."))
        for name in sorted(files):
            path = Path(folder) / name
            if name.startswith(".") or path.is_symlink():
                continue
            info = tarfile.TarInfo(f"{prefix}{_RUNS}{path.relative_to(root).as_posix()}")
            try:
                with open(path, "rb") as file:
                    status = os.fstat(file.fileno())
                    info.size, info.mode, info.mtime = status.st_size, 0o600, int(status.st_mtime)
                    archive.addfile(info, file)
            except FileNotFoundError:
                continue
            count += 1
    return count
