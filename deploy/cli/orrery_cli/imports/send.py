"""Sends runs of other trackers to the server; a repeated import adds only what is missing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from orrery_cli.client import Client
from orrery_cli.errors import USAGE, CliError
from orrery_cli.imports import mlflow, tensorboard, wandb
from orrery_cli.imports.source import SourceError, SourceRun

_POINTS, _LINES = 2000, 5000  # per request
_MEDIA_BYTES = 3 << 20  # per request
Reader = Callable[[Path], Iterator[SourceRun | SourceError]]
TOOLS: dict[str, tuple[Callable[[Path], bool], Reader]] = {
    "wandb": (wandb.is_offline, wandb.read),
    "mlflow": (mlflow.is_store, mlflow.read),
    "tensorboard": (tensorboard.is_log, tensorboard.read),
}


def read_runs(path: Path, tool: str = "") -> Iterator[SourceRun | SourceError]:
    """The runs below a path, of a named tool or of the one whose files are there.

    A run that cannot be read is an error in its place.
    """
    if not path.exists():
        raise CliError(f"{path} does not exist", "Give a folder or file that exists.", code=USAGE)
    if tool and tool not in TOOLS:
        raise CliError(f"{tool!r} is not a format", f"Use one of {', '.join(TOOLS)}.", code=USAGE)
    for name, (recognizes, read) in TOOLS.items():
        if name == tool or (not tool and recognizes(path)):
            return read(path)
    raise CliError(
        f"{path} has no files of TensorBoard, W&B or MLflow",
        "Give a folder with tfevents files, a folder wandb/offline-run-…, or mlruns.",
    )


def send_run(client: Client, run: SourceRun, *, experiment: str = "") -> dict[str, Any]:
    """Send a run; `{id, name, new, points, known, media, lines, rejected, skipped}`."""
    stored = next(client.items("runs", most=1, tag=run.tag, owner="me"), None)
    created = stored is None
    if stored is None:
        spec = {"kind": "external", "tags": [run.tag, *run.tags[:19]], "notes": run.notes}
        body: dict[str, Any] = {"name": run.name, "spec": spec}
        if chosen := experiment or run.experiment:
            body["experiment"] = chosen
        stored = client.create("runs", body, key=f"import-{run.tag}")
    path = f"runs/{stored['id']}"
    details: dict[str, Any] = {
        "config": run.config,
        "summary": run.summary,
        "program": run.program,
    }
    details |= {"requirements": run.requirements} if run.requirements else {}
    client.send(f"{path}/details", {"details": [details]})
    counts = {"points": 0, "known": 0, "media": 0, "lines": 0}
    rejected: list[str] = []

    def send(kind: str, key: str, items: list[dict[str, Any]]) -> None:
        answer = client.send(f"{path}/{kind}", {key: items})
        counts["lines" if kind == "logs" else kind] += answer["accepted"]
        counts["known"] += answer["duplicates"] if kind == "points" else 0
        rejected.extend(each["message"] for each in answer["rejected"])

    for batch in _batches(run.points, _POINTS):
        send("points", "points", batch)
    for batch in _batches(run.lines, _LINES):
        send("logs", "lines", batch)
    for batch in _by_size(run.media, _MEDIA_BYTES):
        send("media", "media", batch)
    if stored["state"] == "running":
        client.post(f"{path}/finish", {"status": run.status, "reason": run.reason})
    return {
        "id": stored["id"],
        "name": run.name,
        "new": created,
        **counts,
        "rejected": rejected,
        "skipped": run.skipped,
    }


def _batches(items: list[dict[str, Any]], most: int) -> Iterator[list[dict[str, Any]]]:
    for start in range(0, len(items), most):
        yield items[start : start + most]


def _by_size(items: list[dict[str, Any]], most: int) -> Iterator[list[dict[str, Any]]]:
    """Batches of at most 100 items and about `most` characters."""
    batch: list[dict[str, Any]] = []
    size = 0
    for item in items:
        own = len(item["data"]) if isinstance(item["data"], str) else 20_000
        if batch and (size + own > most or len(batch) == 100):
            yield batch
            batch, size = [], 0
        batch.append(item)
        size += own
    if batch:
        yield batch
