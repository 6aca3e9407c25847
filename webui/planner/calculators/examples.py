"""The page of textbook examples: calculations, and what their simple formulas omit."""

from __future__ import annotations

from typing import Any

from django.http import HttpResponse
from django.shortcuts import render
from django.utils.translation import gettext
from django.views.decorators.http import require_GET

from orchestrator.planner.textbook_examples import EXAMPLES, Example
from webui.planner import phrases
from webui.views.access import PageRequest, page


@page
@require_GET
def examples(request: PageRequest) -> HttpResponse:
    """The textbook-example page."""
    shown = [_example(each) for each in EXAMPLES]
    context = {
        "tab": "planner-examples",
        "examples": shown,
        "headline": "",
        "rest": gettext("Calculations from textbooks, and what their simple formulas omit."),
    }
    return render(request, "webui/planner/examples.html", context)


def _example(example: Example) -> dict[str, Any]:
    worked = example.compute()
    address = {"planner": "planner", "scaling": "planner-scaling", "serving": "planner-serving"}[
        example.page
    ]
    rows = [
        [{"text": _cell(cell), "number": isinstance(cell, int | float)} for cell in row]
        for row in worked.rows
    ]
    heads = [
        {"text": head, "number": bool(rows) and rows[0][at]["number"]}
        for at, head in enumerate(worked.columns)
    ]
    return {"example": example, "worked": worked, "heads": heads, "rows": rows, "page": address}


def _cell(value: str | float) -> str:
    if isinstance(value, str):
        return value
    if abs(value) >= 1e6:
        return phrases.prefixed(value, "").strip()
    return f"{value:,.0f}" if value == int(value) or abs(value) >= 1000 else f"{value:.4g}"
