"""Reads runs of an MLflow file store (`mlruns`): meta.yaml, params, metrics, tags, artifacts.

Layout: EXPERIMENT/RUN/{meta.yaml, params/NAME, metrics/NAME, tags/NAME, artifacts/…}; a metric file
has lines `milliseconds value step`. Databases of MLflow servers are not read.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from orrery_cli.imports.source import (
    SourceError,
    SourceRun,
    is_below,
    number_or_name,
    read_file,
    read_text,
)

_STATUS = {"3": "finished", "4": "failed", "5": "failed"}  # RunStatus: FINISHED, FAILED, KILLED
_IMAGES = (".png", ".jpg", ".jpeg")
_TEXT_BYTES, _IMAGE_BYTES, _MOST_ARTIFACTS = 64_000, 5_000_000, 200


def is_store(path: Path) -> bool:
    """Whether a folder is a store, an experiment or a run of MLflow."""
    return (path / "meta.yaml").is_file() or any(path.glob("*/meta.yaml"))


def read(path: Path) -> Iterator[SourceRun | SourceError]:
    """The runs below a folder, and why others cannot be read, with file and line."""
    root = path.resolve()
    for meta in sorted(path.rglob("meta.yaml")):
        if "artifacts" in meta.relative_to(path).parts:
            continue
        try:
            values = _meta(meta, root)
            if _is_run(values):
                yield _run(meta.parent, values, root)
        except SourceError as error:
            yield error


def _is_run(meta: dict[str, str]) -> bool:
    """Registered models have a `run_id` too, but no experiment."""
    is_complete = bool(meta.get("run_id")) and "experiment_id" in meta
    return is_complete and meta.get("lifecycle_stage") != "deleted"


def _run(folder: Path, meta: dict[str, str], root: Path) -> SourceRun:
    tags = {name: read_text(path, root).strip() for name, path in _files(folder / "tags")}
    run = SourceRun(
        tool="mlflow",
        key=meta["run_id"],
        name=meta.get("run_name") or tags.get("mlflow.runName") or meta["run_id"],
        experiment=_experiment(folder),
        notes=tags.get("mlflow.note.content", ""),
    )
    run.tags = [
        f"{name}={value}"[:100] for name, value in tags.items() if not name.startswith("mlflow.")
    ]
    run.config = {name: _value(read_text(path, root)) for name, path in _files(folder / "params")}
    if tags.get("mlflow.source.name"):
        run.program["command"] = [tags["mlflow.source.name"]]
    if tags.get("mlflow.source.git.commit"):
        run.program["commit"] = tags["mlflow.source.git.commit"]
    status = meta.get("status", "")
    if status not in _STATUS:
        raise SourceError(
            folder / "meta.yaml",
            "",
            f"run {run.name} has not ended (status {status or 'missing'})",
            "Import the run after it has ended.",
        )
    run.status = _STATUS[status]
    run.reason = "killed" if status == "5" else ""
    run.points = _points(folder, root)
    _add_artifacts(run, folder / "artifacts", root)
    return run


def _points(folder: Path, root: Path) -> list[dict[str, Any]]:
    """One point per step with all metrics of the step; of repeated steps the last line counts."""
    by_step: dict[int, dict[str, Any]] = {}
    for name, path in _files(folder / "metrics"):
        for place, line in enumerate(read_text(path, root).splitlines(), start=1):
            words = line.split()
            try:
                time_s, value = int(words[0]) / 1000, float(words[1])
                step = int(words[2]) if len(words) > 2 else 0
            except (ValueError, IndexError, OverflowError):
                message = f"{line[:60]!r} is not `milliseconds value step`"
                raise SourceError(path, f"line {place}", message) from None
            point = by_step.setdefault(step, {"time": time_s, "values": {}})
            point["time"] = max(point["time"], time_s)
            point["values"][name[:120]] = number_or_name(value)
    shift = min(0, min(by_step, default=0))  # steps of points are not negative
    return [
        {"seq": seq, "step": step - shift, **by_step[step]}
        for seq, step in enumerate(sorted(by_step), start=1)
    ]


def _add_artifacts(run: SourceRun, folder: Path, root: Path) -> None:
    for name, path in _files(folder):
        if not is_below(path, root):
            run.skip("links to files outside the folder")
            continue
        size = path.stat().st_size
        is_image = path.suffix.lower() in _IMAGES and size <= _IMAGE_BYTES
        is_text = path.suffix.lower() in (".txt", ".md", ".log") and size <= _TEXT_BYTES
        if not (is_image or is_text) or len(run.media) >= _MOST_ARTIFACTS:
            run.skip("artifacts")
            continue
        data = (
            base64.b64encode(read_file(path, root)).decode() if is_image else read_text(path, root)
        )
        kind = "image" if is_image else "text"
        run.media.append({"name": f"artifacts/{name}"[:200], "kind": kind, "step": 0, "data": data})


def _files(folder: Path) -> Iterator[tuple[str, Path]]:
    """`(name, path)` of all files below a folder; a name may contain `/`."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            yield path.relative_to(folder).as_posix(), path


def _experiment(folder: Path) -> str:
    """The name next to the run; above the root if only one run is imported."""
    above = folder.resolve().parent
    meta = above / "meta.yaml"
    name = _meta(meta, above).get("name", "") if meta.is_file() and is_below(meta, above) else ""
    return "" if name == "Default" else name[:120]


def _meta(path: Path, root: Path) -> dict[str, str]:
    """The top-level texts of a meta.yaml, which MLflow writes flat."""
    values = {}
    for place, line in enumerate(read_text(path, root).splitlines(), start=1):
        if not line.strip() or line.startswith((" ", "-", "#")):
            continue
        name, colon, value = line.partition(":")
        if not colon:
            raise SourceError(path, f"line {place}", f"{line[:60]!r} is not `name: value`")
        value = value.strip()
        if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"":
            value = value[1:-1].replace("''", "'")
        values[name.strip()] = "" if value == "null" else value
    return values


def _value(text: str) -> Any:
    """A parameter as number or truth value, if it is one: MLflow stores texts."""
    text = text.strip()
    for convert in (int, float):
        try:
            return convert(text)
        except ValueError:
            continue
    return {"True": True, "False": False}.get(text, text)
