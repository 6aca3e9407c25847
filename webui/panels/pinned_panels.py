"""Dashboards of a run, an experiment or a team on its page: links, and the pinned panels."""

from __future__ import annotations

from typing import Any, Final

from orchestrator.dashboards import selectors
from orchestrator.panels.viewed_runs import PanelViewer
from webui.panels.panel_cards import panel_cards

_DASHBOARDS: Final = 10  # newest, of one subject
_PINNED: Final = 12


def pinned_panels(
    user: Any,
    *,
    run: Any = None,
    experiment: Any = None,
    team: Any = None,
) -> dict[str, Any]:
    """Context of the page of a Run, an Experiment or a Team.

    `dashboards`, and `cards` of their pinned panels, at most 12. One query without pinned panels.
    """
    visible = selectors.dashboards_visible_to(
        user=user,
        run=None if run is None else run.pk,
        experiment=None if experiment is None else experiment.pk,
        team=None if team is None else team.pk,
    )
    shown = list(visible[:_DASHBOARDS])
    source = selectors.source_of_subject(run=run, experiment=experiment, team=team)
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
