"""Dashboards tab: a dashboard of the run, its experiment, a team or the user, for this run."""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest

from orchestrator.accounts.roles import Role
from orchestrator.dashboards import selectors
from orchestrator.panels.spec import RunsSource
from orchestrator.panels.viewed_runs import PanelViewer
from webui.panels.panel_cards import PanelCard, panel_cards
from webui.presentation.run_facts import Facts
from webui.views.access import has_role


def content(facts: Facts, request: HttpRequest) -> dict[str, Any]:
    """Return the template context of the tab; `?dashboard=` chooses one, by default the nearest.

    Panels that name no runs show this run.
    """
    rows = selectors.dashboards_for_run(user=facts.user, run=facts.run)
    wanted = request.GET.get("dashboard", "")
    chosen = next((row for row in rows if str(row.pk) == wanted), rows[0] if rows else None)
    source = RunsSource(runs=[str(facts.run.pk)])
    cards, left_out = list[PanelCard](), 0
    if chosen is not None:
        panels = selectors.spec_of(chosen).panels
        cards, left_out = panel_cards(panels, PanelViewer(facts.user, source))
    return {
        "dashboards": rows,
        "dashboard": chosen,
        "cards": cards,
        "left_out": left_out,
        "has_lines": any(card.group == "lines" for card in cards),
        "may_edit": chosen is not None and selectors.may_edit(chosen, facts.user),
        "may_create": has_role(facts.user, Role.SUBMITTER),
        "subject": source.model_dump(mode="json", exclude_defaults=True),
        "run_id": str(facts.run.pk),
        "source": facts.source(),
    }
