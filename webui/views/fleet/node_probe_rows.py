"""What a node's page shows of probes for the planner: state, rates with their drift, steps."""

from __future__ import annotations

from statistics import median
from typing import Any, Final

from django.utils.translation import gettext as _
from django.utils.translation import gettext_noop

from orchestrator.fleet import node_probes
from webui.presentation import formatting

_DAYS: Final = 90
DRIFTED: Final = 0.10  # of the median of earlier days
_NAMES: Final = {
    "matmul": gettext_noop("Matrix products"),
    "attention": gettext_noop("Attention"),
    "memory": gettext_noop("Memory bandwidth"),
    "host": gettext_noop("Host time per operation"),
    "all_reduce": gettext_noop("All-reduce"),
    "all_gather": gettext_noop("All-gather"),
    "reduce_scatter": gettext_noop("Reduce-scatter"),
    "all_to_all": gettext_noop("All-to-all"),
    "send_recv": gettext_noop("Send and receive"),
}


def node_probe_card(node: Any) -> dict[str, Any]:
    """`{state, sentence, rates, steps, running}` for the node's page."""
    node_probes.overdue_fail()
    rows = list(node_probes.probes_of(node=node)[:_DAYS])
    newest = rows[0] if rows else None
    measured = next((row for row in rows if row.time is not None), None)
    return {
        "running": newest is not None and newest.state == "requested",
        "failed": newest.message if newest is not None and newest.state == "failed" else "",
        "requested_by": newest.requested_by if newest is not None else "",
        "measured": measured,
        "sentence": _sentence(measured),
        "rates": [_rate(series) for series in node_probes.series_of(rows)],
        "steps": [_step(step) for step in (measured.report.get("steps", []) if measured else [])],
        "problems": measured.report.get("problems", []) if measured else [],
    }


def _sentence(row: Any) -> str:
    if row is None:
        return _(
            "Not probed yet. A probe measures the idle node for about a minute; predictions for "
            "its devices then use the measured rates."
        )
    report = row.report
    text = _("Measured on %(day)s with %(ranks)s ranks in %(seconds)s.") % {
        "day": row.day.isoformat(),
        "ranks": report["ranks"],
        "seconds": formatting.duration(report["seconds"]),
    }
    if report.get("short"):
        text += " " + _("This was the short probe of the first start; a full one measures more.")
    if report.get("load", 0.0) > 0.25:
        text += " " + _(
            "Other programs used %(share)s of the cores before it, so predictions rely on it less."
        ) % {"share": formatting.percent(report["load"])}
    return text


def _rate(series: Any) -> dict[str, Any]:
    values = series.values
    return {
        "name": _(_NAMES.get(series.measure, series.measure)),
        "setting": series.setting,
        "newest": _value(values[-1], series.unit),
        "typical": _value(median(values), series.unit),
        "drift": series.drift,
        "drifted": abs(series.drift) > DRIFTED,
        "count": len(values),
        "curve": ",".join(f"{value:.6g}" for value in values),
    }


def _step(step: dict[str, Any]) -> dict[str, Any]:
    plan, model = step["plan"], step["model"]
    degrees = [f"{axis}{plan[axis]}" for axis in ("dp", "tp", "pp", "cp") if plan.get(axis, 1) > 1]
    zero = [f"z{plan['zero']}"] if plan.get("zero") else []
    more = [_("recompute %(kind)s") % {"kind": plan["recompute"]}] if _recomputes(plan) else []
    return {
        "model": _("%(layers)s layers of %(hidden)s")
        % {"layers": model["layers"], "hidden": model["hidden"]},
        "plan": "·".join([*degrees, *zero, *more]) or _("one rank"),
        "tokens": plan["micro_batch_size"] * step["seq_len"],
        "time": formatting.duration(step["step_time_s"]),
        "slowest": formatting.duration(step["slowest_s"]),
    }


def _recomputes(plan: dict[str, Any]) -> bool:
    return bool(plan.get("recompute", "none") != "none")


def _value(value: float, unit: str) -> str:
    if unit == "s":
        return f"{1e6 * value:,.3g} µs"
    scale, prefix = (1e9, "G") if value >= 1e8 else (1e6, "M")
    return f"{value / scale:,.3g} {prefix}{unit}"
