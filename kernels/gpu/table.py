"""`python -m kernels.gpu.table`: writes the table of goals in kernels/README.md from
docs/results/gpu-*.json.

A goal is met if the newest run that measured it met it in every case. `--check` only checks whether
the table is up to date. Needs no GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from kernels.gpu.goals import GOALS, Goal

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "kernels" / "README.md"
RESULTS = ROOT / "docs" / "results"
BEGIN, END = "<!-- goals: made by python -m kernels.gpu.table -->", "<!-- end of goals -->"

Row = dict[str, Any]


def table(results: Path) -> str:
    """The table in Markdown: each goal, its measurement, and whether it is met, missed or open."""
    runs = [_read(path) for path in sorted(results.glob("gpu-*.json*"))]
    lines = [
        (
            "| operation | peer | goal | measured | bytes, FLOPs | bound, share of the measured "
            "limit "
            "| state |"
        ),
        "|---|---|---|---|---|---|---|",
    ]
    cells = [_line(goal, _newest(goal, runs)) for goal in GOALS.values()]
    lines += [f"| {' | '.join(line)} |" for line in cells]
    measured = [line for line in cells if line[-1] != "open"]
    machines = sorted(
        {_machine(run) for run in runs if any(_rows(goal, run) for goal in GOALS.values())}
    )
    if not measured:
        closing = "No goal has been measured yet: all are open. `make gpu` measures them."
    else:
        closing = (
            f"{len(measured)} of {len(GOALS)} measured, on {'; '.join(machines)}; the "
            "others are open."
        )
    return "\n".join([*lines, "", closing])


def _read(path: Path) -> list[Row]:
    """A run's rows, also of a run that was aborted before it wrote its document."""
    text = path.read_text()
    if path.suffix == ".json":
        rows: list[Row] = json.loads(text)["rows"]
        return rows
    # the last line may be truncated
    return [json.loads(line) for line in text.splitlines() if line.endswith("}")]


def _rows(goal: Goal, run: list[Row]) -> list[Row]:
    key = "linear-cross-entropy" if goal.metric == "extra_gib" else goal.key
    return [row for row in run if row["kind"] == "bench" and row["goal"] == key]


def _newest(goal: Goal, runs: list[list[Row]]) -> list[Row]:
    return next((rows for run in reversed(runs) if (rows := _rows(goal, run))), [])


def _machine(run: list[Row]) -> str:
    row = next(row for row in run if row["kind"] == "machine")
    return f"{row['device']}, torch {row['torch']}, triton {row['triton']}, {row['date'][:10]}"


def _line(goal: Goal, rows: list[Row]) -> list[str]:
    first = [goal.operation, goal.peer, goal.message]
    cases: dict[str, list[Row]] = {}
    for row in rows:
        if goal.metric != "ratio" or row["ratio"] is not None:
            cases.setdefault(row["case"], []).append(row)
    if not cases:
        return [*first, "not measured", "", "", "open"]
    measurements, met, work, shares = [], [], [], []
    for case, case_rows in cases.items():
        value, text = _value(goal, case_rows)
        met.append(
            goal.met(
                value,
                max(case_rows[0]["spread"], *(r["peer_spread"] or 0.0 for r in case_rows), 0.0),
            )
        )
        work.append(
            f"{case_rows[0]['bytes'] / 1e9:.3g} GB, {case_rows[0]['flops'] / 1e9:.3g} GFLOP"
        )
        measurements.append(f"{case}: {text}" if len(cases) > 1 else text)
        fraction = case_rows[0]["fraction"]
        shares.append(case_rows[0]["bound"] + (f", {fraction:.0%}" if fraction is not None else ""))
    state = "met" if all(met) else "missed"
    return [
        *first,
        "; ".join(measurements),
        "; ".join(dict.fromkeys(work)),
        "; ".join(dict.fromkeys(shares)),
        state,
    ]


def _value(goal: Goal, rows: list[Row]) -> tuple[float, str]:
    row = rows[0]
    if goal.metric == "ratio":
        row = min(rows, key=lambda r: float(r["ratio"]))
        return float(row["ratio"]), f"{row['ratio']:.2f}× {row['peer']} ({row['ms']:.3f} ms)"
    if goal.metric == "ms":
        return float(row["ms"]), f"{row['ms']:.1f} ms"
    if goal.metric == "extra_gib":
        gib = row["extra_bytes"] / 2**30
        return gib, f"{gib:.2f} GiB"
    peers = ", ".join(f"{r['ratio']:.2f}× {r['peer']}" for r in rows if r["peer"])
    return float(row["gb_per_s"]), f"{row['gb_per_s'] / 1e3:.2f} TB/s" + (
        f" ({peers})" if peers else ""
    )


def render_readme(text: str, results: Path) -> str:
    """The README's text with its table rewritten. Raises ValueError without the table's marks."""
    before, _, rest = text.partition(BEGIN)
    _, has_end, after = rest.partition(END)
    if not has_end:
        raise ValueError(
            f"kernels/README.md has no place for the table: it needs the lines {BEGIN!r} and "
            f"{END!r}."
        )
    return f"{before}{BEGIN}\n{table(results)}\n{END}{after}"


def main() -> int:
    """Runs the command; returns 1 if `--check` finds an outdated table."""
    parser = argparse.ArgumentParser(
        prog="python -m kernels.gpu.table", description="Writes the table of goals."
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="exit 1 when the table is not up to date; write nothing",
    )
    args = parser.parse_args()
    text = README.read_text()
    expected = render_readme(text, RESULTS)
    if expected == text:
        return 0
    if args.check:
        print(
            "kernels/README.md is behind docs/results; run python -m kernels.gpu.table.",
            file=sys.stderr,
        )
        return 1
    README.write_text(expected)
    return 0


if __name__ == "__main__":
    sys.exit(main())
