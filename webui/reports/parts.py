"""The parts of a report as its templates draw them: text, panels and run tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django.conf import settings
from django.templatetags.static import static

from orchestrator.panels.spec import PanelSpec
from orchestrator.reports import block_data
from orchestrator.reports.block_data import BlockData
from orchestrator.reports.readers import Readers
from webui.panels.panel_cards import PanelCard, panel_card
from webui.presentation import formatting
from webui.reports.text import Part, render_report


def report_parts(*, text: str, readers: Readers, report: Any = None) -> dict[str, Any]:
    """`{parts, headings, plotly}`; `report` None: nothing is frozen yet."""
    rendered = render_report(
        text, runs=lambda ids: _mentioned(ids, readers), public=readers.anonymous
    )
    blocks = [part.block for part in rendered.parts if part.block is not None]
    stored = block_data.stored_blocks(report=report, blocks=blocks)
    return {
        "parts": [_part(part, readers, stored) for part in rendered.parts],
        "headings": rendered.headings if len(rendered.headings) > 2 else [],
        "plotly": static(f"plotly/{settings.PLOTLY_BUNDLE}"),
    }


def _mentioned(ids: set[int], readers: Readers) -> Mapping[int, Any]:
    if not ids:
        return {}
    return {run.pk: run for run in readers.visible_runs().filter(pk__in=ids)}


def _part(part: Part, readers: Readers, stored: Mapping[str, Any]) -> dict[str, Any]:
    block = part.block
    if block is None:
        return {"html": part.html}
    data = block_data.read(block=block, readers=readers, stored=stored.get(block.key))
    return block_part(data)


def block_part(shown: BlockData) -> dict[str, Any]:
    """A block as `reports/block.html` draws it."""
    block = shown.block
    return {
        "block": block,
        "shown": shown,
        "unsaved": block.frozen and shown.frozen is None,
        "table": _table(shown) if block.kind == "runs" and shown.data else None,
        "cards": _cards(shown) if block.kind == "panel" else [],
    }


def _cards(shown: BlockData) -> list[PanelCard]:
    """The block's panels; those without data read them in the browser."""
    cards = []
    for place, panel in enumerate(shown.data.get("panels", ())):
        document = {**panel["spec"], "id": f"panel-{shown.block.token}-{place}"}
        cards.append(panel_card(PanelSpec.from_dict(document), frozen=panel.get("data")))
    return cards


def _table(shown: BlockData) -> dict[str, Any]:
    data = shown.data
    return {
        **data,
        "rows": [
            {
                **row,
                "cells": [
                    _cell(value, column)
                    for value, column in zip(row["cells"], data["columns"], strict=True)
                ],
            }
            for row in data["rows"]
        ],
    }


def _cell(value: Any, column: Mapping[str, str]) -> dict[str, Any]:
    key, type = column["key"], column["type"]
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is None:
        shown, exact, number = "", "", type not in ("text", "time")
    elif type == "time":
        shown, exact = str(value).replace("T", " ")[:16], str(value)
    elif type == "duration" and number:
        shown, exact = formatting.duration(value), f"{value:g}"
    elif number:
        exact = str(value) if isinstance(value, int) else f"{value:.6g}"
        small = type == "any" or 0 < abs(value) < 1e-3
        shown = exact if small else formatting.quantity(value, 4)
    else:
        shown, exact = str(value), ""
    return {"key": key, "text": shown, "title": exact, "number": number}
