"""Weights that a run may name, as far as the control plane's own disk tells: their shape, and
whether they are here.

Opens no weights. Nodes have disks of their own: what is not here may be there.
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

FETCH = "python -m workers.models.fetch"  # brings the published model into the data directory
_MOST = 50  # models that a form offers


def models_root() -> Path:
    """Where `FETCH` puts models."""
    return Path(settings.ENV.home) / "models"


def shape_of(model: Any) -> ModelSpec | None:
    """Of a spec's `model`; None where the control plane cannot tell without opening weights."""
    if not isinstance(model, ModelSource):
        return resolve_model(model)
    if model.package is not None:
        return preset(PACKAGES[model.package]) if model.package in PACKAGES else None
    path = Path(model.path or "")
    fetched = _origin(path)
    if fetched in PACKAGES:
        return preset(PACKAGES[fetched])
    if (number := _run_of(path)) is not None:
        return _trained(number)
    try:
        return read_model(path)
    except (ValueError, OSError):
        return None


def package_here(package: str) -> bool:
    """Whether this machine has it: installed, or taken into the data directory."""
    try:
        metadata.distribution(package)
    except metadata.PackageNotFoundError:
        return any(_origin(folder) == package for folder in _folders())
    return True


def offered() -> list[tuple[str, str]]:
    """`(path, words)` of models that lie in the data directory, for a form to choose from."""
    return [(str(folder), folder.name) for folder in _folders()]


def _folders() -> list[Path]:
    try:
        found = sorted(
            each for each in models_root().iterdir() if each.is_dir() or each.suffix == ".gguf"
        )
    except OSError:
        return []
    return [each for each in found if not each.name.startswith(".")][:_MOST]


def _origin(folder: Path) -> str:
    """The package that fetched weights came from, "" for others."""
    try:
        told = json.loads((folder / "origin.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ""
    return str(told.get("package") or "") if isinstance(told, dict) else ""


def _run_of(path: Path) -> int | None:
    """The number of the run whose folder the path lies in."""
    try:
        name = path.resolve().relative_to(Path(settings.ENV.media_runs).resolve()).parts[0]
    except (ValueError, IndexError, OSError):
        return None
    return int(name) if name.isdecimal() and len(name) < 19 else None


def _trained(number: int) -> ModelSpec | None:
    spec = Run.objects.filter(pk=number, kind="train").values_list("spec", flat=True).first()
    return RunSpec.from_dict(spec).shape if spec else None
