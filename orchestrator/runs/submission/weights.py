"""Shape and presence of the weights that a spec names, on the control plane's own disk.

Opens no weights. Nodes have their own disks: weights that are missing here may be there.
"""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path
from typing import Any

from django.conf import settings

from orchestrator.runs.models import Run
from workers.contracts import ModelSource, ModelSpec, RunSpec
from workers.contracts.catalog.presets import preset, resolve_model
from workers.contracts.huggingface import read_model
from workers.contracts.specs.inference_support import PACKAGES

FETCH = "python -m workers.models.fetch"  # downloads a published model into the data directory
_MAX_MODELS = 50  # in a form


def models_root() -> Path:
    """The folder of models that `FETCH` downloaded."""
    return Path(settings.ENV.home) / "models"


def shape_of(model: Any) -> ModelSpec | None:
    """The shape of a spec's `model`; None if unknown without opening weights."""
    if not isinstance(model, ModelSource):
        return resolve_model(model)
    if model.package is not None:
        return preset(PACKAGES[model.package]) if model.package in PACKAGES else None
    path = Path(model.path or "")
    fetched = _origin(path)
    if fetched in PACKAGES:
        return preset(PACKAGES[fetched])
    if (number := _run_id(path)) is not None:
        return _trained_shape(number)
    try:
        return read_model(path)
    except (ValueError, OSError):
        return None


def package_here(package: str) -> bool:
    """Whether this machine has the package: installed, or downloaded to the data directory."""
    try:
        metadata.distribution(package)
    except metadata.PackageNotFoundError:
        return any(_origin(folder) == package for folder in _folders())
    return True


def offered() -> list[tuple[str, str]]:
    """`(path, name)` of models in the data directory, for a form."""
    return [(str(folder), folder.name) for folder in _folders()]


def _folders() -> list[Path]:
    try:
        entries = sorted(
            path for path in models_root().iterdir() if path.is_dir() or path.suffix == ".gguf"
        )
    except OSError:
        return []
    return [path for path in entries if not path.name.startswith(".")][:_MAX_MODELS]


def _origin(folder: Path) -> str:
    """The package of downloaded weights, "" for others."""
    try:
        origin = json.loads((folder / "origin.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ""
    return str(origin.get("package") or "") if isinstance(origin, dict) else ""


def _run_id(path: Path) -> int | None:
    """The id of the run whose folder contains the path."""
    try:
        name = path.resolve().relative_to(Path(settings.ENV.media_runs).resolve()).parts[0]
    except (ValueError, IndexError, OSError):
        return None
    return int(name) if name.isdecimal() and len(name) < 19 else None


def _trained_shape(number: int) -> ModelSpec | None:
    spec = Run.objects.filter(pk=number, kind="train").values_list("spec", flat=True).first()
    return RunSpec.from_dict(spec).shape if spec else None
