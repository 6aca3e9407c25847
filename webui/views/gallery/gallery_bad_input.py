"""Gallery samples of hostile and extreme input: names, values, clocks, tags and queries."""

from __future__ import annotations

from typing import Any

from django.utils.translation import gettext_noop as _

from orchestrator.run_table import language, selectors
from webui.charts import run_charts
from webui.charts.panel import Line, Panel
from webui.presentation import run_headlines

MARKUP = "<script>alert(1)</script>"
LONG = "baseline-with-rotary-embeddings-and-a-very-long-name-" * 4
QUERY = "lr>1e-4,val_loss<2"
METRICS = 5_000
_STEPS = list(range(1, 61))
_START = 1_768_487_400.0  # Unix seconds
_HOURS_10 = 36_000.0


def gallery_context() -> dict[str, Any]:
    """Return the context of the section `gallery_bad_input.html`."""
    try:
        language.parse(QUERY)
        problem = ""
    except language.QueryError as error:
        problem = selectors.query_refusal(QUERY, error).detail
    names = [f"layer.{number}/norm" for number in range(METRICS)]
    return {
        "panels": [panel.to_dict() for panel in _panels()],
        "source": {"name": "bad", "series": "", "curves": curves(), "ended": True, "axis": "time"},
        "headline": run_headlines.run_headline(run_headlines.RunFacts("running")),
        "name": LONG[:200],
        "tags": [f"sweep-{number}" for number in range(1, 1001)],
        "query": QUERY,
        "problem": problem,
        "search": run_charts.custom_search(names, "layer.12"),
        "all": run_charts.custom_search(names),
    }


def curves() -> dict[str, dict[str, Any]]:
    """Return series responses, with the times of their points."""
    even = [_START + 60 * step for step in _STEPS]
    gap = [time + (_HOURS_10 if step > 30 else 0) for step, time in zip(_STEPS, even, strict=True)]
    # the clock is set back by 20 minutes at step 31; the server keeps the order of the steps
    back = [
        min(time, even[30] - 1_200) if step <= 30 else time - 1_200
        for step, time in zip(_STEPS, even, strict=True)
    ]
    falling = [4 / step**0.5 for step in _STEPS]
    return {
        MARKUP: _curve(even, falling),
        "nan": _curve(even, ["NaN"] * len(_STEPS)),
        "gap": _curve(gap, falling),
        "back": _curve(back, falling),
    }


def _curve(time: list[float], y: list[Any]) -> dict[str, Any]:
    return {"x": _STEPS, "time": time, "y": y, "total_points": len(y), "rank": 0}


def _panels() -> list[Panel]:
    titles = {
        MARKUP: MARKUP,
        "nan": _("Only values that are not numbers"),
        "gap": _("A gap of 10 hours"),
        "back": _("A clock that goes backwards"),
    }
    return [
        *(
            Panel(f"bad-{place}", title, "", (Line(name, title, "other-series"),))
            for place, (name, title) in enumerate(titles.items())
        ),
        Panel("bad-none", _("A run without a step"), "", (Line("none", _("none"), "loss"),)),
    ]
