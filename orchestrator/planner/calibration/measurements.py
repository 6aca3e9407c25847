"""Measured runs as numbers to compare with: what of a line's `measured` says how long a step took
and what it held.

Reads leniently and says why a line is left out. Fits nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from orchestrator.planner.model.inputs import Request
from orchestrator.planner.model.terms import Column, Table
from orchestrator.planner.requests import Choices, read

Pair: TypeAlias = tuple[Request, Mapping[str, Any]]

# their logs counted recomputed operations too (arXiv 2104.04473, eq. 3; Megatron-LM until 2023)
_COUNT_RECOMPUTATION = frozenset({"megatron", "megatron-deepspeed"})
_KEYS = ("step_time_s", "tokens_per_s_per_device", "tflops_per_device", "peak_bytes")


@dataclass(frozen=True)
class Read:
    """Usable measurements in their order, and for each line left out its place, id and reason."""

    pairs: list[Pair] = field(default_factory=list)
    left_out: list[dict[str, Any]] = field(default_factory=list)


def read_lines(lines: Iterable[Any], choices: Choices | None = None) -> Read:
    """Lines as in INTERFACES section 4 (or pairs read before).

    A line without a usable number is left out, and told.
    """
    found = Read()
    for place, line in enumerate(lines):
        if isinstance(line, tuple):
            request, measured = line
            id_, reason = request.id, ""
        else:
            asked = read(line, choices)
            request, measured, id_ = asked.request, asked.measured, asked.id
            reason = "; ".join(str(each) for each in asked.problems)
        if not reason and not (usable(measured) or measured.get("out_of_memory") is True):
            reason = f"nothing is measured: wanted is one of {', '.join(_KEYS)}, out_of_memory"
        if reason or request is None:
            found.left_out.append({"line": place + 1, "id": id_, "message": reason})
        else:
            found.pairs.append((request, measured))
    return found


def usable(measured: Mapping[str, Any]) -> dict[str, float]:
    """The positive finite numbers among what is measured."""
    return {key: float(measured[key]) for key in _KEYS if _positive(measured.get(key))}


def step_times(pairs: Sequence[Pair], table: Table) -> Column:
    """Measured seconds per step `(n,)`, from whichever number is there; nan where none says it.

    `tflops_per_device` are model FLOPs; Megatron's logs counted recomputation, which
    `measured.flops` ("model" or
    "hardware") may say otherwise.
    """
    tokens, devices = table.column("step_tokens"), table.column("devices")
    model, hardware = table.column("model_flops"), table.column("hardware_flops")
    found = np.full(len(pairs), np.nan)
    for row, (request, measured) in enumerate(pairs):
        numbers = usable(measured)
        if "step_time_s" in numbers:
            found[row] = numbers["step_time_s"]
        elif "tokens_per_s_per_device" in numbers:
            found[row] = tokens[row] / devices[row] / numbers["tokens_per_s_per_device"]
        elif "tflops_per_device" in numbers:
            own = "hardware" if request.framework.name in _COUNT_RECOMPUTATION else "model"
            flops = hardware if measured.get("flops", own) == "hardware" else model
            found[row] = flops[row] / devices[row] / (numbers["tflops_per_device"] * 1e12)
    return found


def peaks(pairs: Sequence[Pair]) -> Column:
    """Measured peak bytes `(n,)`; nan where not measured."""
    return np.array([usable(measured).get("peak_bytes", np.nan) for _, measured in pairs])


def ran_out(pairs: Sequence[Pair]) -> Column:
    """Where a run ended for want of memory, `(n,)`."""
    return np.array([measured.get("out_of_memory") is True for _, measured in pairs], bool)


def _positive(value: Any) -> bool:
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and math.isfinite(value)
        and value > 0
    )
