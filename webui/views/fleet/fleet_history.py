"""The fleet over time: utilization, allocated and busy devices, idle ones, energy and CO2."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Final
from urllib.parse import urlencode

import numpy as np
from django.conf import settings
from django.http import HttpResponse
from django.shortcuts import render
from django.templatetags.static import static
from django.utils import timezone
from django.utils.translation import gettext as _
from django.utils.translation import gettext_noop
from django.views.decorators.http import require_GET

from orchestrator.background_jobs.usage import electricity
from orchestrator.device_history import idle, selectors, totals
from orchestrator.device_history.series import MAX, MEAN, MIN
from webui.charts.gantt import LONG_WINDOWS
from webui.charts.panel import Line, Panel
from webui.presentation import formatting
from webui.views.access import PageRequest, page

POINTS: Final = 360
ROWS: Final = 50  # of each table
RANGES: Final = {name: LONG_WINDOWS[name] for name in ("1h", "24h", "7d", "30d", "90d")}
SPANS: Final = {
    "1h": gettext_noop("hour"),
    "24h": gettext_noop("24 hours"),
    "7d": gettext_noop("7 days"),
    "30d": gettext_noop("30 days"),
    "90d": gettext_noop("90 days"),
}
GROUPS: Final = {
    "team": gettext_noop("team"),
    "person": gettext_noop("person"),
    "experiment": gettext_noop("experiment"),
    "run": gettext_noop("run"),
}
_EMPTY: Final = gettext_noop("No heartbeat was received in this period.")
PANELS: Final = (
    Panel(
        "devices",
        gettext_noop("Devices"),
        "",
        (
            Line("devices", gettext_noop("with readings"), "other-series", "dot"),
            Line("allocated", gettext_noop("allocated"), "accent"),
            Line("busy", gettext_noop("busy"), "throughput"),
            Line("idle", gettext_noop("allocated but idle"), "event"),
        ),
        zero=True,
        wide=True,
        empty=_EMPTY,
    ),
    Panel(
        "utilization",
        gettext_noop("Mean utilization of all devices"),
        "fraction",
        (Line("utilization", gettext_noop("utilization"), "mfu"),),
        zero=True,
        empty=_EMPTY,
    ),
    Panel(
        "power",
        gettext_noop("Power of devices and their CPUs"),
        "W",
        (Line("power_w", gettext_noop("power"), "time-2"),),
        zero=True,
        empty=gettext_noop(
            "No node reports power: no device measures it, or the agents cannot read the kernel's "
            "energy counters (RAPL)."
        ),
    ),
)


@page
@require_GET
def fleet_history(request: PageRequest) -> HttpResponse:
    """Show the fleet over a period."""
    chosen = request.GET
    window = chosen.get("window", "")
    window = window if window in RANGES else "24h"
    by = chosen.get("by", "")
    by = by if by in GROUPS else "team"
    pools = selectors.pool_names()
    pool = chosen.get("pool", "")
    pool = pool if pool in pools else ""
    over = selectors.period(
        until=timezone.now(), seconds=RANGES[window].total_seconds(), points=POINTS
    )
    history = selectors.fleet_history(over=over, pools=[pool] if pool else None)
    idle_rows = idle.idle_devices_visible_to(user=request.user, pool=pool)
    context = {
        "panels": [panel.to_dict() for panel in PANELS],
        "plotly": static(f"plotly/{settings.PLOTLY_BUNDLE}"),
        "source": {
            "name": "fleet",
            "axis": "time",
            "period": [over.start, over.end],
            "curves": curves(history, over),
        },
        "idle": idle_rows[:ROWS],
        "idle_count": len(idle_rows),
        "idle_hours": sum(row.idle_s for row in idle_rows) / 3600,
        "window": window,
        "windows": {name: _url(name, by, pool) for name in RANGES},
        "span": _(SPANS[window]),
        "pool": pool,
        "pools": pools,
        "by": by,
        "group": _(GROUPS[by]),
        "groups": [(name, _(text), _url(window, name, pool)) for name, text in GROUPS.items()],
        "pue": settings.ENV.pue,
        "co2": settings.ENV.co2_g_per_kwh,
        "fleet_kwh": electricity.site_kwh(totals.energy_j(history, over)),
        **_energy(request.user, by, over),
        "sentence": sentence(history, len(idle_rows), _(SPANS[window])),
    }
    return render(request, "webui/fleet_history.html", context)


def curves(history: dict[str, Any], over: selectors.Period) -> dict[str, Any]:
    """`{metric: {x, y, low, high}}` for the charts; columns without a heartbeat are left out."""
    times = np.array(over.times)
    devices = history["devices"][MEAN]
    result = {}
    for name in ("devices", "allocated", "busy", "idle", "power_w"):
        low, mean, high = (history[name][at] for at in (MIN, MEAN, MAX))
        has = ~np.isnan(mean)
        if name == "power_w":
            has &= np.nan_to_num(history["measured"][MAX]) > 0
        result[name] = _curve(times[has], mean[has], low[has], high[has])
    has = devices > 0
    low, mean, high = (history["utilization"][at][has] / devices[has] for at in (MIN, MEAN, MAX))
    result["utilization"] = _curve(times[has], mean, low, np.minimum(1.0, high))
    return result


def _curve(times: Any, mean: Any, low: Any, high: Any) -> dict[str, Any]:
    return {
        "x": times.tolist(),
        "y": selectors.plain(mean),
        "low": selectors.plain(low),
        "high": selectors.plain(high),
        "total_points": len(times),
        "rank": 0,
    }


def sentence(history: dict[str, Any], idle_devices: int, span: str) -> str:
    """How much of the device time was allocated and used, and how many devices are idle now."""
    devices = float(np.nansum(history["devices"][MEAN]))
    if not devices:
        return _("No readings in the last %(span)s.") % {"span": span}
    values = {
        "span": span,
        "allocated": formatting.percent(
            min(1.0, float(np.nansum(history["allocated"][MEAN])) / devices)
        ),
        "use": formatting.percent(float(np.nansum(history["utilization"][MEAN])) / devices),
        "idle": idle_devices,
    }
    text = _(
        "In the last %(span)s, %(allocated)s of device time was allocated and the mean utilization "
        "was %(use)s."
    )
    if idle_devices == 1:
        text += " " + _("One allocated device is idle now.")
    elif idle_devices:
        text += " " + _("%(idle)s allocated devices are idle now.")
    return text % values


def _energy(user: Any, by: str, over: selectors.Period) -> dict[str, Any]:
    """Rows by group, their total, and the runs with most idle time."""
    since, until = selectors.time_of(over.start), selectors.time_of(over.end)
    rows, total = electricity.report(user=user, since=since, until=until, by=by)
    runs = rows
    if by != "run":
        runs, _total = electricity.report(user=user, since=since, until=until, by="run")
    wasted = sorted((row for row in runs if row.use.idle_s >= 60), key=lambda row: -row.use.idle_s)
    return {
        "energy": [_row(row) for row in rows[:ROWS]],
        "energy_rows": len(rows),
        "total": _row(total),
        "wasted": [_row(row) for row in wasted[:10]],
        "since": since,
        "days": _days(since, until),
    }


def _row(row: electricity.EnergyRow) -> dict[str, Any]:
    use = row.use
    return {
        "key": row.key,
        "name": row.name,
        "person": row.person,
        "hours": use.read_s / 3600,
        "idle_hours": use.idle_s / 3600,
        "idle_share": use.idle_s / use.read_s if use.read_s else None,
        "utilization": row.utilization,
        "measured": use.measured_s / use.read_s if use.read_s else None,
        "kwh": electricity.site_kwh(use.energy_j),
        "co2": electricity.co2_kg(use.energy_j),
    }


def _days(since: datetime, until: datetime) -> str:
    """The query of the usage page for the same days."""
    last = min(until, timezone.now())
    return urlencode({"from": since.date().isoformat(), "to": last.date().isoformat()})


def _url(window: str, by: str, pool: str) -> str:
    query = {"window": window, "by": by, "pool": pool}
    usual = {"window": "24h", "by": "team", "pool": ""}
    changed = {name: value for name, value in query.items() if value != usual[name]}
    return f"?{urlencode(changed)}"
