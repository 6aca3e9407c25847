"""What a set of measured runs covers, and the added uncertainty of plans outside it.

Used for calibrations and default profiles. Does not predict anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from orchestrator.planner.model.columns.codes import OFFLOAD, PRECISION, RECOMPUTE, SCHEDULE
from orchestrator.planner.model.terms import Table

Floats = NDArray[np.float64]

# label, and the log error that each doubling beyond the runs adds. Left-out widths and tensor
# parallel degrees of published runs need 0.05 to 0.08 (docs/planner-accuracy.md); lengths, depths,
# micro-batches and devices almost nothing on top of the uncertainty of the parameters
RANGES: dict[str, tuple[str, float]] = {
    "hidden": ("hidden size", 0.05),
    "layers": ("layers", 0.005),
    "seq_len": ("sequence length", 0.01),
    "rank_tokens": ("tokens of a micro-batch", 0.02),
    "devices": ("devices", 0.01),
    "tp": ("tp", 0.05),
    "pp": ("pp", 0.01),
    "dp": ("dp", 0.005),
    "cp": ("cp", 0.03),
    "ep": ("ep", 0.03),
    "zero": ("zero", 0.02),
}
# log error that each unmeasured kind adds: published runs predicted from those with the other
# recomputation need 0.04 to 0.07
UNSEEN_KIND = 0.06
_NAMES: dict[str, dict[int, str]] = {
    "attention": {
        0: "unfused attention",
        1: "fused attention",
        2: "latent attention",
        3: "factorized attention",
    },
    "experts": {0: "a dense model", 1: "routed experts"},
    "recompute": {code: f"recompute {name}" for name, code in RECOMPUTE.items()},
    "schedule": {code: f"schedule {name}" for name, code in SCHEDULE.items()},
    "precision": {code: f"precision {name}" for name, code in PRECISION.items()},
    "offload": {code: f"offload {name}" for name, code in OFFLOAD.items()},
}


@dataclass(frozen=True)
class Coverage:
    """`ranges` of numeric columns (low, high) and `kinds` of categorical ones (codes).

    Empty: coverage is unknown.
    """

    ranges: Mapping[str, list[float]] = field(default_factory=dict)
    kinds: Mapping[str, list[int]] = field(default_factory=dict)

    def outside(self, table: Table) -> dict[str, Floats]:
        """Doublings that each plan is beyond the runs, `(n,)` per name."""
        doublings = {}
        for name, (low, high) in self.ranges.items():
            value = np.maximum(table.column(name), 0.5)
            doublings[name] = np.asarray(
                np.log2(np.maximum(np.maximum(max(low, 0.5) / value, value / max(high, 0.5)), 1))
            )
        return doublings

    def unseen(self, table: Table) -> dict[str, NDArray[np.bool_]]:
        """Whether each plan is of a kind that no run has, `(n,)` per name."""
        codes = kind_codes(table)
        return {
            name: (codes[name] >= 0) & ~np.isin(codes[name], seen)
            for name, seen in self.kinds.items()
            if name in codes
        }

    def variance(self, table: Table) -> Floats:
        """The variance of log step time that the distance from the runs adds, `(n,)`."""
        far = [
            (RANGES[name][1] * doublings) ** 2 for name, doublings in self.outside(table).items()
        ]
        new = [UNSEEN_KIND**2 * unseen for unseen in self.unseen(table).values()]
        return np.asarray(sum([*far, *new], np.zeros(table.n)), np.float64)

    def describe_outside(self, table: Table, row: int) -> list[str]:
        """Messages on what of one plan no run covers."""
        messages = [
            f"{RANGES[name][0]} {table.column(name)[row]:g} is outside the measured "
            f"{self.ranges[name][0]:g} to {self.ranges[name][1]:g}"
            for name, doublings in self.outside(table).items()
            if doublings[row] > 0
        ]
        codes = kind_codes(table)
        for name, unseen in self.unseen(table).items():
            if unseen[row]:
                seen = ", ".join(_NAMES[name][code] for code in self.kinds[name])
                messages.append(
                    f"no measured run has {_NAMES[name][int(codes[name][row])]} (they have {seen})"
                )
        return messages


def coverage_of(table: Table) -> Coverage:
    """The coverage of the table's plans."""
    ranges = {
        name: [float(table.column(name).min()), float(table.column(name).max())] for name in RANGES
    }
    kinds = {
        name: sorted({int(code) for code in codes} - {-1})
        for name, codes in kind_codes(table).items()
    }
    return Coverage(ranges, {name: codes for name, codes in kinds.items() if codes})


def kind_codes(table: Table) -> dict[str, Floats]:
    """Codes of each plan's kinds `(n,)`; -1 if not applicable."""
    flash, cpu = table.column("flash"), table.column("is_cpu")
    precision = table.column("precision")
    attention = np.where(
        table.column("is_mla") > 0, 2.0, np.where(table.column("is_mfa") > 0, 3.0, flash)
    )
    # on GPUs both 16-bit precisions run the same kernels
    is_fp16 = (precision == PRECISION["fp16"]) & (cpu == 0)
    return {
        "attention": np.asarray(attention),
        "experts": np.asarray(table.column("experts") > 0, float),
        "recompute": table.column("recompute"),
        "offload": table.column("offload"),
        "schedule": np.where(table.column("pp") > 1, table.column("schedule"), -1.0),
        "precision": np.where(is_fp16, PRECISION["bf16"], precision),
    }
