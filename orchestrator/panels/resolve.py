"""Resolves one panel to the data that a page draws, limited to what the viewer may see."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from orchestrator.panels import curves, media, values
from orchestrator.panels.data import Empty, PanelData
from orchestrator.panels.expand import matching, nearest
from orchestrator.panels.spec import PanelSpec
from orchestrator.panels.viewed_runs import MEDIA_KINDS, PanelViewer
from orchestrator.run_table.language import QueryError
from orchestrator.runs.models import Run
from orchestrator.tracking import selectors as tracking


def resolve(panel: PanelSpec, viewer: PanelViewer) -> PanelData:
    """The data of one panel for this viewer; never raises for missing runs or metrics.

    A panel with a pattern shows its first match, or all with `combine`: call `expand` first for
    one panel per match.
    """
    if panel.kind == "markdown":
        return PanelData(panel.kind, title=panel.title, content={"text": panel.text})
    viewed = viewer.runs(panel)
    data = PanelData(
        panel.kind,
        panel.title or ", ".join(panel.metrics[:3]) or panel.pattern,
        runs=viewed.entries,
        hidden_runs=viewed.hidden,
        more_runs=viewed.more,
        active=viewed.active,
        empty=viewed.empty,
    )
    if viewed.empty is not None:
        return data
    names, left_out, empty = panel.metrics, 0, None
    if panel.pattern:
        names, left_out, empty = matching(panel, viewer)
        if empty is None and not panel.combine:
            names, left_out = names[:1], left_out + len(names) - 1
    if empty is not None:
        return replace(data, empty=empty)
    return _with_content(data, panel, viewer, names, left_out)


def _with_content(
    data: PanelData, panel: PanelSpec, viewer: PanelViewer, names: Sequence[str], left_out: int
) -> PanelData:
    try:
        content = _content(panel, viewer.runs(panel).runs, names)
    except curves.NoAxis:
        return replace(data, empty=Empty("no_axis", panel.x))
    except QueryError as error:
        return replace(data, empty=Empty("gone", panel.x_metric, detail=error.hint))
    unit = content.pop("unit", "")
    data = replace(data, unit=unit, content={**content, "left_out": left_out})
    shown = _shown_names(content)
    if not names:
        return data
    absent = [name for name in names if name not in shown]
    if not absent:
        return data
    known = set(viewer.names(panel))
    gone = tuple(name for name in absent if name not in known)
    if len(absent) < len(names):
        return replace(data, missing=gone)
    if not gone:
        return replace(data, empty=Empty("no_points", names[0]))
    return replace(data, missing=gone, empty=Empty("gone", gone[0], near=nearest(gone[0], known)))


def _content(panel: PanelSpec, runs: Sequence[Run], names: Sequence[str]) -> dict[str, Any]:
    kind = panel.kind
    logged = MEDIA_KINDS.get(kind)
    ids = [run.pk for run in runs]
    if logged and names and tracking.runs_with_media(ids, names=names, kind=logged):
        if kind == "heatmap":
            return curves.heat_of_histograms(runs, names) or {}
        return media.media(panel, runs, names, logged)
    match kind:
        case "line":
            return curves.lines(panel, runs, names)
        case "heatmap":
            return curves.heat_of_metrics(panel, runs, names)
        case "bar":
            return values.bars(panel, runs, names)
        case "scatter":
            return values.scatter(panel, runs, names)
        case "histogram":
            return values.histogram(panel, runs, names)
        case "table":
            return values.table(panel, runs, names)
    return {"of": "media", "items": [], "steps": [], "more": 0}


def _shown_names(content: dict[str, Any]) -> set[str]:
    """The metrics or media that the content has values of."""
    for key, field in (("curves", "metric"), ("bars", "metric"), ("items", "name")):
        if key in content:
            return {entry[field] for entry in content[key]}
    if "z" in content:
        return {row["metric"] for row in content["rows"]}
    if content.get("of") == "runs":
        names = [column["name"] for column in content["columns"]]
        return {
            name
            for place, name in enumerate(names)
            if any(row["cells"][place] is not None for row in content["rows"])
        }
    has_values = bool(content.get("points") or content.get("counts"))
    return {content["metric"]} if has_values else set()
