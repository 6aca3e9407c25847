"""Traces of runs: columns in the order of submission, and reading them from CSV files.

Does not depend on policies.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

COLUMNS: Final = ("submit_s", "user", "team", "devices", "duration_s", "priority")
MOST_PROBLEMS: Final = 5  # named in an error
LONGEST_S: Final = 1e10
PREDICTION_ERROR: Final = 0.2  # predictions are uniform within ± this of the true durations

_T = TypeVar("_T")


class TraceError(ValueError):
    """A trace that cannot be simulated; the message names lines, values and what to change."""


@dataclass(frozen=True)
class Trace:
    """Runs in the order of their submission. Times in seconds from the first submission."""

    name: str
    seed: int
    submit_s: NDArray[np.float64]
    devices: NDArray[np.int64]
    duration_s: NDArray[np.float64]
    priority: NDArray[np.int64]
    user: list[str]
    team: list[str]

    def __len__(self) -> int:
        return len(self.user)

    def predicted_s(self) -> NDArray[np.float64]:
        """Durations that policies see: uniform within ±20% of the true ones, by the seed."""
        rng = np.random.default_rng([self.seed, 20])
        error = PREDICTION_ERROR
        return self.duration_s * rng.uniform(1 - error, 1 + error, size=len(self))


def read_csv(lines: Iterable[str], *, name: str, devices: int, most_runs: int) -> Trace:
    """Read a trace with the columns of `COLUMNS`, in any order; others are ignored.

    Raises TraceError for a missing column, a value out of range or a run above `devices`.
    """
    reader = csv.reader(_without_mark(lines))
    try:
        header = [column.strip() for column in next(reader)]
    except StopIteration:
        raise TraceError(f"{name} is empty. Expected the columns {', '.join(COLUMNS)}.") from None
    except csv.Error as error:
        raise TraceError(f"{name}, line 1: {error}.") from None
    if missing := [column for column in COLUMNS if column not in header]:
        noun = "column" if len(missing) == 1 else "columns"
        raise TraceError(
            f"{name}, line 1: no {noun} {', '.join(missing)}. "
            f"The first line must name the columns {', '.join(COLUMNS)}."
        )
    if twice := sorted({column for column in COLUMNS if header.count(column) > 1}):
        raise TraceError(f"{name}, line 1: column {twice[0]} is named twice.")
    places = [header.index(column) for column in COLUMNS]
    rows: list[tuple[float, str, str, int, float, int]] = []
    problems: list[str] = []
    try:
        for fields in reader:
            if not any(field.strip() for field in fields):
                continue
            if len(fields) < len(header):
                problems.append(
                    f"line {reader.line_num}: {len(fields)} values for {len(header)} columns"
                )
            else:
                texts = [fields[place].strip() for place in places]
                row = _row(texts, reader.line_num, devices, problems)
                if row is not None:
                    rows.append(row)
            if len(problems) > MOST_PROBLEMS:
                break
            if len(rows) > most_runs:
                raise TraceError(f"{name} has more than {most_runs:,} runs. Use a part of it.")
    except (csv.Error, UnicodeDecodeError) as error:
        problems.append(f"line {reader.line_num + 1}: {error}")
    if problems:
        more = ["…"] if len(problems) > MOST_PROBLEMS else []
        raise TraceError(f"{name}: " + "; ".join([*problems[:MOST_PROBLEMS], *more]) + ".")
    if not rows:
        raise TraceError(f"{name} has no runs, only the line of column names.")
    rows.sort(key=lambda row: row[0])
    first = rows[0][0]
    return Trace(
        name=name,
        seed=0,
        submit_s=np.array([row[0] - first for row in rows]),
        user=[row[1] for row in rows],
        team=[row[2] for row in rows],
        devices=np.array([row[3] for row in rows], dtype=np.int64),
        duration_s=np.array([row[4] for row in rows]),
        priority=np.array([row[5] for row in rows], dtype=np.int64),
    )


def _without_mark(lines: Iterable[str]) -> Iterable[str]:
    for number, line in enumerate(lines):
        yield line.removeprefix("\ufeff") if number == 0 else line


def _row(
    texts: list[str], line: int, devices: int, problems: list[str]
) -> tuple[float, str, str, int, float, int] | None:
    """One run; None after adding its problems."""
    before = len(problems)

    def number(column: str, text: str, kind: Callable[[str], _T], noun: str) -> _T | None:
        try:
            return kind(text)
        except ValueError:
            problems.append(f"line {line}: {column} is {text[:40]!r}, not {noun}")
            return None

    submit = number("submit_s", texts[0], float, "a number of seconds")
    wanted = number("devices", texts[3], int, "a whole number")
    duration = number("duration_s", texts[4], float, "a number of seconds")
    priority = number("priority", texts[5] or "0", int, "a whole number")
    if submit is not None and not (math.isfinite(submit) and abs(submit) <= LONGEST_S):
        problems.append(f"line {line}: submit_s is {texts[0][:40]}, beyond ±{LONGEST_S:.0e}")
    if duration is not None and not 0 < duration <= LONGEST_S:
        problems.append(
            f"line {line}: duration_s is {texts[4][:40]}; a run lasts more than 0 and at most "
            f"{LONGEST_S:.0e} seconds"
        )
    if wanted is not None and wanted < 1:
        problems.append(f"line {line}: devices is {wanted}; a run needs at least 1")
    if wanted is not None and wanted > devices:
        problems.append(f"line {line}: devices is {wanted}, but the cluster has {devices}")
    if priority is not None and abs(priority) > 10**6:
        problems.append(f"line {line}: priority is {priority}, beyond ±1,000,000")
    if len(problems) > before:
        return None
    assert submit is not None and wanted is not None
    assert duration is not None and priority is not None
    return submit, texts[1], texts[2], wanted, duration, priority
