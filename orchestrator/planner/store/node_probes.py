"""Probed parameters of nodes for predictions: stores results, chooses one for a device or pool.

Does not depend on runs.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from orchestrator.fleet import node_probes
from orchestrator.fleet.models import Node, NodeProbe
from orchestrator.planner.calibration.probe_parameters import (
    calibration_of,
    choose_alike,
    device_of,
    refusal_of,
    widened,
)
from orchestrator.planner.model.calibration_result import Calibration
from orchestrator.planner.store import selectors
from workers.contracts.catalog.devices import DEVICES, Device
from workers.contracts.wire.maintenance.node_probe import NodeProbeReport

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ProbedDevice:
    """What a probe says about a device: its entry, a calibration and its name, and notes."""

    entry: Device
    calibration: Calibration | None = None
    name: str | None = None
    notes: list[str] = field(default_factory=list)


def probe_record(*, node: Node, report: NodeProbeReport) -> NodeProbe:
    """Fit the planner's parameters to a result and store both.

    Raises ValueError for a device that is not in the catalogue and a result of another version.
    """
    if (why := refusal_of(report.to_dict())) is not None:
        raise ValueError(f"Node {node.name}: {why}")
    if report.device not in DEVICES:
        raise ValueError(f"Node {node.name}: {report.device!r} is not in the device catalogue")
    parameters: dict[str, Any] = {"device": device_of(report).to_dict()}
    fitted = calibration_of(report, name=f"probe of {node.name}")
    if fitted is not None:
        parameters["calibration"] = fitted.to_dict()
    return node_probes.result_record(node=node, report=report, parameters=parameters)


def probed_device(*, catalogue: str, pool: str | None = None) -> ProbedDevice | None:
    """The probe that stands for the nodes with this device; None if none was measured.

    Nodes that differ are named in the notes, and intervals are wider; nothing is averaged.
    Results of another version are named and not used.
    """
    rows: list[tuple[NodeProbe, NodeProbeReport]] = []
    notes: list[str] = []
    for row in node_probes.newest_results(catalogue=catalogue, pool=pool):
        why = refusal_of(row.report)
        try:
            if why is None:
                rows.append((row, NodeProbeReport.from_dict(row.report)))
        except ValidationError:
            why = "its probe cannot be read; probe it again"
        if why is not None:
            notes.append(f"Node {row.node.name} is not counted: {why}.")
    if not rows:
        return ProbedDevice(DEVICES[catalogue], notes=notes) if notes else None
    chosen, spread, others = choose_alike([report for _, report in rows])
    row, report = rows[chosen]
    calibration = _calibration(row, notes)
    if others:
        named = ", ".join(rows[index][0].node.name for index in others[:5])
        notes.append(
            f"Nodes differ: {named} multiplies up to {_ratio(spread)} faster or slower than "
            f"{row.node.name}, whose probe is used; the interval is wider."
        )
        calibration = calibration and widened(calibration, spread)
    if report.load > 0.25:
        notes.append(
            f"The probe of {row.node.name} has less weight: other programs used "
            f"{report.load:.0%} of its cores."
        )
    name = f"probe of {row.node.name}, {row.day.day} {row.day:%B %Y}"
    return ProbedDevice(Device.from_dict(row.parameters["device"]), calibration, name, notes)


def usable_default(*, device: str) -> tuple[Calibration | None, str | None, list[str]]:
    """`(calibration, name, notes)` of the device's default calibration.

    One of another version is named in the notes and not used.
    """
    row = selectors.calibration_default(device=device)
    if row is None:
        return None, None, []
    try:
        return Calibration.from_dict(row.document), row.name, []
    except ValueError as error:
        return None, None, [f"The calibration {row.name} is not used: {error}."]


def _calibration(row: NodeProbe, notes: list[str]) -> Calibration | None:
    document = row.parameters.get("calibration")
    if document is None:
        return None
    try:
        return Calibration.from_dict(document)
    except ValueError as error:
        notes.append(f"The probe of {row.node.name} is not used: {error}.")
        return None


def _ratio(spread: float) -> str:
    return f"{2.718281828**spread - 1:.0%}"
