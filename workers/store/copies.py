"""Writes a file or folder as a copy, and reads a copy back: complete or absent, on both sides.

Files come first and the index last. An interrupted copy is continued: files and parts that the
store has are not sent again.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import stat
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from workers.contracts.wire.maintenance.store import (
    INDEX,
    INDEX_VERSION,
    CopyIndex,
    StoredFile,
    fingerprint,
)
from workers.store import multipart
from workers.store.access import Store

_CHUNK = 4 << 20
MANIFEST = "manifest.json"  # of a checkpoint, with the checksum of every file
Kind = Literal["checkpoint", "artifact", "data"]


class Damaged(RuntimeError):
    """A copy that is incomplete, of another version, or differs from its index."""


def describe(source: Path, *, kind: Kind, about: Mapping[str, Any]) -> CopyIndex:
    """The index of a file or folder. Takes the checksums of a checkpoint from its manifest.

    Raises OSError if a file is missing, ValueError for a folder without files.
    """
    if source.is_file():
        paths = {source.name: source}
    else:
        paths = {
            path.relative_to(source).as_posix(): path
            for path in sorted(source.rglob("*"))
            if path.is_file() and not path.is_symlink()
        }
    if not paths:
        raise ValueError(f"{source} has no files")
    known = _manifest_digests(source) if kind == "checkpoint" else {}
    files = {}
    for name, path in paths.items():
        size = path.stat().st_size
        entry = known.get(name)
        digest = entry[1] if entry is not None and entry[0] == size else file_digest(path)
        files[name] = StoredFile(bytes=size, sha256=digest)
    return CopyIndex(
        kind=kind,
        fingerprint=fingerprint(files),
        bytes=sum(file.bytes for file in files.values()),
        files=files,
        about=dict(about),
    )


def put(store: Store, source: Path, key: str, index: CopyIndex) -> int:
    """Write the copy under its key; returns the bytes that were sent. Raises the store's errors.

    The key must be new for other content: `copy_key` has the fingerprint in it.
    """
    if store.scheme == "file" and not os.path.isdir(store.root):
        raise FileNotFoundError(errno.ENOENT, "no such folder", store.root)  # not mounted
    if read_index(store, key) == index:
        return 0
    if store.scheme == "file":
        _create_shared_folders(Path(store.root), Path(store.path(key)).parent)
    names = sorted(index.files, key=lambda name: (name == MANIFEST, name))
    sent = 0
    for _ in range(2):  # garbage collection may delete files that were there at first
        existing = _sizes(store, key)
        for name in names:
            if existing.get(name) == index.files[name].bytes:
                continue
            local = source if source.is_file() else source / name
            sent += _put_file(store, local, f"{store.path(key)}/{name}")
    _write(store, f"{store.path(key)}/{INDEX}", index.to_json().encode())
    return sent


def read_index(store: Store, key: str) -> CopyIndex | None:
    """The index of a complete copy, or None. Raises Damaged for one of another version."""
    try:
        data = store.fs.cat_file(f"{store.path(key)}/{INDEX}")
    except FileNotFoundError:
        return None
    try:
        document = json.loads(data)
        if document.get("version") != INDEX_VERSION:
            raise Damaged(
                f"The copy {key} has version {document.get('version')}, this release reads "
                f"{INDEX_VERSION}."
            )
        return CopyIndex.from_dict(document)
    except (ValueError, AttributeError) as error:
        raise Damaged(f"The index of the copy {key} cannot be read: {error}") from None


def get(
    store: Store, key: str, target: Path, *, keep_going: Callable[[], bool] = lambda: True
) -> CopyIndex:
    """Read a copy into the folder `target`, which appears when every checksum is right.

    Raises Damaged, InterruptedError if `keep_going` returns False, and errors of store and disk.
    """
    index = read_index(store, key)
    if index is None:
        raise Damaged(f"The store has no complete copy {key}.")
    temporary = target.with_name(f".fetching-{target.name}")
    temporary.mkdir(parents=True, exist_ok=True)
    for name, entry in index.files.items():
        if not keep_going():
            raise InterruptedError
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise Damaged(f"The copy {key} names a file outside its folder: {name}")
        local = temporary / name
        if (  # of an interrupted download
            local.is_file()
            and local.stat().st_size == entry.bytes
            and file_digest(local) == entry.sha256
        ):
            continue
        local.parent.mkdir(parents=True, exist_ok=True)
        store.fs.get_file(f"{store.path(key)}/{name}", str(local))
        if local.stat().st_size != entry.bytes or file_digest(local) != entry.sha256:
            local.unlink()
            raise Damaged(f"{name} of the copy {key} does not have the checksum of its index.")
    shutil.rmtree(target, ignore_errors=True)
    temporary.rename(target)
    return index


def file_digest(path: Path) -> str:
    """The SHA-256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _manifest_digests(source: Path) -> dict[str, tuple[int, str]]:
    try:
        files = json.loads((source / MANIFEST).read_text(encoding="utf-8"))["files"]
        return {name: (int(entry["bytes"]), str(entry["sha256"])) for name, entry in files.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _sizes(store: Store, key: str) -> dict[str, int]:
    """Sizes of the copy's complete objects by name."""
    try:
        objects = store.fs.find(store.path(key), detail=True)
    except FileNotFoundError:
        return {}
    prefix = store.path(key).rstrip("/") + "/"
    return {
        path[len(prefix) :]: int(facts["size"])
        for path, facts in objects.items()
        if path.startswith(prefix)
    }


def _create_shared_folders(root: Path, folder: Path) -> None:
    """Create the folders above a copy, with the rights of `root` if all users may write to it.

    Otherwise the first user's folders would refuse the copies of the next one. The sticky bit keeps
    each user's copies from the others.
    """
    mode = root.stat().st_mode & 0o7777
    for parent in [*reversed(folder.parents), folder]:
        if not parent.is_relative_to(root) or parent == root or parent.is_dir():
            continue
        parent.mkdir(exist_ok=True)
        if mode & stat.S_IWOTH:
            parent.chmod(mode | stat.S_ISVTX)


def _put_file(store: Store, local: Path, remote: str) -> int:
    if store.scheme == "s3":
        return multipart.upload(store, local, remote)
    target = Path(remote)
    temporary = target.with_name(f".{target.name}.part")
    target.parent.mkdir(parents=True, exist_ok=True)
    sent = _append_rest(local, temporary)
    os.replace(temporary, target)
    return sent


def _append_rest(local: Path, temporary: Path) -> int:
    """Copy what `temporary` lacks; equal chunks were written by an interrupted copy."""
    temporary.touch()
    with open(local, "rb") as source, open(temporary, "r+b") as target:
        while (chunk := source.read(_CHUNK)) and target.read(len(chunk)) == chunk:
            pass
        start = source.tell() - len(chunk)
        source.seek(start)
        target.seek(start)
        target.truncate()
        shutil.copyfileobj(source, target, _CHUNK)
        target.flush()
        os.fsync(target.fileno())
        return target.tell() - start


def _write(store: Store, remote: str, data: bytes) -> None:
    if store.scheme == "s3":
        store.fs.pipe_file(remote, data)
        return
    target = Path(remote)
    temporary = target.with_name(f".{target.name}.part")
    with open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, target)
