"""Panels of dashboards and reports as the template `parts/panel.html` shows them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from django.utils.safestring import SafeString

from orchestrator.common import live
from orchestrator.panels.expand import Expansion, expand
from orchestrator.panels.spec import PanelSpec
from orchestrator.panels.viewed_runs import PanelViewer
from webui.presentation.markdown import render_markdown

MOST_SHOWN: Final = 200  # panels of one page, after patterns are expanded
# what would end a script element
_ESCAPES: Final = str.maketrans({"<": "\\u003C", ">": "\\u003E", "&": "\\u0026"})
_GROUPS: Final = {
    "line": "lines",
    "image": "media",
    "text": "media",
    "table": "media",
    "markdown": "markdown",
}


@dataclass(frozen=True, slots=True)
class PanelCard:
    """One panel: `group` is lines, plots, media or markdown; `frozen` its stored data as JSON."""

    spec: PanelSpec
    title: str
    group: str
    json: str
    html: str = ""
    frozen: str = ""


def panel_card(panel: PanelSpec, *, frozen: Mapping[str, Any] | None = None) -> PanelCard:
    """One panel without a pattern, or with one that its data combine; `frozen` is stored data."""
    group = _GROUPS.get(panel.kind, "plots")
    stored = live.dumps(frozen).translate(_ESCAPES) if frozen is not None else ""
    return PanelCard(
        panel,
        panel.title
        or ", ".join(panel.metrics[:3])
        or panel.pattern
        or ", ".join(panel.columns[:3]),
        group,
        json.dumps(panel.to_document()),
        render_markdown(panel.text) if group == "markdown" else "",
        SafeString(stored),
    )


def panel_cards(panels: Iterable[PanelSpec], viewer: PanelViewer) -> tuple[list[PanelCard], int]:
    """The panels of a page, one per match of a pattern, and how many are left out.

    At most `MOST_SHOWN` are shown, pinned ones first.
    """
    ordered = sorted(panels, key=lambda panel: not panel.pinned)
    cards, left_out = list[PanelCard](), 0
    for panel in ordered:
        result: Expansion = expand(panel, viewer)
        room = MOST_SHOWN - len(cards)
        cards += [panel_card(each) for each in result.panels[:room]]
        left_out += result.left_out + max(0, len(result.panels) - room)
    return cards, left_out


def _title(panel: PanelSpec) -> str:
    names = panel.metrics or ([panel.pattern] if panel.pattern else panel.columns)
    return panel.title or ", ".join(names[:3])
