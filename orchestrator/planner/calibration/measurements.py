"""Reads measured runs: step times and peak memory from the `measured` field of request lines.

Skips unusable lines with a reason. Does not fit anything.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from orchestrator.planner.model.inputs import Request
from orchestrator.planner.model.terms import Column, Table
from orchestrator.planner.plan_request import ParseOptions
from orchestrator.planner.request_parsing import parse_line

Pair: TypeAlias = tuple[Request, Mapping[str, Any]]

# their logs also count recomputed operations (arXiv 2104.04473, eq. 3; Megatron-LM until 2023)
_COUNTS_RECOMPUTATION = frozenset({"megatron", "megatron-deepspeed"})
_PEAK_KINDS = {"fsdp2": "reserved"}  # torchtitan's metrics; other logs and tools: allocated
MEMORY_KEYS = ("peak_bytes", "peak_reserved_bytes")
_KEYS = ("step_time_s", "tokens_per_s_per_device", "tflops_per_device", *MEMORY_KEYS)


@dataclass(frozen=True)
class Measurements:
    """Usable measurements in their order, and line, id and reason of each skipped line."""

    pairs: list[Pair] = field(default_factory=list)
    left_out: list[dict[str, Any]] = field(default_factory=list)


def read_measurements(lines: Iterable[Any], options: ParseOptions | None = None) -> Measurements:
    """From measurement lines or `(request, measured)` pairs."""
    result = Measurements()
    for number, line in enumerate(lines, 1):
        if isinstance(line, tuple):
            request, measured = line
            id_, reason = request.id, ""
        else:
            parsed = parse_line(line, options)
            request, measured, id_ = parsed.request, parsed.measured, parsed.id
            reason = "; ".join(str(item) for item in parsed.problems)
        if not reason and not is_usable(measured):
            reason = f"no measured value: one of {', '.join(_KEYS)}, out_of_memory is required"
        if reason or request is None:
            result.left_out.append({"line": number, "id": id_, "message": reason})
        else:
            result.pairs.append((request, measured))
    return result


def is_usable(measured: Mapping[str, Any]) -> bool:
    """Whether a measurement has a usable number or reports an out-of-memory error."""
    return bool(measured_numbers(measured)) or measured.get("out_of_memory") is True


def measured_numbers(measured: Mapping[str, Any]) -> dict[str, float]:
    """The positive finite numbers of a measurement."""
    return {key: float(measured[key]) for key in _KEYS if _positive(measured.get(key))}


def step_times(pairs: Sequence[Pair], table: Table) -> Column:
    """Measured seconds per step `(n,)`, from whichever number is present; nan without one.

    `tflops_per_device` counts model FLOPs, except in Megatron's logs, which count recomputation;
    `measured.flops` ("model" or "hardware") overrides this.
    """
    tokens, devices = table.column("step_tokens"), table.column("devices")
    model, hardware = table.column("model_flops"), table.column("hardware_flops")
    seconds = np.full(len(pairs), np.nan)
    for row, (request, measured) in enumerate(pairs):
        numbers = measured_numbers(measured)
        if "step_time_s" in numbers:
            seconds[row] = numbers["step_time_s"]
        elif "tokens_per_s_per_device" in numbers:
            seconds[row] = tokens[row] / devices[row] / numbers["tokens_per_s_per_device"]
        elif "tflops_per_device" in numbers:
            default = "hardware" if request.framework.name in _COUNTS_RECOMPUTATION else "model"
            flops = hardware if measured.get("flops", default) == "hardware" else model
            seconds[row] = flops[row] / devices[row] / (numbers["tflops_per_device"] * 1e12)
    return seconds


def peaks(pairs: Sequence[Pair]) -> Column:
    """Measured peak bytes `(n,)`, allocated or reserved; nan without a measurement."""
    numbers = [measured_numbers(measured) for _, measured in pairs]
    return np.array(
        [each.get("peak_bytes", each.get("peak_reserved_bytes", np.nan)) for each in numbers]
    )


def reports_reserved(pairs: Sequence[Pair]) -> Column:
    """Whether each run's peak counts reserved instead of allocated bytes, `(n,)`.

    `measured.peak_kind` ("allocated" or "reserved") says so, or the key `peak_reserved_bytes`;
    without either the framework's usual report counts (torchtitan: reserved).
    """
    return np.array(
        [
            "peak_bytes" not in measured_numbers(measured)
            if "peak_reserved_bytes" in measured_numbers(measured)
            else measured.get("peak_kind", _PEAK_KINDS.get(request.framework.name)) == "reserved"
            for request, measured in pairs
        ],
        bool,
    )


def out_of_memory(pairs: Sequence[Pair]) -> Column:
    """Whether each run ended with an out-of-memory error, `(n,)`."""
    return np.array([measured.get("out_of_memory") is True for _, measured in pairs], bool)


def _positive(value: Any) -> bool:
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and math.isfinite(value)
        and value > 0
    )
