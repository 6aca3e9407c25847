"""The page of usage reports: device-hours and cost by group, with a CSV download."""

from __future__ import annotations

from datetime import UTC, timedelta
from typing import Final

from django.http import HttpResponse
from django.shortcuts import render
from django.utils.http import content_disposition_header
from django.utils.translation import gettext as _
from django.utils.translation import gettext_noop
from django.views.decorators.http import require_GET

from orchestrator.background_jobs.usage import electricity, reports
from orchestrator.common import clock
from orchestrator.common.errors import Refusal
from webui.views.access import PageRequest, page

_GROUPS: Final = {
    "team": gettext_noop("team"),
    "person": gettext_noop("person"),
    "pool": gettext_noop("pool"),
    "experiment": gettext_noop("experiment"),
    "month": gettext_noop("month"),
    "day": gettext_noop("day"),
}


@page
@require_GET
def usage(request: PageRequest) -> HttpResponse:
    """Show a report, or return it as CSV with `?format=csv`."""
    chosen = request.GET
    by = chosen.get("by", "team")
    monthly = chosen.get("monthly") == "1" and by not in reports.BY_TIME
    refusal, status = None, 200
    try:
        since, until = reports.period(chosen.get("from", ""), chosen.get("to", ""))
        result = reports.report(user=request.user, since=since, until=until, by=by, monthly=monthly)
    except Refusal as refused:
        if chosen.get("format") == "csv":
            raise
        refusal, status, by = refused, refused.status, "team"
        since, until = reports.period("", "")
        result = reports.report(user=request.user, since=since, until=until, by=by)
    if chosen.get("format") == "csv":
        response = HttpResponse(reports.report_csv(result), content_type="text/csv; charset=utf-8")
        name = f"usage-{by}-{since}-{until}.csv"
        response["Content-Disposition"] = content_disposition_header(True, name) or ""
        return response
    most = max((row.device_s for row in result.rows), default=0.0)
    rows = [
        {
            "key": row.key or _("none"),
            "month": row.month,
            "cost": row.cost_usd,
            "hours": row.device_s / 3600,
            "productive": row.productive_s / row.device_s if row.device_s else None,
            "lost_hours": row.lost_s / 3600,
            "attempts": row.attempts,
            "kwh": electricity.site_kwh(row.energy_j),
            "co2": electricity.co2_kg(row.energy_j),
            "part": 100 * row.device_s / most if most else 0,
        }
        for row in result.rows
    ]
    total = result.total
    today = clock.now().astimezone(UTC).date()
    monday, first = today - timedelta(days=today.weekday()), today.replace(day=1)
    last_month = first - timedelta(days=1)
    periods = [
        (_("this week"), monday, today),
        (_("last week"), monday - timedelta(days=7), monday - timedelta(days=1)),
        (_("this month"), first, today),
        (_("last month"), last_month.replace(day=1), last_month),
    ]
    context = {
        "refusal": refusal,
        "rows": rows,
        "by": by,
        "group": _(_GROUPS[by]),
        "groups": [(name, _(text)) for name, text in _GROUPS.items()],
        "monthly": monthly,
        "cost": total.cost_usd,
        "kwh": electricity.site_kwh(total.energy_j),
        "co2": electricity.co2_kg(total.energy_j),
        "since": since.isoformat(),
        "until": until.isoformat(),
        "periods": [(name, a.isoformat(), b.isoformat()) for name, a, b in periods],
        "hours": total.device_s / 3600,
        "productive": total.productive_s / total.device_s if total.device_s else None,
        "final": result.final,
    }
    return render(request, "webui/usage.html", context, status=status)
