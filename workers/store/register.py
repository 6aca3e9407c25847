"""`python -m workers.store.register`: the fingerprint of a data set, and its copy in the store.

Reads a `DataRequest` from standard input and prints a `DataAnswer` per step. Does not decide what
is registered.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

from workers.contracts.wire.maintenance.data_sets import (
    MOST_FILES,
    DataAnswer,
    DataRequest,
    data_key,
)
from workers.contracts.wire.maintenance.store import INDEX, CopyIndex
from workers.contracts.wire.maintenance.store_work import StoreLogin
from workers.store import copies
from workers.store.access import Store, explain, open_store


def main() -> int:
    """0; what failed is in the answers."""
    with contextlib.suppress(OSError):
        os.nice(19)
    request = DataRequest.model_validate_json(sys.stdin.readline())
    if request.key is not None:
        assert request.login is not None
        _find(_opened(request.login), request.key)
        return 0
    path = Path(request.path)
    try:
        index = describe(path)
    except (OSError, ValueError) as error:
        _print(DataAnswer(unreadable=f"{error}"[:400]))
        return 0
    _print(DataAnswer(index=index))
    if request.login is not None:
        _copy(_opened(request.login), path, index)
    return 0


def describe(path: Path) -> CopyIndex:
    """The files of a data set. Raises OSError, ValueError if it cannot be registered."""
    before = _facts(path)
    if not before:
        raise ValueError(f"{path} has no files")
    if len(before) > MOST_FILES:
        raise ValueError(f"{path} has {len(before):,} files; a data set has at most {MOST_FILES:,}")
    if INDEX in before:
        raise ValueError(f"{path} has a file named {INDEX}, which is the index of a copy")
    index = copies.describe(path, kind="data", about={})
    if _facts(path) != before:
        raise ValueError(f"{path} changed while it was read")
    return index


def _facts(path: Path) -> dict[str, tuple[int, int]]:
    """Size and modification time of every file by name."""
    if path.is_file():
        status = path.stat()
        return {path.name: (status.st_size, status.st_mtime_ns)}
    files = [each for each in path.rglob("*") if each.is_file() and not each.is_symlink()]
    return {
        each.relative_to(path).as_posix(): (each.stat().st_size, each.stat().st_mtime_ns)
        for each in files
    }


def _copy(store: Store, path: Path, index: CopyIndex) -> None:
    key = data_key(index.fingerprint)
    try:
        sent = copies.put(store, path, key, index)
    except Exception as error:  # libraries of stores raise errors of many kinds
        _print(DataAnswer(problem=explain(error, store)))
        return
    _print(DataAnswer(stored=key, sent_bytes=sent))


def _find(store: Store, key: str) -> None:
    try:
        index = copies.read_index(store, key)
    except Exception as error:  # libraries of stores raise errors of many kinds
        _print(DataAnswer(problem=explain(error, store)))
        return
    _print(DataAnswer(index=index, stored=key if index is not None else None))


def _opened(login: StoreLogin) -> Store:
    return open_store(
        url=login.access.url,
        endpoint=login.access.endpoint,
        region=login.access.region,
        key=login.key,
        secret=login.secret,
    )


def _print(answer: DataAnswer) -> None:
    print(answer.to_json(), flush=True)


if __name__ == "__main__":
    sys.exit(main())
