"""Plan trials tab: the plans that were tried before the run, predicted and measured."""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest
from django.utils.translation import gettext as _

from orchestrator.runs.plan_trials.table import trials_of
from webui.charts import plan_ranks
from webui.presentation import formatting
from webui.presentation.run_facts import Facts
from webui.presentation.run_headlines import ENDED


def content(facts: Facts, request: HttpRequest) -> dict[str, Any]:
    """Return the template context of the tab; `plan_rows` is empty without stored trials."""
    table = trials_of(run=facts.run)
    alive = facts.run.state not in ENDED
    if table is None:
        return {"plan_rows": [], "live": False}
    rows = plan_ranks.rows_of(table)
    settings = table["settings"]
    limits = [
        _("at most %(share)s of the run") % {"share": formatting.percent(settings["max_share"])}
    ]
    if settings.get("max_seconds"):
        limits.append(formatting.duration(settings["max_seconds"]))
    return {
        "plan_rows": rows,
        "links": plan_ranks.links_of(rows),
        "link_height": 28 * max(2, sum(row.measured_rank is not None for row in rows)),
        "summary": plan_ranks.summary(table, rows, alive=alive),
        "reason": table["reason"],
        "facts": [
            (_("Steps per trial"), f"{settings['steps']}"),
            (_("Steps before timing"), f"{settings['warmup_steps']}"),
            (_("Budget"), ", ".join(limits)),
            (_("Used"), formatting.duration(table["spent_s"])),
            (_("Measured on"), ", ".join(table["nodes"]) or formatting.DASH),
        ],
        "device": (facts.run.prediction or {}).get("device") or "",
        "usable": facts.may_manage
        and facts.run.ended is not None
        and any(row.measured_at is not None for row in rows),
        "live": alive and table["decided"] is None,
        "on_cpu": (facts.run.prediction or {}).get("device") == "cpu",
    }
