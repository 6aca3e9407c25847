"""Lines of a produce run, newest first, and its funnel: candidates, each filter, accepted lines.

Reads the files from their end, on the control plane's own disk; the funnel needs only the run's
newest metrics. Writes nothing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final, Literal

from django.conf import settings
from pydantic import ValidationError

from orchestrator.common.errors import Refusal, invalid
from orchestrator.runs.models import Run
from orchestrator.runs.outputs.output_files import open_output_file
from workers.contracts.specs.finetuning.produce import ProduceBody

Which = Literal["accepted", "rejected"]
WHICH: Final = ("accepted", "rejected")
_CHUNK: Final = 1 << 18
_LONGEST: Final = 1 << 24  # bytes of a line
_BEFORE_FILTERS: Final = ("empty", "unchanged")


@dataclass(frozen=True, slots=True)
class Stage:
    """One step of the funnel: `left` candidates of those before it, `rejected` by its `kind`."""

    kind: str
    rejected: int
    left: int


@dataclass(frozen=True, slots=True)
class Progress:
    """Totals of a produce run; null where nothing is known yet, or without prices."""

    wanted: int
    accepted: int
    rejected: int
    candidates: int
    stages: list[Stage]
    prompt_tokens: int | None
    completion_tokens: int | None
    cost_usd: float | None
    tokens_per_s: float | None
    lines_per_s: float | None
    eta_s: float | None


@dataclass(frozen=True, slots=True)
class ProducedLine:
    """One line: its offset in the file, and its fields."""

    offset: int
    content: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Page:
    """Lines, newest first, and the cursor of the next page."""

    lines: list[ProducedLine]
    next: str | None


def body_of(run: Run) -> ProduceBody | None:
    """The run's body; None for other kinds and for a body that this version cannot read."""
    try:
        return ProduceBody.from_dict(run.spec["produce"]) if run.kind == "produce" else None
    except (KeyError, TypeError, ValidationError):
        return None


def progress(*, run: Run, latest: Mapping[str, float]) -> Progress | None:
    """Totals by the run's newest metrics; None for other kinds of run."""
    body = body_of(run)
    if body is None:
        return None
    counts = {name: int(latest.get(f"produce/{name}", 0)) for name in (*WHICH, "candidates")}
    accepted, speed = counts["accepted"], latest.get("produce/lines_per_s")
    share = accepted / max(1, accepted + counts["rejected"])
    eta = (body.count - accepted) / (speed * share) if speed and share else None
    return Progress(
        wanted=body.count,
        accepted=accepted,
        rejected=counts["rejected"],
        candidates=counts["candidates"],
        stages=_stages(body, counts["candidates"], latest),
        prompt_tokens=_count(latest, "prompt_tokens"),
        completion_tokens=_count(latest, "completion_tokens"),
        cost_usd=latest.get("produce/cost_usd"),
        tokens_per_s=latest.get("produce/tokens_per_s"),
        lines_per_s=speed,
        eta_s=eta,
    )


def file_path(*, run: Run, which: Which) -> Path:
    """The file on this machine; a relative output is in the run's folder."""
    output = Path(str((run.spec.get("produce") or {}).get("output") or "produced.jsonl"))
    folder = Path(settings.ENV.media_runs) / str(run.pk)
    path = folder / output
    return path.with_name(f"{path.stem}.rejected{path.suffix}") if which == "rejected" else path


def is_available(*, run: Run, which: Which = "accepted") -> bool:
    """Whether the lines are on this machine."""
    if run.kind != "produce":
        return False
    try:
        open_output_file(file_path(run=run, which=which)).close()
    except OSError:
        return False
    return True


def get_page(*, run: Run, which: Which, after: str | None, limit: int) -> Page:
    """Lines before the cursor, newest first. Raises 409 if the file is on another machine."""
    with open_lines(run=run, which=which) as file:
        size = os.fstat(file.fileno()).st_size
        end = _parse_cursor(after, size)
        lines = []
        for offset, text in _backwards(file.fileno(), end):
            content = _json_object(text)
            if content is not None:
                lines.append(ProducedLine(offset, content))
            if len(lines) == limit:
                break
    more = bool(lines) and len(lines) == limit and lines[-1].offset > 0
    return Page(lines, str(lines[-1].offset) if more else None)


def read_chunks(*, run: Run, which: Which) -> Iterator[bytes]:
    """The file up to its last complete line. Raises 409 if it is on another machine."""
    rest = b""
    with open_lines(run=run, which=which) as file:
        while chunk := file.read(_CHUNK):
            complete, newline, rest = (rest + chunk).rpartition(b"\n")
            yield complete + newline


def _stages(body: ProduceBody, candidates: int, latest: Mapping[str, float]) -> list[Stage]:
    """Filters in the order in which they are applied; a score of best_of_n comes last."""
    order = [*_BEFORE_FILTERS, *(each.kind for each in body.filters)]
    if body.method == "best_of_n":
        order.append(body.score.kind)
    prefix = "produce/filtered/"
    counts = {
        name.removeprefix(prefix): int(value)
        for name, value in latest.items()
        if name.startswith(prefix)
    }
    order += [name for name in counts if name not in order]
    stages, left = [], candidates
    for kind in dict.fromkeys(order):
        rejected = counts.get(kind, 0)
        if kind in _BEFORE_FILTERS and not rejected:
            continue
        left = max(0, left - rejected)
        stages.append(Stage(kind, rejected, left))
    return stages


def _count(latest: Mapping[str, float], name: str) -> int | None:
    value = latest.get(f"produce/{name}")
    return int(value) if value is not None else None


def open_lines(*, run: Run, which: Which = "accepted") -> BinaryIO:
    """The opened file. Raises 409 if it is on another machine."""
    path = file_path(run=run, which=which)
    try:
        return open_output_file(path)
    except OSError:
        raise Refusal(
            "file-elsewhere",
            "There are no lines on this machine",
            409,
            f"{path.name} is not written yet, or is on the node that writes it. A shared run "
            "directory (ORRERY_SHARED_RUNS) or a shared data root makes it available here.",
        ) from None


def _backwards(file: int, end: int) -> Iterator[tuple[int, bytes]]:
    """`(offset, line)` of the complete lines before `end`, last first."""
    buffer, start = b"", end
    while len(buffer) < _LONGEST:
        before = buffer.rfind(b"\n", 0, max(0, len(buffer) - 1))  # the end of the line before
        if buffer and (before >= 0 or start == 0):
            line, buffer = buffer[before + 1 :], buffer[: before + 1]
            if line.endswith(b"\n"):  # else it is still being written
                yield start + before + 1, line
        elif start == 0:
            return
        else:
            size = min(_CHUNK, start)
            start -= size
            buffer = os.pread(file, size, start) + buffer


def _parse_cursor(after: str | None, size: int) -> int:
    if after is None:
        return size
    if not (after.isascii() and after.isdecimal() and len(after) < 19 and int(after) <= size):
        raise invalid(
            "cursor", f"{after!r} is not a cursor", "Use next_cursor of the previous page."
        )
    return int(after)


def _json_object(line: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
