"""Summary tab: tiles and charts of loss, throughput, MFU and memory; events; samples."""

from __future__ import annotations

from typing import Any, Final

from django.http import HttpRequest
from django.utils.translation import gettext as _
from django.utils.translation import gettext_noop

from webui.charts import run_charts
from webui.panels.pinned_panels import pinned_panels
from webui.presentation import formatting
from webui.presentation.run_facts import Facts
from webui.presentation.run_headlines import ENDED
from webui.tabs import predicted, rollouts, samples
from workers.contracts.catalog.metrics import metric_unit

# metric → (title, unit, hue)
TILES: Final = (
    ("loss", gettext_noop("Loss"), "", "loss"),
    ("val_loss", gettext_noop("Validation loss"), "", "loss-2"),
    ("dpo/margin", gettext_noop("Reward margin"), "", "loss"),
    ("dpo/accuracy", gettext_noop("Positive margins"), "", "loss-2"),
    ("reward/mean", gettext_noop("Reward"), "", "loss"),
    ("response_tokens", gettext_noop("Length of answers"), "tokens", "throughput"),
    ("reward/accuracy", gettext_noop("Pairs ranked as labeled"), "", "loss-2"),
    ("tokens_per_s", gettext_noop("Throughput"), "tokens/s", "throughput"),
    ("mfu", gettext_noop("MFU"), "", "mfu"),
    ("grad_norm", gettext_noop("Gradient norm"), "", "grad"),
    ("step_time_s", gettext_noop("Step time"), "", "time"),
    ("memory/allocated_bytes", gettext_noop("Memory"), "", "mem-params"),
    ("produce/accepted", gettext_noop("Accepted"), "lines", "throughput"),
    ("produce/rejected", gettext_noop("Rejected"), "lines", "event"),
    ("produce/lines_per_s", gettext_noop("Speed"), "lines/s", "throughput"),
    ("produce/tokens_per_s", gettext_noop("Generated"), "tokens/s", "throughput"),
    ("produce/cost_usd", gettext_noop("Cost"), "USD", "event"),
    ("inference/tokens_per_s", gettext_noop("Generated"), "tokens/s", "throughput"),
    ("inference/ttft_s", gettext_noop("Time to first token"), "", "time"),
    ("inference/tpot_s", gettext_noop("Time per token"), "", "time-2"),
    ("inference/scores_per_s", gettext_noop("Scores"), "scores/s", "throughput"),
    ("inference/score_s", gettext_noop("Time per score"), "", "time"),
    ("inference/running", gettext_noop("Running"), "", "throughput"),
    ("inference/kv_blocks_used", gettext_noop("Cache blocks"), "", "mem-kv_cache"),
)
_LONGEST_SEARCH: Final = 200
DEFAULT_TILES: Final = {
    "train": ("loss", "tokens_per_s", "mfu", "grad_norm", "step_time_s"),
    "script": ("loss", "tokens_per_s"),
    "external": ("loss", "tokens_per_s"),
    "serve": (
        "inference/tokens_per_s",
        "inference/ttft_s",
        "inference/tpot_s",
        "inference/running",
    ),
    "score": ("inference/scores_per_s", "inference/score_s", "inference/running"),
    "generate": ("inference/tokens_per_s", "inference/running"),
    "evaluate": ("inference/tokens_per_s",),
    "produce": ("produce/accepted", "produce/rejected", "produce/lines_per_s"),
}


def content(facts: Facts, request: HttpRequest) -> dict[str, Any]:
    """Return the template context of the tab."""
    names = facts.names
    if not names and facts.run.state in ENDED:
        return {"no_points": True, "source": facts.source()}
    search = request.GET.get("metrics", "").strip()[:_LONGEST_SEARCH]
    return {
        "tiles": tiles(facts),
        "panels": [
            panel.to_dict()
            for panel in predicted.with_levels(
                run_charts.summary(names, _kind(facts), facts.run.spec, search),
                facts.run.prediction,
            )
        ],
        "search": run_charts.custom_search(names, search),
        "samples": samples.expected(facts) and not rollouts.expected(facts),
        "rollouts": rollouts.expected(facts),
        "pinned": pinned_panels(facts.user, run=facts.run),
        "source": {**facts.source(), "quiet": [*sorted(run_charts.ELSEWHERE), *run_charts.QUIET]},
    }


def _kind(facts: Facts) -> str:
    """The run's kind; "score" for a serve run of a reward model."""
    return "score" if facts.scores else facts.run.kind


def tiles(facts: Facts) -> list[dict[str, Any]]:
    """Return tiles of the run's metrics; the defaults before its first point.

    Speeds of an ended run are medians, as in its headline: `median` is then True.
    """
    defaults, typical = DEFAULT_TILES.get(_kind(facts), ()), facts.typical
    return [
        {
            "name": name,
            "title": _("%(title)s, median") % {"title": _(title)} if name in typical else _(title),
            "unit": unit,
            "hue": hue,
            "value": format_metric(name, typical.get(name, facts.latest.get(name))),
            "median": name in typical,
        }
        for name, title, unit, hue in TILES
        if name in facts.latest or (not facts.latest and name in defaults)
    ]


def format_metric(name: str, value: float | None) -> str:
    """Format a metric's value, like `shown` in `static/webui/js/run.js`."""
    if value is None:
        return formatting.DASH
    if metric_unit(name) == "fraction":
        return formatting.percent(value)
    if name.endswith("_bytes"):
        return formatting.memory(value)
    if name.endswith("_s") and not name.endswith("per_s"):
        return formatting.duration(value)
    return formatting.quantity(value, 4 if "loss" in name else 3)
