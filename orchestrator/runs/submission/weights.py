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
from orchestrator.runs.states import ENDED
from orchestrator.runs.submission.absolute_paths import MODEL_FIELDS
from orchestrator.runs.submission.run_paths import run_of_path
from workers.contracts import ModelSource, ModelSpec, Problem, RunSpec
from workers.contracts.base import problem
from workers.contracts.catalog.presets import preset, resolve_model
from workers.contracts.huggingface import read_model
from workers.contracts.specs.finetuning.objectives import TEACHER_MANIFEST
from workers.contracts.specs.inference_support import PACKAGES

FETCH = "python -m workers.models.fetch"  # downloads a published model into the data directory
_MAX_MODELS = 50  # in a form
# sizes in which initial weights and a reference equal the model
_COMPARED = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab")


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


def with_shape(spec: RunSpec) -> RunSpec:
    """The spec with the shape of its weights as model, if it names no other and they are here."""
    source = spec.shape_source
    shape = shape_of(source) if source is not None and spec.kind == "train" else None
    return spec if shape is None else spec.model_copy(update={"model": shape})


def shape_problems(spec: RunSpec) -> list[Problem]:
    """Weights of a training run that are here and belong to another model."""
    model, train = spec.shape, spec.train
    if model is None or train is None:
        return []
    problems: list[Problem] = []
    if train.distill is not None:
        teacher = shape_of(train.distill.teacher)
        if teacher is not None and teacher.vocab != model.vocab:
            message = f"its vocabulary has {teacher.vocab} tokens, the model's {model.vocab}"
            hint = "Use a teacher with the same tokenizer."
            problems.append(problem("train.distill.teacher", message, hint))
    sources = {"train.init_from": train.init_from, "train.dpo.reference": train.reference}
    for field, source in sources.items():
        theirs = shape_of(source) if isinstance(source, ModelSource) else None
        for name in _COMPARED if theirs is not None else ():
            actual, wanted = getattr(theirs, name), getattr(model, name)
            if actual != wanted:
                message = f"these weights have {name} {actual}, the model {wanted}"
                problems.append(problem(field, message, f"Use model with {name} {actual}."))
                break
    return problems


def no_checkpoint_problems(spec: RunSpec) -> list[Problem]:
    """Models that are the folder of an ended run without a checkpoint."""
    problems: list[Problem] = []
    for names in MODEL_FIELDS:
        source: Any = spec
        for name in names:
            source = getattr(source, name, None)
        if not isinstance(source, ModelSource) or source.path is None:
            continue
        number = _run_id(Path(source.path))
        root = Path(settings.ENV.media_runs) / str(number)
        if number is None or Path(source.path).resolve() != root.resolve():
            continue
        ended = Run.objects.filter(pk=number, state__in=[str(state) for state in ENDED])
        if ended.filter(checkpoints=None).exists():
            message = f"run {number} ended without a checkpoint"
            hint = "Use a run that saves them (train.checkpoint), or other weights."
            problems.append(problem(".".join((*names, "path")), message, hint))
    return problems


def served_adapter_problems(spec: RunSpec) -> list[Problem]:
    """Adapters of a serve run that runs trained over a model of another size.

    Their files are compared with the served weights when the server loads them.
    """
    model = shape_of(spec.model) if spec.serve is not None and spec.serve.adapters else None
    if model is None or spec.serve is None:
        return []
    problems: list[Problem] = []
    for adapter, path in spec.serve.adapters.items():
        theirs = shape_of(ModelSource(path=path))
        for name in _COMPARED if theirs is not None else ():
            actual, wanted = getattr(theirs, name), getattr(model, name)
            if actual != wanted:
                message = f"this adapter's base has {name} {actual}, the served model {wanted}"
                problems.append(
                    problem(f"serve.adapters.{adapter}", message, "Use the adapter's own base.")
                )
                break
    return problems


def teacher_shape(spec: RunSpec) -> ModelSpec | None:
    """The shape of the model that runs as teacher; None without one or if it is not here.

    A folder with a teacher's stored tokens runs no model.
    """
    distill = spec.train.distill if spec.train is not None else None
    return shape_of(distill.teacher) if distill is not None else None


def lacks_teacher_shape(spec: RunSpec) -> bool:
    """Whether a teacher runs whose shape cannot be read on this disk."""
    distill = spec.train.distill if spec.train is not None else None
    if distill is None or shape_of(distill.teacher) is not None:
        return False
    return not (Path(distill.teacher.path or "") / TEACHER_MANIFEST).is_file()


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
    return run_of_path(path, settings.ENV.media_runs)


def _trained_shape(number: int) -> ModelSpec | None:
    spec = Run.objects.filter(pk=number, kind="train").values_list("spec", flat=True).first()
    return RunSpec.from_dict(spec).trained_shape if spec else None
