"""A run's prediction beside what it measured: rows of numbers, and levels for its charts. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from webui.presentation import formatting

# metric → (title, hue, whether less is better)
_TITLES: Final = {
    "step_time_s": ("Step time", "time", True),
    "tokens_per_s": ("Tokens/s", "throughput", False),
    "mfu": ("MFU", "mfu", False),
    "pipeline/bubble_fraction": ("Pipeline bubble", "time-2", True),
    "memory/params_bytes": ("Parameters", "mem-params", True),
    "memory/grads_bytes": ("Gradients", "mem-grads", True),
    "memory/optimizer_bytes": ("Optimizer states", "mem-optimizer", True),
    "memory/activations_bytes": ("Activations", "mem-activations", True),
    "memory/allocated_bytes": ("Allocated at the peak", "mem-params", True),
}
_FAR: Final = 0.10  # as the `prediction_missed` event


@dataclass(frozen=True, slots=True)
class Beside:
    """`predicted_at` and `measured_at` in per cent of the larger of the two."""

    metric: str
    title: str
    hue: str
    predicted: str
    measured: str
    predicted_at: float
    measured_at: float
    off: str
    mood: str


def rows(compared: Iterable[Mapping[str, Any]]) -> list[Beside]:
    """From `{metric, predicted, measured}` in the order of the titles; one not measured yet has
    None.
    """
    by_metric = {str(item["metric"]): item for item in compared}
    found = []
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
        off = "" if share is None else f"{share:+.1%}".replace("-", "−")
        found.append(
            Beside(
                metric,
                title,
                hue,
                shown(metric, predicted),
                shown(metric, measured),
                round(100 * predicted / most, 2),
                round(100 * (measured or 0.0) / most, 2),
                off,
                mood,
            )
        )
    return found


def foreseen(prediction: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What a prediction says, in the run's metrics, before anything is measured; `of` says of what,
    if that matters.
    """
    if prediction.get("kind") == "serving":
        alone, full = prediction["alone"], prediction["full"]
        told = [
            ("inference/ttft_s", alone["ttft_s"], "alone"),
            ("inference/tpot_s", alone["tpot_s"], "alone"),
            ("inference/tokens_per_s", full["tokens_per_s"], f"{full['batch']} at once"),
        ]
        return [
            {"metric": name, "predicted": value, "measured": None, "of": of}
            for name, value, of in told
            if value
        ]
    memory = prediction.get("memory") or {}
    pairs = {
        "step_time_s": prediction.get("step_time_s"),
        "tokens_per_s": prediction.get("tokens_per_s"),
        "mfu": prediction.get("mfu"),
        "pipeline/bubble_fraction": prediction.get("bubble_fraction") or None,
        **{
            f"memory/{part}_bytes": size
            for part, size in (prediction.get("largest_bytes") or {}).items()
        },
        # on a CPU a process holds Python and its libraries as well
        "memory/allocated_bytes": None
        if prediction.get("device") == "cpu"
        else memory.get("total_bytes"),
    }
    return [
        {"metric": metric, "predicted": value, "measured": None}
        for metric, value in pairs.items()
        if value
    ]


def summary(found: Iterable[Beside]) -> str:
    """One sentence: how near the prediction was."""
    known = [row for row in found if row.off]
    if not known:
        return "Nothing is measured yet: a median needs the first steps behind it."
    far = [row for row in known if row.mood]
    if not far:
        return f"All {len(known)} measured numbers are within a tenth of their prediction."
    told = formatting.listed([f"{row.title.lower()} {row.off}" for row in far[:4]])
    return (
        f"{len(known) - len(far)} of {len(known)} measured numbers are within a tenth of their "
        f"prediction; not {told}."
    )


def shown(metric: str, value: float | None) -> str:
    if value is None:
        return formatting.DASH
    if metric.endswith("_bytes"):
        return formatting.memory(value)
    if metric in ("mfu", "pipeline/bubble_fraction"):
        return formatting.percent(value)
    return formatting.seconds(value) if metric == "step_time_s" else formatting.quantity(value)
