"""Choices of the form that edits a panel of a dashboard."""

from __future__ import annotations

from typing import Any, Final

from django.utils.translation import gettext
from django.utils.translation import gettext_noop as _

from orchestrator.accounts import teams
from orchestrator.runs import selectors as runs

# kind, title, what it shows
_KINDS: Final = (
    ("line", _("Lines"), _("a metric over steps, time, tokens or FLOPs")),
    ("bar", _("Bars"), _("one number per run")),
    ("scatter", _("Scatter plot"), _("a metric against another metric or a parameter")),
    (
        "histogram",
        _("Histogram"),
        _("how values of a metric are distributed, or a logged histogram"),
    ),
    ("heatmap", _("Heat map"), _("several metrics, or a logged histogram, over steps")),
    ("image", _("Images"), _("images that a program logged")),
    ("text", _("Texts"), _("texts that a program logged")),
    ("table", _("Table"), _("runs with columns, or a logged table")),
    ("markdown", _("Markdown"), _("your own text")),
)
_AXES: Final = (
    ("step", _("step")),
    ("time", _("time")),
    ("tokens", _("tokens")),
    ("flops", _("FLOPs")),
)
_AGGREGATES: Final = (
    ("last", _("newest value")),
    ("min", _("minimum")),
    ("max", _("maximum")),
    ("mean", _("mean")),
)
_SIZES: Final = (
    ("small", _("one column")),
    ("medium", _("two columns")),
    ("large", _("whole width")),
)
_EXPERIMENTS: Final = 200


def panel_form(user: Any) -> dict[str, Any]:
    """Options of the form's lists, translated; experiments and teams that the user sees."""
    return {
        "kinds": [(name, gettext(title), gettext(text)) for name, title, text in _KINDS],
        "axes": _translated(_AXES),
        "aggregates": _translated(_AGGREGATES),
        "sizes": _translated(_SIZES),
        "experiments": list(runs.experiments_visible_to(user=user)[:_EXPERIMENTS]),
        "teams": list(teams.teams_visible_to(user=user)[:_EXPERIMENTS]),
    }


def _translated(options: tuple[tuple[str, str], ...]) -> list[tuple[str, str]]:
    return [(name, gettext(title)) for name, title in options]
