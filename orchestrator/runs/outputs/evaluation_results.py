"""Results of an evaluate run: metrics from its event, lowest-scoring examples from its file.

Reads at most 64 MiB of the file, on the control plane's own disk. Computes no metric.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from django.conf import settings
from pydantic import ValidationError

from orchestrator.runs.models import Run, RunEvent
from orchestrator.runs.outputs.endpoint import known
from workers.contracts.wire.serving_reports import EVALUATED, Evaluated

LINES: Final = "results.jsonl"
_MOST_BYTES: Final = 64 * 2**20
# metrics of a line by preference: (name, whether less is better)
_RANKED: Final = (
    ("loss", True),
    ("right", False),
    ("exact_match", False),
    ("rougeL", False),
    ("rouge1", False),
    ("rouge2", False),
)


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the results; `by` names the metric that ranks it."""

    id: Any
    by: str
    value: float
    row: dict[str, Any]


def evaluated(*, run: Run) -> Evaluated | None:
    """The newest results; None before the first."""
    for event in RunEvent.objects.filter(run=run, type=EVALUATED).order_by("-seq")[:4]:
        try:
            return Evaluated.from_dict(known(event.data, Evaluated))
        except ValidationError:
            continue
    return None


def lines_file(*, run: Run, evaluation: Evaluated) -> Path | None:
    """The file with one line per example; None if it is on another machine."""
    root = Path(settings.ENV.media_runs).resolve()
    for file in evaluation.files:
        path = (root.parent / file.path).resolve()
        if file.name == LINES and path.is_relative_to(root / str(run.pk)) and path.is_file():
            return path
    return None


def worst(path: Path, *, limit: int) -> list[Line]:
    """The lowest-scoring lines, worst first: by loss if they have one, else by score."""
    lines = [line for line in map(_ranked, _rows(path)) if line is not None]
    less = dict(_RANKED)
    return heapq.nlargest(
        limit, lines, key=lambda line: line.value if less[line.by] else -line.value
    )


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    size = 0
    with open(path, "rb") as file:
        for text in file:
            size += len(text)
            if size > _MOST_BYTES:
                return
            try:
                row = json.loads(text)
            except (ValueError, RecursionError):
                continue
            if isinstance(row, dict):
                yield row


def _ranked(row: dict[str, Any]) -> Line | None:
    tokens, nll = row.get("tokens"), row.get("nll")
    if (
        isinstance(nll, int | float)
        and isinstance(tokens, int)
        and tokens > 0
        and "right" not in row
    ):
        row = {**row, "loss": nll / tokens}
    for name, _ in _RANKED:
        value = row.get(name)
        if isinstance(value, int | float):
            return Line(row.get("id"), name, float(value), row)
    return None
