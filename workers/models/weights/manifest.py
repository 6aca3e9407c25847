"""Manifests of checkpoint folders: the content and every file's checksum.

Does not depend on tensors, torch or ranks.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from workers.models.errors import WeightsError

NAME = "manifest.json"
VERSION = 1
_DIGITS = 8
_THREADS = 16  # hashing releases the interpreter's lock


def step_folder(step: int) -> str:
    """The name of a step's checkpoint folder."""
    return f"step-{step:0{_DIGITS}d}"


def write_manifest(
    folder: Path, manifest: dict[str, Any], *, digests: Mapping[str, str] | None = None
) -> int:
    """Write the manifest of a finished folder, checksums included; returns the bytes of its files.

    `digests`: SHA-256 of files that are already hashed, by relative path.
    The folder must still have a hidden name, so that a manifest torn by a crash is never used.
    """
    known = digests or {}
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != NAME]
    files = {}
    for path in paths:
        name = str(path.relative_to(folder))
        files[name] = {
            "bytes": path.stat().st_size,
            "sha256": known.get(name) or file_digest(path),
        }
    document = {"version": VERSION, **manifest, "files": files}
    with open(folder / NAME, "w", encoding="utf-8") as file:
        file.write(json.dumps(document, indent=1))
        file.flush()
        os.fsync(file.fileno())
    _sync_folder(folder)
    return sum((folder / name).stat().st_size for name in files)


def complete_checkpoints(root: Path) -> list[Path]:
    """Folders with a manifest, newest step first; an unfinished save has a hidden name."""
    return sorted(
        (p for p in root.glob("step-*") if (p / NAME).is_file()), key=lambda p: p.name, reverse=True
    )


class DamagedError(WeightsError):
    """A manifest that exists and cannot be read."""


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest. Raises WeightsError if missing or of another version, or DamagedError."""
    try:
        document: dict[str, Any] = json.loads((folder / NAME).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise WeightsError(f"{folder} has no {NAME}. Use a folder checkpoints/step-N.") from None
    except (OSError, ValueError) as error:
        raise DamagedError(
            f"{folder / NAME} cannot be read: {error}. Use an older checkpoint."
        ) from None
    if not isinstance(document, dict):
        raise DamagedError(f"{folder / NAME} is not a JSON object. Use an older checkpoint.")
    if document.get("version") != VERSION:
        raise WeightsError(
            f"{folder} has version {document.get('version')}, this engine reads {VERSION}"
        )
    return document


def find_damage(folder: Path, manifest: dict[str, Any]) -> str | None:
    """A message about the first file that differs from what was written, or None."""
    if not isinstance(manifest.get("files"), dict):
        return f"{NAME} lists no files"
    for name, entry in manifest["files"].items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != entry["bytes"]:
            return f"{name} has {path.stat().st_size} bytes, not {entry['bytes']}"
    names = list(manifest["files"])
    with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as threads:
        digests = list(threads.map(lambda name: file_digest(folder / name), names))
    for name, digest in zip(names, digests, strict=True):
        if digest != manifest["files"][name]["sha256"]:
            return f"{name} does not have the checksum it was written with"
    return None


def file_digest(path: Path) -> str:
    """The SHA-256 of a file's bytes, in hexadecimal digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
