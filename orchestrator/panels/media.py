"""Data of panels of images, texts, logged tables and logged histograms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from orchestrator.panels.spec import PanelSpec
from orchestrator.runs.models import Run
from orchestrator.tracking import selectors as tracking

MOST_RUNS: Final = 8  # whose media one panel shows
_PER_NAME: Final = 12
_STEPS: Final = 500  # that a page offers
_ROWS: Final = 100  # of a table


def media(panel: PanelSpec, runs: Sequence[Run], names: Sequence[str], kind: str) -> dict[str, Any]:
    """`{of: media, items: [{run, name, step, index, caption, data, image}], steps, more}`.

    The items of each run's newest step that is not after the panel's. `steps` are those that have
    items; of tables the first 100 rows.
    """
    items, steps, more = list[dict[str, Any]](), set[int](), 0
    for run in _with_media(runs, names, kind):
        steps.update(tracking.media_steps(run=run, names=names))
        shown = tracking.media_at(run=run, names=names, step=panel.step, most=_PER_NAME)
        for each in shown.values():
            own = [tracking.serialize_media(item) for item in each.items if item.kind == kind]
            items += [_item(document) for document in own]
            more += each.total - len(each.items)
    every = sorted(steps)
    if len(every) > _STEPS:
        last = len(every) - 1
        every = [every[round(place * last / (_STEPS - 1))] for place in range(_STEPS)]
    return {"of": "media", "items": items, "steps": every, "more": more}


def _with_media(runs: Sequence[Run], names: Sequence[str], kind: str) -> list[Run]:
    having = tracking.runs_with_media([run.pk for run in runs], names=names, kind=kind)
    return [run for run in runs if run.pk in having][:MOST_RUNS]


def _item(document: dict[str, Any]) -> dict[str, Any]:
    item = {key: document[key] for key in ("run", "name", "step", "index", "caption", "image")}
    data = document["data"]
    if document["kind"] == "table":
        rows = data["rows"]
        data = {"columns": data["columns"], "rows": rows[:_ROWS], "more": max(0, len(rows) - _ROWS)}
    return {**item, "data": data}
