"""Metrics before and after training as a table with intervals, and a sentence about them."""

from __future__ import annotations

from typing import Any, Final

from django.utils.translation import gettext as _
from django.utils.translation import gettext_noop, ngettext

from webui.charts.before_after import mark
from webui.presentation import formatting
from webui.tabs.evaluation_metrics import METRICS
from workers.contracts.wire.serving_reports import ComparedMetric, Evaluated, Wins

_VERDICTS: Final = {
    "better": gettext_noop("better"),
    "worse": gettext_noop("worse"),
    "same": gettext_noop("no difference shown"),
}


def comparison(results: Evaluated) -> dict[str, Any] | None:
    """Return `{sentence, rows, baseline, judged}`; None without a baseline."""
    if results.baseline is None:
        return None
    return {
        "sentence": sentence(results),
        "baseline": results.baseline,
        "rows": [_row(each, results) for each in results.compared],
        "judged": judged(results.judged) if results.judged is not None else None,
    }


def sentence(results: Evaluated) -> str:
    """Name regressions first, then what improved."""
    worse = [_title(each.name) for each in results.compared if each.verdict == "worse"]
    better = [_title(each.name) for each in results.compared if each.verdict == "better"]
    wins = results.judged
    if wins is not None and wins.high < 0.5:
        worse.append(_("win rate"))
    if wins is not None and wins.low > 0.5:
        better.append(_("win rate"))
    lines = ngettext("%(count)s example", "%(count)s examples", results.lines) % {
        "count": f"{results.lines:,}"
    }
    if not any(each.p is not None for each in results.compared):
        return _("Not enough examples to test differences: %(lines)s.") % {"lines": lines}
    if worse and better:
        text = _("Regression in %(worse)s; better in %(better)s (95%% confidence, %(lines)s).")
    elif worse:
        text = _("Regression in %(worse)s (95%% confidence, %(lines)s).")
    elif better:
        text = _("Better in %(better)s, no regression shown (95%% confidence, %(lines)s).")
    else:
        text = _("No difference shown at 95%% confidence (%(lines)s).")
    return text % {
        "worse": formatting.listed(worse),
        "better": formatting.listed(better),
        "lines": lines,
    }


def judged(wins: Wins) -> dict[str, str]:
    """Return the win rate of the judge's choices as text."""
    return {
        "rate": formatting.percent(wins.rate),
        "interval": interval_text("share", (wins.low, wins.high)),
        "counts": _("%(wins)s wins, %(losses)s losses, %(ties)s ties")
        % {"wins": wins.wins, "losses": wins.losses, "ties": wins.ties},
    }


def value_text(unit: str, value: float) -> str:
    """Format a metric's value."""
    return formatting.percent(value) if unit == "share" else formatting.quantity(value, 4)


def interval_text(unit: str, ends: tuple[float, float]) -> str:
    """Format an interval."""
    low, high = (value_text(unit, each).replace("-", "−") for each in ends)
    return _("%(low)s to %(high)s") % {"low": low, "high": high}


def _row(compared: ComparedMetric, results: Evaluated) -> dict[str, Any]:
    unit = METRICS.get(compared.name, ("", "", "", ""))[1]
    tested = compared.p is not None
    name = compared.name
    before, after = results.before_intervals.get(name), results.intervals.get(name)
    difference = ""
    if compared.low is not None and compared.high is not None:
        difference = interval_text(unit, (compared.low, compared.high))
    return {
        "title": _title(name),
        "before": value_text(unit, compared.before),
        "before_interval": interval_text(unit, before) if before else "",
        "after": value_text(unit, compared.after),
        "after_interval": interval_text(unit, after) if after else "",
        "difference": signed(unit, compared.after - compared.before),
        "difference_interval": difference,
        "p": _probability(compared.p),
        "verdict": compared.verdict,
        "verdict_text": _(_VERDICTS[compared.verdict]) if tested else _("not tested"),
        "mark": mark(compared),
    }


def signed(unit: str, value: float) -> str:
    """Format a difference with its sign."""
    text = value_text(unit, abs(value))
    return f"−{text}" if value < 0 else f"+{text}" if value > 0 else text


def _probability(p: float | None) -> str:
    if p is None:
        return formatting.DASH
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def _title(name: str) -> str:
    return _(METRICS.get(name, (name.replace("_", " "), "", "", ""))[0])
