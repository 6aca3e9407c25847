"""Runs list with filters, live rows and actions on selected runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django.contrib import messages
from django.http import HttpResponse
from django.shortcuts import redirect, render
from django.urls import reverse
from django.utils.translation import gettext as _
from django.utils.translation import ngettext
from django.views.decorators.http import require_GET, require_POST

from orchestrator.common import live
from orchestrator.common.errors import Refusal, invalid
from orchestrator.run_table import selectors as run_table
from orchestrator.run_table import services as run_table_services
from orchestrator.runs import selectors, services
from orchestrator.scheduling import selectors as scheduling
from orchestrator.telemetry import selectors as telemetry
from webui.forms.run_columns import TableColumns, cells, table_columns
from webui.forms.run_filters import LIVE_STATES, RunFilters
from webui.presentation import formatting, run_headlines
from webui.presentation.run_facts import ANSWERING, TYPICAL
from webui.views.access import PageRequest, next_url, page
from webui.views.runs.compare import MOST as COMPARED
from workers.contracts.specs.run import KINDS

PAGE = 50
BULK = 200


@page
@require_GET
def runs(request: PageRequest) -> HttpResponse:
    """List runs, newest first or in an order; counts cover all visible runs, not only the page."""
    filters = RunFilters.read(request.GET)
    # read before the rows: frames may repeat but are never missed
    epoch, seq = live.heads(["fleet"]).get("fleet", ("", 0))
    visible = selectors.runs_visible_to(user=request.user)
    counts = selectors.state_counts(user=request.user, within=visible)
    names = run_table.known_names(user=request.user)
    problem, sort, groups, places = None, None, list[Any](), list[tuple[int, str]]()
    chosen: dict[str, Any] = {**filters.active, "within": visible}
    try:
        sort = run_table.read_sort(filters.sort, names)
        matching = run_table.matching(user=request.user, names=names, **chosen)
        table = table_columns(filters, names, sort)
        if filters.group:
            groups = _groups(matching, filters, table, names)
        else:
            start = filters.after or (f'["none",null,{filters.before}]' if filters.before else "")
            places = run_table.table_ids(runs=matching, sort=sort, after=start, limit=PAGE + 1)
    except Refusal as refusal:
        problem, table = refusal, table_columns(filters, names, None)
    more, places = len(places) > PAGE, places[:PAGE]
    shown: list[Any] = run_table.run_page([id for id, _place in places])
    older = ""
    if more and not sort:
        older = filters.url(before=places[-1][0])
    elif more:
        older = filters.url(after=places[-1][1])
    context = {
        "rows": _rows(shown, table),
        "table": table,
        "unknown": ", ".join(table.unknown),
        "filters": filters,
        "older": older,
        "newest": filters.url(),
        "first": not filters.before and not filters.after,
        "counts": counts,
        "total": sum(counts.values()),
        "sentence": sentence(counts),
        "kinds": KINDS,
        "chips": filters.state_chips(counts),
        "active_chips": filters.active_chips(),
        "mine": filters.url(owner="" if filters.owner == "me" else "me"),
        "here": request.get_full_path(),
        "head": {"epoch": epoch, "seq": seq},
        "live": filters.before is None and not sort and not filters.query and not groups,
        "problem": problem,
        "groups": groups,
        "csv": f"/api/v1/runs/csv{filters.url()}",
        "parquet": f"/api/v1/runs/parquet{filters.url()}",
        "views": _views(request, filters),
        "teams": run_table.team_names(user=request.user),
        "completions": run_table.completions(names),
        "group_keys": ("model", "state", "kind", "owner", "experiment", "tag", "pool"),
    }
    return render(request, "webui/runs.html", context, status=problem.status if problem else 200)


@page
@require_POST
def view_save(request: PageRequest) -> HttpResponse:
    """Save the address of the list as a view of the person or of a team."""
    address = request.POST.get("query", "")
    view = run_table_services.view_save(
        owner=request.user,
        name=request.POST.get("name", ""),
        query=address,
        team=request.POST.get("team", ""),
    )
    messages.success(request, _("View %(name)s saved.") % {"name": view.name})
    return redirect(f"{reverse('runs')}?{view.query}")


@page
@require_POST
def view_delete(request: PageRequest, id: int) -> HttpResponse:
    """Delete a view of the person."""
    view = run_table.view_get(user=request.user, id=id)
    run_table_services.view_delete(view=view, by=request.user)
    messages.success(request, _("View %(name)s deleted.") % {"name": view.name})
    return redirect(next_url(request, "runs"))


def _rows(shown: list[Any], table: TableColumns) -> list[dict[str, Any]]:
    ids = [run.pk for run in shown]
    sparks = sparklines(shown) if any(head.key == "result" for head in table.heads) else {}
    curves = {
        key: telemetry.sparkline(run_ids=ids, name=name) for key, name in table.curves.items()
    }
    values = run_table.column_values(ids, list(table.columns.values()))
    return [
        shown_row
        | {
            "cells": cells(
                run,
                table,
                values[run.pk],
                {key: drawn.get(run.pk, []) for key, drawn in curves.items()},
            )
        }
        for run, shown_row in zip(shown, rows(shown, sparks), strict=True)
    ]


def spark_metric(run: Any) -> str:
    """The metric that shows whether a run gets better: its loss, reward, or speed of answers."""
    if run.kind in ANSWERING:
        scores = "inference/score_s" in (run.summary or {})
        return "inference/scores_per_s" if scores else "inference/tokens_per_s"
    objective = (run.spec.get("train") or {}).get("objective")
    return "reward/mean" if objective in ("grpo", "ppo") else "loss"


def _groups(
    matching: Any, filters: RunFilters, table: TableColumns, names: Any
) -> list[dict[str, Any]]:
    """The groups of the first key, each with the URL that shows its runs or its inner groups."""
    key, _comma, rest = filters.group.partition(",")
    by = run_table.read_sort(key, names)
    if by is None:
        return []
    spread = [column for column in table.columns.values() if column.source != "run"]
    rows = []
    for group in run_table.run_groups(matching.runs, by.column, spread):
        value = "none" if group.value is None else '"' + group.value.replace('"', "'") + '"'
        part = f"{by.column.key} = {value}"
        query = f"({filters.query}) and {part}" if filters.query else part
        rows.append(
            {
                "value": group.value,
                "count": group.count,
                "url": filters.url(query=query, group=rest),
                "spreads": [
                    {
                        "mean": formatting.quantity(item.mean, 4),
                        "range": f"{formatting.quantity(item.min, 3)} – "
                        f"{formatting.quantity(item.max, 3)}",
                        "known": item.mean is not None,
                    }
                    for column in spread
                    for item in [group.spreads[column.key]]
                ],
            }
        )
    return rows


def _views(request: PageRequest, filters: RunFilters) -> list[dict[str, Any]]:
    here = filters.url().lstrip("?")
    return [
        {
            "view": view,
            "on": view.query == here,
            "mine": view.owner_id == request.user.pk,
        }
        for view in run_table.views_visible_to(user=request.user)
    ]


@page
@require_POST
def bulk(request: PageRequest) -> HttpResponse:
    """Compare, cancel or tag the selected runs; refusals are reported per run."""
    ids = [int(text) for text in request.POST.getlist("run") if text.isdecimal()][:BULK]
    action, tag = request.POST.get("action", ""), request.POST.get("tag", "").strip()
    done, refused = 0, list[str]()
    if action == "compare" and ids:
        return redirect(
            f"{reverse('runs-compare')}?runs={','.join(map(str, sorted(ids[:COMPARED])))}"
        )
    if action not in ("cancel", "tag", "compare"):
        raise invalid(
            "action",
            _("%(name)r is not possible for several runs") % {"name": action},
            _("Use compare, cancel or tag."),
        )
    if action == "tag" and not 1 <= len(tag) <= 60:
        messages.error(request, _("Enter a tag of 1 to 60 characters first."))
        return redirect(next_url(request, "runs"))
    for id in ids if action != "compare" else ():
        try:
            run = selectors.run_get(user=request.user, id=id)
            if action == "cancel":
                services.run_cancel(run=run, by=request.user)
            else:
                tags = sorted({*(item.name for item in run.tags.all()), tag})
                services.run_update(run=run, by=request.user, tags=tags)
            done += 1
        except Refusal as refusal:
            refused.append(f"{id}: {refusal.detail}")
    if done and action == "cancel":
        text = ngettext("Cancelling %(count)s run.", "Cancelling %(count)s runs.", done)
        messages.success(request, text % {"count": done})
    elif done:
        text = ngettext("Tagged %(count)s run %(tag)s.", "Tagged %(count)s runs %(tag)s.", done)
        messages.success(request, text % {"count": done, "tag": tag})
    for message in refused[:5]:
        messages.error(request, message)
    if not ids:
        messages.warning(request, _("Select runs first."))
    return redirect(next_url(request, "runs"))


def sparklines(shown: list[Any]) -> dict[int, list[float]]:
    """Return the curve of each run: its loss, reward or tokens/s."""
    sparks: dict[int, list[float]] = {}
    for name in dict.fromkeys(map(spark_metric, shown)):
        mine = [run.pk for run in shown if spark_metric(run) == name]
        sparks |= telemetry.sparkline(run_ids=mine, name=name)
    return sparks


def medians(shown: list[Any]) -> dict[int, dict[str, float]]:
    """`{run: {metric: median}}` of speeds; of active runs only MFU, which sorts by its median."""
    ended = {run.pk for run in shown if run.state in run_headlines.ENDED}
    known = telemetry.medians([run.pk for run in shown], TYPICAL) if shown else {}
    return {
        pk: values
        if pk in ended
        else {name: value for name, value in values.items() if name == "mfu"}
        for pk, values in known.items()
    }


def rows(shown: list[Any], sparks: Mapping[int, list[float]]) -> list[dict[str, Any]]:
    """Return the table rows of runs; two queries."""
    speeds, times = medians(shown), scheduling.run_times([run.pk for run in shown])
    return [
        row(run, sparks.get(run.pk, []), speeds.get(run.pk, {}), times.get(run.pk)) for run in shown
    ]


def row(
    run: Any,
    spark: list[float],
    medians: Mapping[str, float],
    time: scheduling.RunTime | None,
) -> dict[str, Any]:
    """Return a run as its table row; unknown values are None."""
    summary = {**(run.summary or {}), **medians}
    holds = run.state in ("starting", "running", "stopping")
    steps = summary.get("steps") or ((run.spec.get("train") or {}).get("steps"))
    step, metric = summary.get("step"), spark_metric(run)
    return {
        "run": run,
        "loss": summary.get("loss") if metric == "loss" else summary.get(metric),
        "metric": "" if metric in ("loss", "inference/tokens_per_s") else metric,
        "mfu": summary.get("mfu"),
        "tokens": summary.get("tokens"),
        "step": step,
        "steps": steps,
        "part": round(100 * step / steps, 1) if step and steps else None,
        "spark": ",".join(f"{value:.5g}" for value in spark),
        "device_hours": time.device_hours if time is not None and run.devices else None,
        "holds": holds,
        "serving": serving_metrics(run.kind, summary),
        "tags": [item.name for item in run.tags.all()],
        "alive": run.state in LIVE_STATES,
    }


def serving_metrics(kind: str, summary: dict[str, Any]) -> dict[str, str] | None:
    """Return latency and speed, which inference runs show in place of loss and MFU."""
    if kind not in ANSWERING:
        return None
    first, per_token = (
        formatting.number(summary.get(f"inference/{name}")) for name in ("ttft_s", "tpot_s")
    )
    score = formatting.number(summary.get("inference/score_s"))
    latencies = [
        f"TTFT {formatting.seconds(first, 2)}" if first else "",
        f"TPOT {formatting.seconds(per_token, 2)}" if per_token else "",
        _("%(time)s per score") % {"time": formatting.seconds(score, 2)} if score else "",
    ]
    speed, scores = (
        formatting.number(summary.get(f"inference/{name}"))
        for name in ("tokens_per_s", "scores_per_s")
    )
    rate = _("%(rate)s tokens/s") if speed is not None else _("%(rate)s scores/s")
    title = _("Scores/s") if speed is None and scores is not None else _("Tokens/s")
    shown = speed if speed is not None else scores
    return {
        "title": title,
        "latency": " · ".join(part for part in latencies if part),
        "speed": rate % {"rate": formatting.quantity(shown)} if shown is not None else "",
    }


def sentence(counts: dict[str, int]) -> str:
    """Summarize runs by state in one sentence."""
    if not counts:
        return _("No runs yet.")
    active = counts.get("running", 0) + counts.get("starting", 0) + counts.get("stopping", 0)
    parts = [
        ngettext("%(count)s active run", "%(count)s active runs", active) % {"count": f"{active:,}"}
        if active
        else _("No active runs")
    ]
    if counts.get("queued"):
        parts.append(_("%(count)s waiting") % {"count": f"{counts['queued']:,}"})
    if counts.get("paused"):
        parts.append(_("%(count)s paused") % {"count": f"{counts['paused']:,}"})
    ended = {name: counts.get(name, 0) for name in ("finished", "failed", "cancelled")}
    text = ", ".join(parts)
    if any(ended.values()):
        listed = [f"{count:,} {_(name)}" for name, count in ended.items() if count]
        text += f"; {formatting.listed(listed)}"
    return text + "."
