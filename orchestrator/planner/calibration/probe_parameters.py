"""The planner's parameters from a probe of a node: the device's own entry, and a fit to its steps.

Does not depend on where results are stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any, Final

import numpy as np

from orchestrator.planner.calibration.fit import fit
from orchestrator.planner.calibration.least_squares import Floats, jacobian_of
from orchestrator.planner.calibration.measured_parameters import measured_parameters
from orchestrator.planner.calibration.measurements import Pair
from orchestrator.planner.model.calibration_result import Calibration
from orchestrator.planner.model.inputs import table_of
from orchestrator.planner.model.kriging import NO_CORRECTION
from orchestrator.planner.model.parameters import (
    PARAMETERS,
    columns_for,
    defaults,
    fixed_columns,
)
from orchestrator.planner.model.terms import TERMS, Table, leaves
from orchestrator.planner.request_parsing import parse_line
from workers.contracts.catalog.devices import DEVICES, Device
from workers.contracts.wire.maintenance.node_probe import BUSY_SHARE, VERSION, NodeProbeReport

DIFFERS: Final = 0.15  # nodes whose rates differ by more are not alike
_FRAMEWORK = "orrery"
# of a node that was busy: log error per share of its cores that others used
_LOAD_ERROR = 0.3
_STEP_ERROR, _LOOSE, _ROUNDS = 0.03, 2.0, 15  # of the fit's start
_MOST_ERROR = 0.4  # log error of a probe's numbers


def device_of(report: NodeProbeReport) -> Device:
    """The catalogue's entry with the rates of the probe; a GPU keeps its datasheet's.

    Efficiencies relate to the entry, so that a measured rate is divided by its default efficiency.
    """
    entry = DEVICES[report.device]
    if entry.kind != "cpu":
        return entry
    given = defaults(_FRAMEWORK, entry)
    changes: dict[str, Any] = {}
    peaks = _peaks(report)
    if "fp32" in peaks:  # a CPU multiplies fp16 in fp32
        changes["peak_tflops"] = {**entry.peak_tflops, **peaks, "fp16": peaks["fp32"]}
    copies = [rate.value for rate in report.rates if rate.measure == "memory"]
    if copies:
        changes["memory_gb_per_s"] = max(copies) / 1e9 / given["memory_efficiency"]
    if report.link and report.link.get("where") == "intra":
        changes["intra_node_gb_per_s"] = (
            report.link["bytes_per_s"] / 1e9 / given["intra_efficiency"]
        )
    return entry.model_copy(update=changes)


def calibration_of(report: NodeProbeReport, *, name: str) -> Calibration | None:
    """The fit to the probe's training steps; None without any."""
    entry = device_of(report)
    cluster: dict[str, Any] = {
        "device": entry.name if entry == DEVICES[entry.name] else entry.to_dict(),
        "nodes": 1,
        "devices_per_node": report.ranks,
    }
    lines: list[dict[str, Any]] = []
    for number, step in enumerate(report.steps):
        measured: dict[str, Any] = {"step_time_s": step.step_time_s}
        if not number:
            measured |= {"link": report.link} if report.link else {}
            if entry.kind != "cpu" and (peaks := _peaks(report)):
                measured["gemm_tflops"] = max(peaks.values())
        lines.append(
            {
                "id": f"{name}, step {number + 1}",
                "model": step.model,
                "plan": step.plan,
                "cluster": cluster,
                "workload": {"seq_len": step.seq_len},
                "framework": {"name": _FRAMEWORK},
                "measured": measured,
            }
        )
    usable = [parsed for line in lines if (parsed := parse_line(line)).request is not None]
    pairs = [(each.request, each.measured) for each in usable if each.request is not None]
    if not pairs:
        return None
    fitted = fit(pairs, start=_start(pairs))
    if entry.kind == "cpu" and (process := _process_bytes(report, lines)) is not None:
        fitted = replace(
            fitted,
            groups=[
                replace(group, values={**group.values, "process_bytes": process})
                for group in fitted.groups
            ],
        )
    busy = max(0.0, report.load - BUSY_SHARE) * _LOAD_ERROR
    return widened(fitted, busy)


