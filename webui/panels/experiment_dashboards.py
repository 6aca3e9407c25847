"""Dashboards of an experiment on its page: links, and the panels that are pinned."""

from __future__ import annotations

from typing import Any, Final

from orchestrator.dashboards import selectors
from orchestrator.panels.viewed_runs import PanelViewer
from webui.panels.panel_cards import panel_cards

_DASHBOARDS: Final = 10  # newest, of one experiment
_PINNED: Final = 12


def experiment_dashboards(user: Any, experiment: Any) -> dict[str, Any]:
    """Context of the page: `dashboards`, and `cards` of their pinned panels, at most 12."""
    rows = selectors.dashboards_visible_to(user=user, experiment=experiment.pk)[:_DASHBOARDS]
    shown = list(rows)
    source = selectors.source_of_subject(experiment=experiment)
    pinned = [
        panel.model_copy(update={"id": f"d{row.pk}-{panel.id}"[:40], "pinned": False})
        for row in shown
        for panel in selectors.spec_of(row).panels
        if panel.pinned
    ]
    cards, left_out = panel_cards(pinned, PanelViewer(user, source)) if pinned else ([], 0)
    return {
        "dashboards": shown,
        "cards": cards[:_PINNED],
        "left_out": left_out + max(0, len(cards) - _PINNED),
        "subject": source.model_dump(mode="json", exclude_defaults=True),
    }
