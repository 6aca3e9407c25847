"""What makes a checkpoint folder complete: a manifest with what it holds and every file's checksum.

Knows files; does not know tensors, torch or ranks.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from workers.models.errors import WeightsError

NAME = "manifest.json"
VERSION = 1
_DIGITS = 8


def step_folder(step: int) -> str:
    return f"step-{step:0{_DIGITS}d}"


def seal(folder: Path, manifest: dict[str, Any]) -> int:
    """Write the manifest of a finished folder, checksums included; returns the bytes of its files.

    The folder is to have a hidden name still: a manifest torn by a crash is then never taken for
    one.
    """
    files = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != NAME:
            files[str(path.relative_to(folder))] = {
                "bytes": path.stat().st_size,
                "sha256": _digest(path),
            }
    document = {"version": VERSION, **manifest, "files": files}
    with open(folder / NAME, "w", encoding="utf-8") as file:
        file.write(json.dumps(document, indent=1))
        file.flush()
        os.fsync(file.fileno())
    _sync_folder(folder)
    return sum((folder / name).stat().st_size for name in files)


def complete_checkpoints(root: Path) -> list[Path]:
    """Folders with a manifest, newest step first; an unfinished save has a hidden name and no
    manifest.
    """
    return sorted(
        (p for p in root.glob("step-*") if (p / NAME).is_file()), key=lambda p: p.name, reverse=True
    )


class DamagedError(WeightsError):
    """A manifest that was whole once and cannot be read now."""


def read_manifest(folder: Path) -> dict[str, Any]:
    """Raises WeightsError for a folder that is no checkpoint of this version, of a damaged one
    DamagedError.
    """
    try:
        document: dict[str, Any] = json.loads((folder / NAME).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise WeightsError(f"{folder} has no {NAME}; try a folder checkpoints/step-N") from None
    except (OSError, ValueError) as error:
        raise DamagedError(
            f"{folder / NAME} cannot be read: {error}; try an older checkpoint"
        ) from None
    if not isinstance(document, dict):
        raise DamagedError(f"{folder / NAME} holds no JSON object; try an older checkpoint")
    if document.get("version") != VERSION:
        raise WeightsError(
            f"{folder} has version {document.get('version')}, this engine reads {VERSION}"
        )
    return document


def damage(folder: Path, manifest: dict[str, Any]) -> str | None:
    """A sentence naming the first file that is not as it was written, or None."""
    if not isinstance(manifest.get("files"), dict):
        return f"{NAME} lists no files"
    for name, entry in manifest["files"].items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != entry["bytes"]:
            return f"{name} has {path.stat().st_size} bytes, not {entry['bytes']}"
        if _digest(path) != entry["sha256"]:
            return f"{name} does not have the checksum it was written with"
    return None


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
