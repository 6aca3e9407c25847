"""Compares a run's prediction with its measurements. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from django.utils.translation import gettext as _
from django.utils.translation import gettext_noop, ngettext

from webui.presentation import formatting

# metric → (title, hue, whether less is better)
_TITLES: Final = {
    "step_time_s": (gettext_noop("Step time"), "time", True),
    "wall_clock_s": (gettext_noop("Whole run"), "time-2", True),
    "tokens_per_s": (gettext_noop("Tokens/s"), "throughput", False),
    "mfu": (gettext_noop("MFU"), "mfu", False),
    "pipeline/bubble_fraction": (gettext_noop("Pipeline bubble"), "time-2", True),
    "generation_s": (gettext_noop("Generation"), "split-generation", True),
    "sync_s": (gettext_noop("Weight sync"), "split-exposed", True),
    "memory/params_bytes": (gettext_noop("Parameters"), "mem-params", True),
    "memory/grads_bytes": (gettext_noop("Gradients"), "mem-grads", True),
    "memory/optimizer_bytes": (gettext_noop("Optimizer states"), "mem-optimizer", True),
    "memory/activations_bytes": (gettext_noop("Activations"), "mem-activations", True),
    "memory/allocated_bytes": (gettext_noop("Allocated at the peak"), "mem-params", True),
}
_FAR: Final = 0.10  # like the `prediction_missed` event


@dataclass(frozen=True, slots=True)
class Comparison:
    """One metric; `predicted_at` and `measured_at` in percent of the larger of the two."""

    metric: str
    title: str
    hue: str
    predicted: str
    measured: str
    predicted_at: float
    measured_at: float
    off: str
    mood: str


def rows(compared: Iterable[Mapping[str, Any]]) -> list[Comparison]:
    """Return rows from `{metric, predicted, measured}`; `measured` is None before measurement."""
    by_metric = {str(item["metric"]): item for item in compared}
    result = []
    for metric, (title, hue, less) in _TITLES.items():
        item = by_metric.get(metric)
        predicted = formatting.number(item["predicted"]) if item else None
        if item is None or predicted is None:
            continue
        measured = formatting.number(item.get("measured"))
        most = max(predicted, measured or 0.0) or 1.0
        share = measured / predicted - 1 if measured is not None and predicted else None
        mood = (
            "" if share is None or abs(share) <= _FAR else "good" if (share < 0) == less else "warn"
        )
        off = "" if share is None else _off(share)
        result.append(
            Comparison(
                metric,
                _(title),
                hue,
                format_value(metric, predicted),
                format_value(metric, measured),
                round(100 * predicted / most, 2),
                round(100 * (measured or 0.0) / most, 2),
                off,
                mood,
            )
        )
    return result


def predicted_metrics(prediction: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a prediction as `{metric, predicted, measured: None}` by the run's metric names.

    `condition` names the load of a serving prediction.
    """
    if prediction.get("kind") == "serving":
        alone, full = prediction["alone"], prediction["full"]
        metrics = [
            ("inference/ttft_s", alone["ttft_s"], _("one request")),
            ("inference/tpot_s", alone["tpot_s"], _("one request")),
            (
                "inference/tokens_per_s",
                full["tokens_per_s"],
                _("%(count)s concurrent") % {"count": full["batch"]},
            ),
        ]
        return [
            {"metric": name, "predicted": value, "measured": None, "condition": condition}
            for name, value, condition in metrics
            if value
        ]
    memory = prediction.get("memory") or {}
    pairs = {
        "step_time_s": prediction.get("step_time_s"),
        "wall_clock_s": (prediction.get("whole_run") or {}).get("total_s"),
        "tokens_per_s": prediction.get("tokens_per_s"),
        "mfu": prediction.get("mfu"),
        "pipeline/bubble_fraction": prediction.get("bubble_fraction") or None,
        **(prediction.get("rollouts") or {}),
        **{
            f"memory/{part}_bytes": size
            for part, size in (prediction.get("largest_bytes") or {}).items()
        },
        # predictions for a CPU of version 0.1 leave out the process
        "memory/allocated_bytes": memory.get("total_bytes")
        if prediction.get("device") != "cpu" or memory.get("unattributed_bytes")
        else None,
    }
    return [
        {"metric": metric, "predicted": value, "measured": None}
        for metric, value in pairs.items()
        if value
    ]


def _off(share: float) -> str:
    """A relative error: +4.0%, and from twice on the ratio: ×11."""
    if share >= 1:
        return f"×{formatting.quantity(1 + share, 2)}"
    return f"{share:+.1%}".replace("-", "−")


def _in_sentence(title: str) -> str:
    """A title within a sentence: "step time", but "MFU"."""
    return title if title[1:2].isupper() else title[:1].lower() + title[1:]


def summary(compared: Iterable[Comparison]) -> str:
    """Summarize the accuracy of the prediction in one sentence."""
    known = [row for row in compared if row.off]
    if not known:
        return _("Nothing measured yet: medians start after the first steps.")
    far = [row for row in known if row.mood]
    if not far:
        return ngettext(
            "The %(count)s measured metric is within 10%% of its prediction.",
            "All %(count)s measured metrics are within 10%% of their prediction.",
            len(known),
        ) % {"count": len(known)}
    misses = formatting.listed([f"{_in_sentence(row.title)} {row.off}" for row in far[:4]])
    return _(
        "%(close)s of %(count)s measured metrics are within 10%% of their prediction. "
        "Outside: %(misses)s."
    ) % {"close": len(known) - len(far), "count": len(known), "misses": misses}


def format_value(metric: str, value: float | None) -> str:
    """Format a metric's value."""
    if value is None:
        return formatting.DASH
    if metric.endswith("_bytes"):
        return formatting.memory(value)
    if metric in ("mfu", "pipeline/bubble_fraction"):
        return formatting.percent(value)
    is_time = metric.endswith("_s") and not metric.endswith("_per_s")
    return formatting.seconds(value) if is_time else formatting.quantity(value)


def title_of(metric: str) -> str:
    """Return a metric's readable name."""
    return _in_sentence(_(_TITLES[metric][0])) if metric in _TITLES else metric
