"""Tunes launch configurations by measurement in a run's remaining time, and ships the results.

`python -m kernels.gpu.tune FILE` merges a run's rows of kind "tuned" into
`kernels/tables/<arch>.json`. Does not depend on any operation.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from kernels import tuning
from kernels.gpu.timing import Timer

BETTER = 0.97  # of the default's time: less is within the spread of rounds
TABLES = Path(tuning.__file__).parent / "tables"


def tune(
    call: Callable[[], object], timer: Timer, left_s: Callable[[], float]
) -> list[dict[str, Any]]:
    """Measures the candidates of the operations behind `call`, one operation after the other, and
    saves faster ones whose results are those of the default.

    Returns a row {op, bucket, values, ms, default_ms} for each operation, with values {} if none
    was faster. Saved values are stored in the user's cache. Stops when less than 5 s are left.
    """
    with tuning.record_lookups() as args:
        expected = _results(call)
    rows = []
    for op, facts in {(op, tuning.bucket(facts)): (op, facts) for op, facts in args}.values():
        best: tuning.Config = {}
        candidates = tuning.candidates_for(op, facts)
        if not candidates:
            continue
        default = lowest = timer.together({"": call})[""].ms
        for values in candidates:
            if left_s() < 5:
                break
            with tuning.override(op, **values):
                try:
                    if not _agree(_results(call), expected):
                        continue
                    ms = timer.together({"": call}, round_s=0.02)[""].ms
                except Exception:  # too many registers or too much shared memory for this GPU
                    torch.cuda.synchronize()
                    continue
            if ms < lowest:
                best, lowest = values, ms
        if lowest > BETTER * default:
            best, lowest = {}, default
        else:
            tuning.save(op, facts, best)
        row = {
            "op": op,
            "bucket": tuning.bucket(facts),
            "values": best,
            "ms": lowest,
            "default_ms": default,
        }
        rows.append(row)
    return rows


def _results(call: Callable[[], object]) -> list[torch.Tensor]:
    """Copies of the tensors that a call returns; of none if it works in place."""
    returned = call()
    every = returned if isinstance(returned, (tuple, list)) else (returned,)
    return [each.detach().clone() for each in every if isinstance(each, torch.Tensor)]


def _agree(results: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    """Whether sums in another order explain the differences."""
    for one, other in zip(results, expected, strict=True):
        wide = other.float()
        most = wide[wide.isfinite()].abs().amax() if wide.numel() else wide.new_zeros(())
        if not torch.allclose(
            one.float(), wide, rtol=2e-2, atol=float(most) * 2e-2, equal_nan=True
        ):
            return False
    return True


def ship(rows: list[dict[str, Any]], tables: Path) -> Path:
    """Merges a run's "tuned" rows into the table of its architecture; returns the table's path."""
    arch = next(row["arch"] for row in rows if row["kind"] == "machine")
    path = tables / f"{arch}.json"
    table = json.loads(path.read_text()) if path.exists() else {"configs": {}, "order": {}}
    for row in rows:
        if row["kind"] == "tuned" and row["values"]:
            table["configs"].setdefault(row["op"], {})[row["bucket"]] = row["values"]
    path.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")
    return path


def main() -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(
        prog="python -m kernels.gpu.tune", description="Ships the faster configurations of a run."
    )
    parser.add_argument("file", type=Path, help="docs/results/gpu-….json")
    args = parser.parse_args()
    print(ship(json.loads(args.file.read_text())["rows"], TABLES))
    return 0


if __name__ == "__main__":
    sys.exit(main())
