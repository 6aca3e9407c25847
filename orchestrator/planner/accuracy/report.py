"""The rows as a Markdown table, for docs/planner-accuracy.md. Measures nothing itself."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from orchestrator.planner.accuracy.cases import SEEDS, Row, rows

_HEAD = "| test | case | runs | best peer | to reach | reached | |\n|---|---|---|---|---|---|---|\n"


def report(measurement_dir: str | Path, *, seeds: Sequence[int] = SEEDS) -> tuple[list[Row], str]:
    """Rows and their table for the measurement files of a directory.

    Raises FileNotFoundError where there are none.
    """
    directory = Path(measurement_dir)
    found = list(rows(directory, seeds))
    if not found:
        raise FileNotFoundError(
            f"no measurement file in {directory}; wanted are vtrain.jsonl, mosaic.jsonl and others"
        )
    return found, markdown(found)


def markdown(found: Sequence[Row]) -> str:
    return _HEAD + "".join(_line(row) for row in found)


def _line(row: Row) -> str:
    sign = "≤" if row.most else "≥"
    figure = "–" if row.to_reach is None else f"{sign} {row.to_reach:g}{_unit(row)}"
    figure += "" if row.below is None else f", ≤ {row.below:g}{_unit(row)}"
    digits = ".4f" if row.unit == "" else ".0f" if row.unit == "runs" else ".2f"
    told = {True: "yes", False: "**no**", None: ""}[row.passed]
    detail = f"; {row.detail}" if row.detail else ""
    cells = (
        row.test,
        row.case,
        str(row.runs),
        row.peer,
        figure,
        f"{row.reached:{digits}}{_unit(row)}{detail}",
        told,
    )
    return f"| {' | '.join(cells)} |\n"


def _unit(row: Row) -> str:
    return "%" if row.unit == "%" else f" {row.unit}" if row.unit else ""
