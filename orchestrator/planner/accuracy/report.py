"""The accuracy rows as a Markdown table, for docs/planner-accuracy.md.

Does not measure anything itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from orchestrator.planner.accuracy.cases import SEEDS, Row, rows
from orchestrator.planner.accuracy.left_out_sources import LeftOut

_HEAD = "| test | case | runs | best peer | goal | reached | |\n|---|---|---|---|---|---|---|\n"


def report(measurement_dir: str | Path, *, seeds: Sequence[int] = SEEDS) -> tuple[list[Row], str]:
    """Rows and their table for the measurement files of a directory.

    Raises FileNotFoundError if there are none.
    """
    directory = Path(measurement_dir)
    results = list(rows(directory, seeds))
    if not results:
        raise FileNotFoundError(
            f"no measurement file in {directory}; expected vtrain.jsonl, mosaic.jsonl or others"
        )
    return results, markdown(results)


def sources_table(rows: Sequence[LeftOut]) -> str:
    """Sources predicted from all others: what was fitted, what was not, error and coverage."""
    head = (
        "| source | runs | fitted to | not fitted | error | bias | inside the 80% interval | "
        "median width |\n|---|---|---|---|---|---|---|---|\n"
    )
    body = "".join(
        f"| {row.source} | {row.runs} | {row.fitted} | {row.source}: times, best MFU, interval | "
        f"{row.error:.1f}% | {row.bias:+.1f}% | {row.coverage:.0f}% | {row.width:.0f}% |\n"
        for row in rows
    )
    count = max(1, len(rows))
    mean = [sum(getattr(row, name) for row in rows) / count for name in ("error", "coverage")]
    widths = sorted(row.width for row in rows)
    middle = widths[len(widths) // 2] if widths else 0.0
    return (
        f"{head}{body}| mean (median width) | {sum(row.runs for row in rows)} | | | {mean[0]:.1f}% "
        f"| | {mean[1]:.0f}% | {middle:.0f}% |\n"
    )


def markdown(results: Sequence[Row]) -> str:
    """The Markdown table of rows."""
    return _HEAD + "".join(_line(row) for row in results)


def _line(row: Row) -> str:
    sign = "≤" if row.upper else "≥"
    goal = "–" if row.goal is None else f"{sign} {row.goal:g}{_unit(row)}"
    goal += "" if row.below is None else f", ≤ {row.below:g}{_unit(row)}"
    digits = ".4f" if row.unit == "" else ".0f" if row.unit == "runs" else ".2f"
    passed = {True: "yes", False: "**no**", None: ""}[row.passed]
    detail = f"; {row.detail}" if row.detail else ""
    cells = (
        row.test,
        row.case,
        str(row.runs),
        row.peer,
        goal,
        f"{row.reached:{digits}}{_unit(row, row.reached)}{detail}",
        passed,
    )
    return f"| {' | '.join(cells)} |\n"


def _unit(row: Row, value: float = 0.0) -> str:
    if row.unit == "runs" and value == 1:
        return " run"
    return "%" if row.unit == "%" else f" {row.unit}" if row.unit else ""
