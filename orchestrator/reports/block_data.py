"""The data that blocks draw: read now, or frozen with the version that first had the block."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

from orchestrator.accounts.models import User
from orchestrator.common import clock
from orchestrator.common.errors import Refusal, invalid
from orchestrator.reports.blocks import Block
from orchestrator.reports.models import FrozenPanel, Report
from orchestrator.reports.panel_blocks import (
    live_panels,
    panel_runs,
    panel_spec,
    read_panels,
    without_runs,
)
from orchestrator.reports.readers import Readers, reader
from orchestrator.reports.run_tables import check_table, read_table

MOST_BYTES: Final = 8_000_000  # of a frozen block


@dataclass(frozen=True, slots=True)
class BlockData:
    """What a block shows. `problem`: why it cannot be drawn, `where`: the query with a caret below
    the place; `hidden`: runs that are left out.
    """

    block: Block
    data: dict[str, Any] = field(default_factory=dict)
    hidden: int = 0
    frozen: datetime | None = None
    problem: str = ""
    where: str = ""


def check(blocks: Iterable[Block]) -> None:
    """Raise 422, with the line, for a block whose fields are wrong."""
    for block in blocks:
        try:
            _check(block)
        except Refusal as refusal:
            raise _at(block, refusal) from None


def freeze(*, report: Report, blocks: Sequence[Block], by: User) -> None:
    """Store the data of the frozen blocks that the report does not have yet.

    Raises 422 for a block whose data cannot be read.
    """
    wanted = {block.key: block for block in blocks if block.frozen}
    known = FrozenPanel.objects.filter(report=report, key__in=wanted)
    for key in known.values_list("key", flat=True):
        del wanted[key]
    for block in wanted.values():
        try:
            data = _read(block, reader(by))
        except Refusal as refusal:
            raise _at(block, refusal) from None
        if len(json.dumps(data)) > MOST_BYTES:
            message = f"line {block.line}: its data are larger than {MOST_BYTES // 1_000_000} MB"
            raise invalid("text", message, "Show fewer runs, metrics or images.")
        FrozenPanel.objects.get_or_create(
            report=report,
            key=block.key,
            defaults={
                "data": data,
                "runs": sorted(_run_ids(block, data)),
                "by": by,
                "created": clock.now(),
            },
        )


def stored_blocks(*, report: Report | None, blocks: Iterable[Block]) -> dict[str, FrozenPanel]:
    """`{key: data}` of the frozen blocks; one query."""
    keys = [block.key for block in blocks if block.frozen]
    if report is None or not keys:
        return {}
    return {row.key: row for row in FrozenPanel.objects.filter(report=report, key__in=keys)}


def read(*, block: Block, readers: Readers, stored: FrozenPanel | None = None) -> BlockData:
    """What the readers see of a block: its stored data, or else those of now."""
    if block.problem:
        return BlockData(block, problem=block.problem)
    try:
        if stored is None:
            return BlockData(block, _live(block, readers))
    except Refusal as refusal:
        if readers.anonymous:  # names of metrics may be in the sentence
            return BlockData(block, problem="it cannot be read")
        where = refusal.detail.partition("\n")[2]
        return BlockData(block, problem=_message(refusal), where=where)
    seen = readers.seen(stored.runs)
    hidden = len(stored.runs) - len(seen)
    data = _without(block, stored.data, seen) if hidden else stored.data
    return BlockData(block, data, hidden, stored.created)


def _check(block: Block) -> None:
    if block.kind == "runs":
        check_table(block.body)
    else:
        panel_spec(block.body)


def _read(block: Block, readers: Readers) -> dict[str, Any]:
    """All data of the block."""
    if block.kind == "runs":
        return read_table(block.body, readers)
    return read_panels(block.body, readers)


def _live(block: Block, readers: Readers) -> dict[str, Any]:
    """What a page needs of a live block: browsers of people who are logged in read panels' data."""
    if block.kind == "panel" and not readers.anonymous:
        return live_panels(block.body, readers)
    return _read(block, readers)


def _run_ids(block: Block, data: dict[str, Any]) -> set[int]:
    """The runs whose data these are."""
    if block.kind == "panel":
        return panel_runs(data)
    return {int(row["run"]) for row in data["rows"]}


def _without(block: Block, data: dict[str, Any], seen: frozenset[int]) -> dict[str, Any]:
    """The data of the runs in `seen` alone."""
    if block.kind == "panel":
        return without_runs(data, seen)
    return {**data, "rows": [row for row in data["rows"] if row["run"] in seen]}


def _at(block: Block, refusal: Refusal) -> Refusal:
    hint = refusal.errors[0]["hint"] if refusal.errors else ""
    return invalid("text", f"line {block.line}: {_message(refusal)}", hint)


def _message(refusal: Refusal) -> str:
    """The refusal's sentence without the name of the field."""
    return refusal.errors[0]["message"] if refusal.errors else refusal.detail
