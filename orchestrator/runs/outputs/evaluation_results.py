"""Results of an evaluate run: metrics from its event, lowest-scoring examples from its file.

Reads at most 64 MiB of the file, on the control plane's own disk. Computes no metric.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO, Final

from orchestrator.runs.models import Run
from orchestrator.runs.outputs.newest_events import newest_readable
from orchestrator.runs.submission.run_paths import open_file_of_run
from workers.contracts.wire.serving_reports import EVALUATED, Evaluated

LINES: Final = "results.jsonl"
BASELINE_LINES: Final = "baseline.jsonl"
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
    return evaluations_of(run_ids=[run.pk]).get(run.pk)


def evaluations_of(*, run_ids: Collection[int]) -> dict[int, Evaluated]:
    """`{run: newest results}` of runs that have any; one query."""
    return newest_readable(run_ids=run_ids, type=EVALUATED, read=Evaluated.from_dict)


def worst(*, run: Run, evaluation: Evaluated, limit: int) -> list[Line] | None:
    """The lowest-scoring examples, worst first: by loss if they have one, else by score.

    None if the file with one line per example is on another machine.
    """
    names = [file.path for file in evaluation.files if file.name == LINES]
    opened = next((file for path in names if (file := open_file_of_run(run.pk, path))), None)
    if opened is None:
        return None
    lines = [line for line in map(_ranked, _rows(opened)) if line is not None]
    less = dict(_RANKED)
    return heapq.nlargest(
        limit, lines, key=lambda line: line.value if less[line.by] else -line.value
    )


@dataclass(frozen=True, slots=True)
class AnswerPair:
    """Two different answers to example number `example` (from 0), before and after training.

    `id` is the example's own.
    """

    example: int
    id: Any
    prompt: str | None
    before: str
    after: str


def answer_pairs(*, run: Run, evaluation: Evaluated) -> list[AnswerPair] | None:
    """Examples that were answered differently; None without a baseline, or without its files."""
    opened: dict[str, BinaryIO] = {}
    for name in (LINES, BASELINE_LINES):
        paths = [file.path for file in evaluation.files if file.name == name]
        match = next((file for path in paths if (file := open_file_of_run(run.pk, path))), None)
        if match is None:
            for file in opened.values():
                file.close()
            return None
        opened[name] = match
    after, before = (list(_rows(opened[name])) for name in (LINES, BASELINE_LINES))
    return [
        AnswerPair(number, first.get("id"), _text(second.get("prompt")), old, new)
        for number, (first, second) in enumerate(zip(before, after, strict=False))
        if first.get("id") == second.get("id")
        and isinstance(old := first.get("answer"), str)
        and isinstance(new := second.get("answer"), str)
        and old != new
    ]


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _rows(opened: BinaryIO) -> Iterator[dict[str, Any]]:
    size = 0
    with opened as file:
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
