"""The data of a block `panel`: a panel of `orchestrator.panels`, or one per match of its pattern.

Pictures are embedded in the data, because their addresses need a login and may end.
"""

from __future__ import annotations

import base64
import json
import re
from typing import Any, Final

from pydantic import ValidationError

from orchestrator.common import live
from orchestrator.common.errors import Refusal, invalid
from orchestrator.panels.expand import expand
from orchestrator.panels.resolve import resolve
from orchestrator.panels.spec import PanelSpec
from orchestrator.panels.viewed_runs import PanelViewer
from orchestrator.reports.readers import Readers
from orchestrator.runs.models import Run
from orchestrator.tracking import selectors as tracking
from workers.contracts.base import validation_problems

MOST_PANELS: Final = 12  # that a pattern makes in one block
MOST_IMAGE_BYTES: Final = 4_000_000  # of one block
_IMAGE: Final = re.compile(r"/media/(\d+)/file")
# parts of a panel's content with a run each
_BY_RUN: Final = ("curves", "bars", "points", "items", "rows")
_GONE: Final = {"code": "no_source", "subject": "", "near": "", "detail": ""}


def panel_spec(body: dict[str, Any]) -> PanelSpec:
    """The panel of a block. Raises 422 for a field that is wrong."""
    try:
        return PanelSpec.from_dict({"id": "panel", **body})
    except ValidationError as error:
        problem = validation_problems(error)[0]
        message = f"{problem.field}: {problem.message}" if problem.field else problem.message
        raise invalid("text", message, problem.hint) from None


def live_panels(body: dict[str, Any], readers: Readers) -> dict[str, Any]:
    """`{panels: [{spec}], left_out}`: what the browser of a person who is logged in draws."""
    made = expand(panel_spec(body), viewer(readers))
    panels = [{"spec": one.to_document()} for one in made.panels[:MOST_PANELS]]
    return {"panels": panels, "left_out": made.left_out + len(made.panels) - len(panels)}


def read_panels(body: dict[str, Any], readers: Readers) -> dict[str, Any]:
    """`{panels: [{spec, data}], left_out}` as JSON data that need nothing else to be drawn."""
    reading = viewer(readers)
    made = expand(panel_spec(body), reading)
    panels, left = list[dict[str, Any]](), MOST_IMAGE_BYTES
    for one in made.panels[:MOST_PANELS]:
        data = resolve(one, reading).to_dict()
        left -= _embed_images(data, {run.pk: run for run in reading.runs(one).runs}, left)
        panels.append({"spec": one.to_document(), "data": json.loads(live.dumps(data))})
    return {"panels": panels, "left_out": made.left_out + len(made.panels) - len(panels)}


def viewer(readers: Readers) -> PanelViewer:
    """The readers as `orchestrator.panels` sees them."""
    return PanelViewer(readers.first, also=readers.users[1:])


def panel_runs(data: dict[str, Any]) -> set[int]:
    """The runs whose data the panels show."""
    return {int(run["id"]) for panel in data["panels"] for run in panel["data"]["runs"]}


def without_runs(data: dict[str, Any], seen: frozenset[int]) -> dict[str, Any]:
    """The panels with the data of the runs in `seen` alone.

    A panel that adds up runs, such as a histogram of their values, shows nothing if one is hidden.
    """
    return {**data, "panels": [_panel_without(panel, seen) for panel in data["panels"]]}


def _panel_without(panel: dict[str, Any], seen: frozenset[int]) -> dict[str, Any]:
    data = panel["data"]
    runs = [run for run in data["runs"] if int(run["id"]) in seen]
    hidden = len(data["runs"]) - len(runs)
    if not hidden:
        return panel
    content = dict(data["content"])
    parts = [name for name in _BY_RUN if isinstance(content.get(name), list)]
    if content.get("of") == "histograms":  # over the steps of one run
        parts = [] if int(content["rows"][0]["run"]) not in seen else parts
    if not runs or not parts:
        empty = {"runs": [], "content": {}, "missing": [], "empty": _GONE}
        return {**panel, "data": {**data, **empty, "hidden_runs": data["hidden_runs"] + hidden}}
    for name in parts:
        chosen = [int(part["run"]) in seen for part in content[name]]
        # a heat map of metrics has a line of numbers per row
        if name == "rows" and content.get("of") == "metrics":
            content["z"] = _chosen(content["z"], chosen)
        content[name] = _chosen(content[name], chosen)
    changed = {"runs": runs, "content": content, "hidden_runs": data["hidden_runs"] + hidden}
    if not any(content[name] for name in parts):
        changed["empty"] = _GONE
    return {**panel, "data": {**data, **changed}}


def _chosen(rows: list[Any], chosen: list[bool]) -> list[Any]:
    return [row for row, is_chosen in zip(rows, chosen, strict=True) if is_chosen]


def _embed_images(data: dict[str, Any], runs: dict[int, Run], most: int) -> int:
    """Replace addresses of images by their content, at most `most` bytes; returns how many."""
    items = data["content"].get("items")
    if not items:
        return 0
    used, shown = 0, []
    for item in items:
        image = item.get("image")
        if image is None:
            shown.append(item)
            continue
        match, run = _IMAGE.search(image["url"]), runs.get(int(item["run"]))
        if match is None or run is None or used + image["bytes"] > most:
            continue
        try:
            blob = tracking.media_blob(run=run, id=int(match[1]))
        except Refusal:
            continue
        used += image["bytes"]
        encoded = base64.b64encode(bytes(blob.data)).decode()
        url = f"data:{blob.content_type};base64,{encoded}"
        shown.append({**item, "image": {**image, "url": url}})
    content = data["content"]
    data["content"] = {**content, "items": shown, "more": content["more"] + len(items) - len(shown)}
    return used
