"""Predicted and measured activation bytes of one layer for each block type.

The rows belong to the planner's accuracy report. Measures on fake tensors, so it needs little
memory and time. Prints a table; writes no file.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.orchestrator.planner.model.activations.cases import CASES, Case


@dataclass(frozen=True)
class Row:
    """One measurement.

    `recompute`: none, core or products (the two kinds of selective) or full; `by`: hooks or tracker
    """

    case: str
    recompute: str
    by: str
    measured_bytes: int
    predicted_bytes: float

    @property
    def error(self) -> float:
        """Signed, as a fraction of the measured bytes."""
        return self.predicted_bytes / self.measured_bytes - 1


def case_rows(case: Case, *, each_by_both: bool = True) -> list[Row]:
    """Rows of one case. Hooks do not see what a selective checkpoint caches; the tracker does.

    Otherwise both measure the same bytes, and the tracker takes four times as long; without
    `each_by_both`, it measures only what hooks do not see.
    """
    rows = []
    for recompute in case.recomputes:
        predicted = case.predicted(recompute)
        if recompute != "products":
            rows.append(Row(case.name, recompute, "hooks", case.hooked(recompute), predicted))
        if each_by_both or recompute == "products":
            rows.append(Row(case.name, recompute, "tracker", case.tracked(recompute), predicted))
    return rows


def rows() -> list[Row]:
    """Rows of all cases."""
    return [row for case in CASES for row in case_rows(case)]


def markdown(rows: list[Row]) -> str:
    """A table with one row per case and a last line with mean and largest error."""
    lines = [
        "| block | recompute | by | measured, B | predicted, B | error |",
        "|---|---|---|---:|---:|---:|",
    ]
    lines += [
        f"| {row.case} | {row.recompute} | {row.by} | {row.measured_bytes:,} "
        f"| {row.predicted_bytes:,.0f} | {row.error:+.3%} |"
        for row in rows
    ]
    errors = [abs(row.error) for row in rows]
    blocks = len({row.case for row in rows})
    closing = (
        f"{blocks} block types, {len(rows)} rows: mean error {sum(errors) / len(errors):.3%}, "
        f"max {max(errors):.3%}."
    )
    return "\n".join([*lines, "", closing])


if __name__ == "__main__":
    print(markdown(rows()))
