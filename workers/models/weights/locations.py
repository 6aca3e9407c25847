"""Where weights lie on this machine: a path, an installed package, or a model that was fetched into
ORRERY_HOME.

Knows files by their names; opens none of the weights and loads no torch.
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

ORIGIN = "origin.json"  # beside fetched weights: where they came from


def models_home() -> Path:
    """`$ORRERY_HOME/models`, by default `./var/models`: where `workers.models.fetch` puts models."""
    return Path(os.environ.get("ORRERY_HOME") or "var") / "models"


def placement_of(source: ModelSource) -> Path:
    """The file or folder of weights; a relative path that is not there may be a fetched model.

    Raises WeightsError.
    """
    if source.package is not None:
        return _in_package(source.package)
    assert source.path is not None
    given = Path(source.path).expanduser()
    fetched = models_home() / given
    return place(
        given if given.exists() or given.is_absolute() or not fetched.exists() else fetched
    )


def place(path: Path) -> Path:
    """`path`, or what is meant by a folder: a run's newest checkpoint, or the one .gguf file in it."""
    if not path.is_dir() or (path / MANIFEST).is_file() or (path / "config.json").is_file():
        return path
    kept = complete_checkpoints(path) or complete_checkpoints(path / "checkpoints")
    if kept:
        return kept[0]
    files = sorted(each for each in path.iterdir() if each.suffix == ".gguf")
    if len(files) > 1:
        message = f"holds {len(files)} .gguf files, {files[0].name} and {files[1].name} among them"
        raise WeightsError(f"{path} {message}; give the path of one")
    return files[0] if files else path


def no_weights(path: Path) -> WeightsError:
    """For a path that is none, or a folder without any."""
    if not path.exists():
        message = (
            "does not exist; give a Hugging Face folder, a checkpoint's folder or a .gguf file"
        )
        return WeightsError(f"{path} {message}")
    message = "holds neither a config.json (Hugging Face) nor a manifest.json (a checkpoint)"
    return WeightsError(f"{path} {message}; give a folder of one of them, or a .gguf file")


def _in_package(package: str) -> Path:
    """The one file or folder of weights among an installed package's files, or fetched from it; no
    code is run.
    """
    try:
        files = metadata.files(package) or []
    except metadata.PackageNotFoundError:
        return _fetched(package)
    found = [
        Path(str(file.locate()))
        for file in files
        if file.suffix == ".gguf" or file.name == "config.json"
    ]
    if len(found) != 1:
        message = f"{len(found)} files of weights" if found else "no .gguf file and no config.json"
        raise WeightsError(f"package {package} holds {message}; give the path of one")
    return found[0] if found[0].suffix == ".gguf" else found[0].parent


def _fetched(package: str) -> Path:
    for folder in sorted(models_home().glob("*")):
        try:
            told = json.loads((folder / ORIGIN).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(told, dict) and told.get("package") == package:
            return place(folder)
    message = (
        f"package {package} is not installed, and no model in {models_home()} was fetched from it"
    )
    raise WeightsError(
        f"{message}; run python -m workers.models.fetch on every node, or give a path"
    )
