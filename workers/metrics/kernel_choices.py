"""What of `kernels` ran in this process, and why, as an event's data: a row a kind of call.

Knows the words of choices; does not know what a run computes.
"""

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

    `runtime` is how own kernels run on `device`: gpu, interpret, or reference (not at all). `call`
    tells a kind of call
    in words, sizes as what they are tuned by: powers of two. Not `fused`: formulas ran as they are
    written, step by
    step, and nothing was chosen.
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
    """ "bfloat16, head_dim 128, causal": flags that hold by their names, numbers and words with
    them.
    """
    told = []
    for name, value in facts.items():
        if value is True:
            told.append(str(name))
        elif value not in (None, False):
            told.append(str(value) if name in ("dtype", "device") else f"{name} {value}")
    return ", ".join(told)


def _triton() -> str | None:
    """Its version without loading it."""
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return None
