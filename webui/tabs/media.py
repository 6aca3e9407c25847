"""Media tab: images, histograms, texts and tables that a program logged, at one step."""

from __future__ import annotations

from typing import Any, Final
from urllib.parse import urlencode

from django.http import HttpRequest

from orchestrator.tracking import selectors as tracking
from webui.charts.bars import histogram_bars
from webui.presentation.run_facts import Facts

PAGE: Final = 24  # names per page
_ROWS: Final = 100  # of a table


def content(facts: Facts, request: HttpRequest) -> dict[str, Any]:
    """Return the template context of the tab; `?step=`, `?q=` and `?page=` choose what it shows."""
    run, query = facts.run, request.GET.get("q", "")[:200]
    steps = tracking.media_steps(run=run)
    step = _step(request.GET.get("step", ""), steps)
    names = tracking.media_names(run=run, query=query)
    pages = max(1, -(-len(names) // PAGE))
    page = min(max(_number(request.GET.get("page", "")) or 1, 1), pages)
    shown = names[(page - 1) * PAGE : page * PAGE]
    items = tracking.media_at(run=run, names=[row["name"] for row in shown], step=step)
    return {
        "cards": [card(row, items[row["name"]]) for row in shown],
        "total": len(names),
        "query": query,
        "step": step,
        "steps": steps,
        "earlier": _link(query, [each for each in steps if step is not None and each < step], -1),
        "later": _link(query, [each for each in steps if step is not None and each > step], 0),
        "page": page,
        "pages": pages,
        "source": facts.source(),
    }


def card(row: dict[str, Any], shown: tracking.Shown) -> dict[str, Any]:
    """One name with what it has at its newest step up to the chosen one."""
    return {
        **row,
        "step": shown.items[0].step if shown.items else None,
        "items": [_item(item) for item in shown.items],
        "more": shown.total - len(shown.items),
    }


def _item(item: Any) -> dict[str, Any]:
    document = tracking.serialize_media(item)
    if item.kind == "histogram":
        document["bars"] = histogram_bars(item.body["counts"], item.body["edges"])
    if item.kind == "table":
        document["rows"] = item.body["rows"][:_ROWS]
        document["hidden_rows"] = max(0, len(item.body["rows"]) - _ROWS)
    return document


def _step(text: str, steps: list[int]) -> int | None:
    """The chosen step, within the logged ones; the newest by default."""
    if not steps:
        return None
    number = _number(text)
    if number is None:
        return steps[-1]
    return min(max(number, steps[0]), steps[-1])


def _number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 19 else None


def _link(query: str, steps: list[int], place: int) -> str:
    if not steps:
        return ""
    values = {"tab": "media", "step": steps[place]} | ({"q": query} if query else {})
    return f"?{urlencode(values)}"
