"""Compares files on this node with those of a registered data set, by size and SHA-256.

The result is remembered with sizes and modification times, so large files are read once.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from workers.contracts.wire.maintenance.store import StoredFile
from workers.launcher.inputs.data_cache import Stopped
from workers.launcher.rundir import read_json, write_json

_CHUNK: Final = 4 << 20
_POLL_S: Final = 0.1


def difference(
    places: Mapping[str, Path],
    files: Mapping[str, StoredFile],
    remembered: Path,
    *,
    keep_waiting: Callable[[], bool],
) -> str:
    """How the files differ from the registered ones; empty if they are equal. Raises Stopped.

    `remembered` is the file that stores the result.
    """
    status: dict[str, list[int]] = {}
    for name, file in files.items():
        place = places[name]
        try:
            facts = place.stat()
        except OSError as error:
            return f"{place}: {error.strerror}"
        if facts.st_size != file.bytes:
            return f"{place} has {facts.st_size:,} bytes, the data set {file.bytes:,}"
        status[name] = [facts.st_size, facts.st_mtime_ns, facts.st_ino]
    if read_json(remembered).get("files") == status:
        return ""
    if reason := _compared(places, files, keep_waiting):
        return reason
    remember(remembered, status)
    return ""


def remember(remembered: Path, status: dict[str, list[int]]) -> None:
    """Store that these files are equal to the registered ones."""
    remembered.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_json(remembered, {"files": status})


def places_of(path: Path, files: Mapping[str, StoredFile], *, folder: bool) -> dict[str, Path]:
    """Where each file of a data set is: below the folder `path`, or `path` itself."""
    return {name: path / name if folder else path for name in files}


def unregistered(path: Path, files: Mapping[str, StoredFile]) -> str:
    """The first file of a folder that the data set does not have; empty if it has all."""
    for each in path.rglob("*"):
        name = each.relative_to(path).as_posix()
        if name not in files and each.is_file() and not each.is_symlink():
            return name
    return ""


def _compared(
    places: Mapping[str, Path],
    files: Mapping[str, StoredFile],
    keep_waiting: Callable[[], bool],
) -> str:
    """Read all files in a thread, while the caller's requests are polled."""
    stop = threading.Event()
    with ThreadPoolExecutor(1, thread_name_prefix="compare") as reader:
        result = reader.submit(_read, places, files, stop)
        while not result.done():
            if not keep_waiting():
                stop.set()
                raise Stopped
            time.sleep(_POLL_S)
        return result.result()


def _read(
    places: Mapping[str, Path], files: Mapping[str, StoredFile], stop: threading.Event
) -> str:
    for name, file in files.items():
        digest: Any = hashlib.sha256()
        try:
            with open(places[name], "rb") as source:
                while (chunk := source.read(_CHUNK)) and not stop.is_set():
                    digest.update(chunk)
        except OSError as error:
            return f"{places[name]}: {error.strerror}"
        if digest.hexdigest() != file.sha256:
            return f"{places[name]} differs from the data set"
    return ""
