"""Log lines with any content are stored once and read by rank, cursor and text."""

from __future__ import annotations

import json

import pytest

from orchestrator.common import live
from orchestrator.runs.models import Run
from orchestrator.telemetry import selectors, services
from orchestrator.telemetry.services import Lines

pytestmark = pytest.mark.django_db


def store(run: Run, rank: int, first: int, *lines: str) -> services.StoredLines:
    return services.logs_store(
        run=run, attempt=1, batches=[(rank, Lines(first, 1000.0, list(lines)))]
    )[0]


def texts(run: Run, **choice: object) -> list[str]:
    return [line.text for line in selectors.logs(run=run, **choice)]  # type: ignore[arg-type]


def test_lines_are_stored_once_in_order(run: Run) -> None:
    store(run, 0, 0, "one", "two")
    stored = store(run, 0, 1, "two", "three")
    assert (stored.known, stored.complete_to) == (1, 2)
    store(run, -1, 0, "torchrun started")
    assert texts(run) == ["one", "two", "three", "torchrun started"]
    assert texts(run, rank=0, limit=2) == ["one", "two"]
    second = selectors.logs(run=run, limit=2)[1]
    assert texts(run, after=second.cursor) == ["three", "torchrun started"]
    assert [line.text for line in selectors.logs_newest(run=run, limit=2)] == [
        "three",
        "torchrun started",
    ]


def test_search_ignores_case_and_finds_lines_not_chunks(run: Run) -> None:
    store(run, 0, 0, "all is well", "RuntimeError: 100% full", "all is over")
    store(run, 1, 0, "runtimeerror: other")
    assert texts(run, q="RuntimeERROR") == ["RuntimeError: 100% full", "runtimeerror: other"]
    assert texts(run, q="100% full", rank=0) == ["RuntimeError: 100% full"]
    assert texts(run, q="_") == []


def test_invalid_characters_are_replaced_and_long_lines_truncated(run: Run) -> None:
    store(run, 0, 0, "zero \x00 byte", "half \ud83d of one", "x" * 100_000, "")
    first, second, third, fourth = texts(run)
    assert first == "zero � byte"
    assert second.startswith("half ")
    assert len(third) == 16_384
    assert fourth == ""


def test_a_wrong_cursor_is_refused(run: Run) -> None:
    with pytest.raises(ValueError, match="not a log cursor"):
        selectors.logs(run=run, after="yesterday")


def test_live_frames_have_only_the_newest_lines(run: Run) -> None:
    store(run, 0, 0, *map(str, range(1500)))
    frames = [json.loads(text) for _, text in live.frames_after(f"run:{run.pk}", 0)]
    logs = [frame for frame in frames if frame["type"] == "log"]
    assert [len(frame["lines"]) for frame in logs] == [200] * 5
    assert logs[0]["skipped"] == 500
    assert logs[0]["lines"][0] == [500, "500"]
