"""Decoded telemetry that has not been stored yet."""

from __future__ import annotations

from dataclasses import dataclass, field

from orchestrator.telemetry.packing.chunks import Block
from orchestrator.telemetry.writing.cursors import Writer
from orchestrator.telemetry.writing.lines import Lines
from workers.contracts.wire.points import RunEvent


@dataclass(slots=True)
class Incoming:
    """Points, events and log lines by writer; a writer may occur several times."""

    points: list[tuple[Writer, Block]] = field(default_factory=list)
    events: list[tuple[Writer, list[RunEvent]]] = field(default_factory=list)
    lines: list[tuple[Writer, Lines]] = field(default_factory=list)
    # first and last of numbers that were dropped on the node or could not be read
    lost_points: list[tuple[Writer, tuple[int, int]]] = field(default_factory=list)
    lost_events: list[tuple[Writer, tuple[int, int]]] = field(default_factory=list)

    def run_ids(self) -> set[int]:
        """Ids of all runs with data."""
        return {writer.run_id for writer, _ in (*self.points, *self.events, *self.lines)}
