"""Writes the archive of runs: a ZIP with one folder per run.

`run.json` (spec, plan, summary), `events.jsonl`, `logs.jsonl`, `series/<metric>.csv` with every
stored point. Does not depend on who requested it.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from orchestrator.runs import selectors as runs
from orchestrator.runs.models import Run
from orchestrator.telemetry import selectors as telemetry
from orchestrator.telemetry.reading import logs

_LINES: Final = 5000  # per query
_HEAD: Final = "attempt,rank,seq,step,tokens,time,value\n"


class TooLarge(Exception):
    """The archive would exceed its limit."""


def write(path: Path, rows: Iterable[Run], *, limit: int, renew: Callable[[], None]) -> int:
    """Write the archive; returns its bytes. Raises TooLarge beyond `limit` bytes."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for run in rows:
            for name, parts in _files(run):
                renew()
                with archive.open(f"run-{run.pk}/{name}", "w", force_zip64=True) as file:
                    for part in parts:
                        file.write(part.encode())
                        if path.stat().st_size > limit:
                            raise TooLarge(f"The archive has more than {limit // 10**6} MB.")
    return path.stat().st_size


def _files(run: Run) -> Iterator[tuple[str, Iterable[str]]]:
    yield "run.json", [json.dumps(runs.serialize_run(run), indent=1, default=str)]
    yield "events.jsonl", _events(run)
    yield "logs.jsonl", _logs(run)
    for name in telemetry.series_names(run=run):
        # names are any text: quoted, one is one file name in the archive
        yield f"series/{quote(name, safe='')[:200]}.csv", _series(run, name)


def _events(run: Run) -> Iterator[str]:
    after = 0
    while events := list(runs.events_of(run=run, after=after)[:_LINES]):
        for event in events:
            yield json.dumps(runs.serialize_event(event)) + "\n"
        after = events[-1].seq


def _logs(run: Run) -> Iterator[str]:
    after: str | None = None
    while lines := logs.logs(run=run, after=after, limit=_LINES):
        for line in lines:
            yield json.dumps(_line(line)) + "\n"
        after = lines[-1].cursor


def _line(line: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        name: getattr(line, name) for name in ("attempt", "rank", "seq", "text")
    }
    return {**values, "time": line.time.timestamp()}


def _series(run: Run, name: str) -> Iterator[str]:
    yield _HEAD
    for row in telemetry.series_raw(run=run, name=name):
        yield ",".join(map(repr, row)) + "\n"
