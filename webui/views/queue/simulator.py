"""The simulator: compare scheduling policies on a trace; charts and a table of the result."""

from __future__ import annotations

from typing import Any

from django.http import HttpResponse
from django.shortcuts import redirect, render
from django.utils.translation import gettext as _
from django.views.decorators.http import require_GET, require_http_methods, require_POST

from orchestrator.accounts.roles import Role
from orchestrator.background_jobs.simulations import requests
from orchestrator.common.errors import Refusal, invalid
from orchestrator.scheduling.ordering.orders import ORDERS
from orchestrator.scheduling.simulation.traces import COLUMNS
from webui.charts import policy_comparison
from webui.presentation import formatting
from webui.views.access import PageRequest, has_role, page, redirect_with_message


@page
@require_http_methods(["GET", "POST"])
def simulator(request: PageRequest) -> HttpResponse:
    """Show the form and the user's simulations; POST requests one."""
    refusal, status = None, 200
    if request.method == "POST":
        try:
            row = _request(request)
        except Refusal as refused:
            refusal, status = refused, refused.status
        else:
            return redirect("simulation", row.pk)
    sent = request.POST
    context = {
        "rows": list(requests.simulations_of(user=request.user)),
        "refusal": refusal,
        "kinds": [("philly", "Philly"), ("helios", "Helios"), ("csv", _("CSV file"))],
        "kind": sent.get("kind", "philly"),
        "runs": sent.get("runs", "5000"),
        "seed": sent.get("seed", "1"),
        "nodes": sent.get("nodes", "50"),
        "per_node": sent.get("per_node", "8"),
        "policies": [
            # elastic runs take longest to simulate
            (name, name in sent.getlist("policies") if sent else not order.elastic, _WHAT[name]())
            for name, order in ORDERS.items()
        ],
        "columns": ", ".join(COLUMNS),
        "operator": has_role(request.user, Role.OPERATOR),
        "most_runs": requests.MOST_RUNS,
    }
    return render(request, "webui/simulator.html", context, status=status)


@page
@require_GET
def simulation(request: PageRequest, id: int) -> HttpResponse:
    """Show a simulation; while it runs, the page asks again every few seconds."""
    row = requests.simulation_get(user=request.user, id=id)
    context: dict[str, Any] = {"row": row, "sentence": _sentence(row)}
    if row.result:
        context["charts"] = policy_comparison.charts(row.result)
        context["figures"] = _figures(row.result["policies"])
    template = "simulation_part" if request.htmx else "simulation"
    return render(request, f"webui/simulator/{template}.html", context)


@page
@require_POST
def delete(request: PageRequest, id: int) -> HttpResponse:
    """Delete a simulation."""
    row = requests.simulation_get(user=request.user, id=id)
    requests.simulation_delete(simulation=row)
    return redirect_with_message(request, _("The simulation is deleted."), "simulator")


def _request(request: PageRequest) -> Any:
    sent = request.POST
    csv, trace = "", ""
    if sent.get("kind") == "csv":
        file = request.FILES.get("file")
        if file is None:
            raise invalid("file", _("no file"), _("Choose a CSV file."))
        if (file.size or 0) > requests.MOST_CSV_BYTES:
            message = _("the file has %(size)s") % {"size": formatting.memory(file.size or 0)}
            raise invalid("file", message, _("Use at most 5 MB."))
        try:
            csv = file.read().decode("utf-8-sig")
        except UnicodeDecodeError:
            raise invalid("file", _("the file is not text in UTF-8"), "") from None
        trace = file.name or "trace.csv"
        if not csv:
            hint = _("Write the columns %(names)s.") % {"names": ", ".join(COLUMNS)}
            raise invalid("file", _("the file is empty"), hint)
    else:
        kind = sent.get("kind", "philly")
        trace = f"{kind}:{_number(request, 'runs')}:{_number(request, 'seed')}"
    return requests.simulation_request(
        by=request.user,
        trace=trace,
        csv=csv,
        nodes=_number(request, "nodes"),
        devices_per_node=_number(request, "per_node"),
        policies=sent.getlist("policies"),
    )


def _number(request: PageRequest, name: str) -> int:
    text = request.POST.get(name, "").strip()
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise invalid(
            name,
            _("%(text)s is not a number") % {"text": repr(text[:20])},
            _("Use a number such as 100."),
        )
    return int(text)


def _sentence(row: Any) -> str:
    if row.state == "failed":
        return _("The simulation failed.")
    if not row.result:
        return _("The simulation runs in the background; its result appears on this page.")
    policies = row.result["policies"]
    if {"fifo", "orrery"} <= policies.keys():
        fifo, own = policies["fifo"], policies["orrery"]
        return _(
            "With orrery, runs wait %(own)s on average, with fifo %(fifo)s; %(used)s of the "
            "devices are in use instead of %(before)s."
        ) % {
            "own": formatting.seconds(own["mean_wait_s"]),
            "fifo": formatting.seconds(fifo["mean_wait_s"]),
            "used": f"{100 * own['utilization']:.1f} %",
            "before": f"{100 * fifo['utilization']:.1f} %",
        }
    name = min(policies, key=lambda each: policies[each]["mean_wait_s"])
    return _("Runs wait least with %(policy)s: %(wait)s on average.") % {
        "policy": name,
        "wait": formatting.seconds(policies[name]["mean_wait_s"]),
    }


def _figures(policies: dict[str, dict[str, float]]) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "hue": policy_comparison.HUES.get(name, "event"),
            "what": _WHAT[name](),
            "mean_wait": formatting.seconds(values["mean_wait_s"]),
            "p95_wait": formatting.seconds(values["p95_wait_s"]),
            "completion": formatting.seconds(values["mean_completion_s"]),
            "utilization": f"{100 * values['utilization']:.1f} %",
            "fragmentation": f"{100 * values['fragmentation']:.2f} %",
            "fairness": f"{values['fairness']:.3f}",
            "starved": f"{values['starved']:,}",
            "lost": f"{values.get('lost_device_h', 0):,.1f}",
        }
        for name, values in policies.items()
    ]


_WHAT = {
    "fifo": lambda: _("in the order of submission; the first run blocks the others"),
    "shortest_first": lambda: _("shortest true duration first; for comparison only"),
    "fair_share": lambda: _("the team that has used least first, with reservations"),
    "orrery": lambda: _("the scheduler's own order: waiting, duration, shares, reservations"),
    "orrery_elastic": lambda: _("orrery, if all runs could shrink to a quarter of their devices"),
}
