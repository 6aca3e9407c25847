"""Locations of weights on this machine: a path, an installed package, or a fetched model.

Does not open weights or depend on torch.
"""

from __future__ import annotations

import json
import os
from importlib import metadata
from pathlib import Path

from workers.contracts.specs.model import ModelSource
from workers.models.errors import WeightsError
from workers.models.weights.manifest import NAME as MANIFEST
from workers.models.weights.manifest import complete_checkpoints

ORIGIN = "origin.json"  # next to fetched weights: their source


def models_home() -> Path:
    """`$ORRERY_HOME/models` (default `./var/models`), the target of `workers.models.fetch`."""
    return Path(os.environ.get("ORRERY_HOME") or "var") / "models"


def locate_weights(source: ModelSource) -> Path:
    """The file or folder of weights; a relative path may be a fetched model's."""
    if source.package is not None:
        return _in_package(source.package)
    assert source.path is not None
    path = Path(source.path).expanduser()
    fetched = models_home() / path
    return resolve_weights_path(
        path if path.exists() or path.is_absolute() or not fetched.exists() else fetched
    )


def resolve_weights_path(path: Path) -> Path:
    """`path`; for a folder its newest checkpoint or its only .gguf file. Raises WeightsError."""
    if not path.is_dir() or (path / MANIFEST).is_file() or (path / "config.json").is_file():
        return path
    checkpoints = complete_checkpoints(path) or complete_checkpoints(path / "checkpoints")
    if checkpoints:
        return checkpoints[0]
    files = sorted(file for file in path.iterdir() if file.suffix == ".gguf")
    if len(files) > 1:
        message = (
            f"contains {len(files)} .gguf files, {files[0].name} and {files[1].name} among them"
        )
        raise WeightsError(f"{path} {message}; give the path of one")
    return files[0] if files else path


def no_weights_error(path: Path) -> WeightsError:
    """The exception for a missing path, or a folder without weights."""
    if not path.exists():
        message = (
            "does not exist; give a Hugging Face folder, a checkpoint's folder or a .gguf file"
        )
        return WeightsError(f"{path} {message}")
    message = "contains neither a config.json (Hugging Face) nor a manifest.json (a checkpoint)"
    return WeightsError(f"{path} {message}; give a folder of one of them, or a .gguf file")


def _in_package(package: str) -> Path:
    """The only file or folder of weights in an installed package, or fetched from it."""
    try:
        files = metadata.files(package) or []
    except metadata.PackageNotFoundError:
        return _fetched(package)
    matches = [
        Path(str(file.locate()))
        for file in files
        if file.suffix == ".gguf" or file.name == "config.json"
    ]
    if len(matches) != 1:
        message = (
            f"{len(matches)} files of weights" if matches else "no .gguf file and no config.json"
        )
        raise WeightsError(f"package {package} contains {message}; give the path of one")
    return matches[0] if matches[0].suffix == ".gguf" else matches[0].parent


def _fetched(package: str) -> Path:
    for folder in sorted(models_home().glob("*")):
        try:
            origin = json.loads((folder / ORIGIN).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(origin, dict) and origin.get("package") == package:
            return resolve_weights_path(folder)
    message = (
        f"package {package} is not installed, and no model in {models_home()} was fetched from it"
    )
    raise WeightsError(
        f"{message}; run python -m workers.models.fetch on every node, or give a path"
    )
