"""Activation bytes of one layer, predicted and measured, for every block type: rows of the
planner's accuracy report.

Measures on fake tensors, so it needs no memory and little time. Writes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.orchestrator.planner.model.activations.cases import CASES, Case


@dataclass(frozen=True)
class Row:
    """`recompute`: none, core or products (the two kinds of selective), full.

    `by`: hooks or tracker.
    """

    case: str
    recompute: str
    by: str
    measured_bytes: int
    predicted_bytes: float

    @property
    def error(self) -> float:
        """Signed, as a fraction of what was measured."""
        return self.predicted_bytes / self.measured_bytes - 1


def case_rows(case: Case) -> list[Row]:
    """Hooks do not see what a selective checkpoint caches: those are left to the tracker."""
    rows = []
    for recompute in case.recomputes:
        predicted = case.predicted(recompute)
        if recompute != "products":
            rows.append(Row(case.name, recompute, "hooks", case.hooked(recompute), predicted))
        rows.append(Row(case.name, recompute, "tracker", case.tracked(recompute), predicted))
    return rows


def rows() -> list[Row]:
    return [row for case in CASES for row in case_rows(case)]


def markdown(found: list[Row]) -> str:
    """A table with a row a case, and its closing line with mean and largest error."""
    lines = [
        "| block | recompute | by | measured, B | predicted, B | error |",
        "|---|---|---|---:|---:|---:|",
    ]
    lines += [
        f"| {row.case} | {row.recompute} | {row.by} | {row.measured_bytes:,} | {row.predicted_bytes:,.0f} "
        f"| {row.error:+.3%} |"
        for row in found
    ]
    sizes = [abs(row.error) for row in found]
    blocks = len({row.case for row in found})
    closing = f"{blocks} block types, {len(found)} rows: mean error {sum(sizes) / len(sizes):.3%}, max {max(sizes):.3%}."
    return "\n".join([*lines, "", closing])


if __name__ == "__main__":
    print(markdown(rows()))
