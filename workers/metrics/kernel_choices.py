"""The implementations that `kernels` chose in this process, with reasons, as an event's data."""

from __future__ import annotations

import importlib.metadata
from typing import Any

import torch

from kernels import runtime
from kernels.dispatch import clear_records, explain

EVENT = "kernels_chosen"
MOST_ROWS = 64

__all__ = ["EVENT", "clear_records", "kernels_chosen"]


def kernels_chosen(device: torch.device, *, fused: bool = True) -> dict[str, Any]:
    """`{fused, runtime, arch, torch, triton, operations: [{op, call, backend, reason}], left_out}`
    since `clear_records`.

    `runtime` is how own kernels run on `device`: gpu, interpret, or reference (none run). `call`
    describes a kind of call, with sizes rounded to powers of two as for tuning. If not `fused`,
    plain torch operations ran and nothing was chosen.
    """
    rows = explain() if fused else []
    return {
        "fused": fused,
        "runtime": runtime.mode(device),
        "arch": runtime.arch(device),
        "torch": torch.__version__,
        "triton": _triton(),
        "operations": [
            {
                "op": row["op"],
                "call": _call(row["facts"]),
                "backend": row["backend"],
                "reason": row["reason"],
            }
            for row in rows[:MOST_ROWS]
        ],
        "left_out": max(0, len(rows) - MOST_ROWS),
    }


def _call(facts: Any) -> str:
    """A call as text: `bfloat16, head_dim 128, causal`."""
    labels = []
    for name, value in facts.items():
        if value is True:
            labels.append(str(name))
        elif value not in (None, False):
            labels.append(str(value) if name in ("dtype", "device") else f"{name} {value}")
    return ", ".join(labels)


def _triton() -> str | None:
    """Triton's version, without importing it."""
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return None