def widened(calibration: Calibration, error: float) -> Calibration:
    """The calibration with wider intervals: `error` in log, added to that of its runs.

    Few steps that contradict each other would make it unbounded; `_MOST_ERROR` bounds it.
    """

    def wider(own: float) -> float:
        return min(float(np.hypot(own, error)), _MOST_ERROR)

    return replace(
        calibration,
        groups=[
            replace(group, scale=wider(group.scale), far=wider(group.far))
            for group in calibration.groups
        ],
    )


def choose_alike(reports: Sequence[NodeProbeReport]) -> tuple[int, float, list[int]]:
    """`(index, spread, others)` of the probe that stands for a pool's nodes.

    The one with the median rate of products, of two the slower one, because a gang waits for its
    slowest rank. `others` differ from it by more than `DIFFERS`; `spread` is the largest log ratio.
    """
    rates = [max(_peaks(report).values(), default=1.0) for report in reports]
    order = sorted(range(len(rates)), key=lambda index: rates[index])
    chosen = order[(len(order) - 1) // 2]
    apart = [abs(float(np.log(rate / rates[chosen]))) for rate in rates]
    return chosen, max(apart), [index for index, each in enumerate(apart) if each > DIFFERS]


def refusal_of(document: dict[str, Any]) -> str | None:
    """Why a stored report cannot be used, or None."""
    if document.get("version") != VERSION:
        return f"its probe is of version {document.get('version')!r}, not {VERSION}; probe it again"
    return None


def _start(pairs: Sequence[Pair]) -> dict[str, float]:
    """Values at which the model meets the steps: least squares in log, by Gauss-Newton.

    All steps are medians of one device in one minute, so none is treated as an outlier, as runs
    of different times are, and parameters may leave their defaults further.
    """
    requests = [request for request, _ in pairs]
    given = defaults(_FRAMEWORK, requests[0].entry) | measured_parameters(pairs)
    names = sorted(leaves(TERMS, ["step_time_s"]) & set(PARAMETERS))
    table = table_of(
        requests, {**NO_CORRECTION, **{name: np.asarray(value) for name, value in given.items()}}
    )
    fixed = fixed_columns(table, "step_time_s", set(names))
    times = np.array([measured["step_time_s"] for _, measured in pairs])

    def residuals(x: Floats) -> Floats:
        moved = Table({**fixed, **dict(zip(names, np.exp(x), strict=True))}, table.n)
        return np.asarray(np.log(moved.column("step_time_s") / times))

    first = np.log(np.array([given[name] for name in names]))
    low = np.log(np.array([PARAMETERS[name].low for name in names]))
    high = np.log(np.array([PARAMETERS[name].high for name in names]))
    prior = 1 / (_LOOSE * np.array([PARAMETERS[name].sigma for name in names])) ** 2
    x = first
    for _ in range(_ROUNDS):
        r = residuals(x)
        slopes = jacobian_of(residuals, x, r, 1e-3, low, high)
        normal = slopes.T @ slopes / _STEP_ERROR**2 + np.diag(prior)
        gradient = slopes.T @ r / _STEP_ERROR**2 + prior * (x - first)
        x = np.clip(x - np.clip(np.linalg.solve(normal, gradient), -0.5, 0.5), low, high)
    return dict(zip(names, np.exp(x).tolist(), strict=True))


def _peaks(report: NodeProbeReport) -> dict[str, float]:
    """TFLOP/s of the fastest product by precision."""
    peaks: dict[str, float] = {}
    for rate in report.rates:
        if rate.measure == "matmul":
            precision = rate.setting.rsplit(" ", 1)[-1]
            peaks[precision] = max(peaks.get(precision, 0.0), rate.value / 1e12)
    return peaks


def _process_bytes(report: NodeProbeReport, lines: Sequence[dict[str, Any]]) -> float | None:
    """Resident memory beyond the tensors that the planner counts, of the first run."""
    sizes = []
    for step, line in zip(report.steps, lines, strict=True):
        request = parse_line(line).request
        if step.peak_bytes is None or request is None:
            continue
        table = table_of([request], columns_for([request]))
        sizes.append(step.peak_bytes - float(table.column("explained_bytes").max()))
    limits = PARAMETERS["process_bytes"]
    return float(np.clip(median(sizes), limits.low, limits.high)) if sizes else None
