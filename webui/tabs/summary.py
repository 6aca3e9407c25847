"""Summary tab: is it learning, is it fast, will it finish."""

from __future__ import annotations

from typing import Any, Final

from django.http import HttpRequest

from webui.charts import panels
from webui.presentation import formatting
from webui.presentation.run_facts import Facts
from webui.tabs import predicted, samples

# metric → (title, unit words, hue)
TILES: Final = (
    ("loss", "Loss", "", "loss"),
    ("val_loss", "Validation loss", "", "loss-2"),
    ("tokens_per_s", "Throughput", "tokens/s", "throughput"),
    ("mfu", "MFU", "", "mfu"),
    ("grad_norm", "Gradient norm", "", "grad"),
    ("step_time_s", "Step time", "", "time"),
    ("memory/allocated_bytes", "Memory", "", "mem-params"),
    ("inference/tokens_per_s", "Generated", "tokens/s", "throughput"),
    ("inference/ttft_s", "First token", "", "time"),
    ("inference/tpot_s", "Per token", "", "time-2"),
    ("inference/running", "Running", "", "throughput"),
    ("inference/kv_blocks_used", "Cache blocks", "", "mem-kv_cache"),
)
USUAL: Final = {
    "train": ("loss", "tokens_per_s", "mfu", "grad_norm", "step_time_s"),
    "script": ("loss", "tokens_per_s"),
    "external": ("loss", "tokens_per_s"),
    "serve": (
        "inference/tokens_per_s",
        "inference/ttft_s",
        "inference/tpot_s",
        "inference/running",
    ),
    "generate": ("inference/tokens_per_s", "inference/running"),
    "evaluate": ("inference/tokens_per_s",),
}


def content(facts: Facts, request: HttpRequest) -> dict[str, Any]:
    names = facts.names
    return {
        "tiles": tiles(facts),
        "panels": [
            panel.to_dict()
            for panel in predicted.with_levels(
                panels.summary(names, facts.run.kind), facts.run.prediction
            )
        ],
        "unshown": panels.unshown(names),
        "samples": samples.expected(facts),
        "source": {**facts.source(), "quiet": [*sorted(panels.ELSEWHERE), *panels.QUIET]},
    }


def tiles(facts: Facts) -> list[dict[str, str]]:
    """Those whose metric the run has; the usual ones before its first point."""
    usual = USUAL.get(facts.run.kind, ())
    return [
        {
            "name": name,
            "title": title,
            "unit": unit,
            "hue": hue,
            "value": shown(name, facts.latest.get(name)),
        }
        for name, title, unit, hue in TILES
        if name in facts.latest or (not facts.latest and name in usual)
    ]


def shown(name: str, value: float | None) -> str:
    """A metric's value in its words, the same as the browser's format.js."""
    if value is None:
        return formatting.DASH
    if name == "mfu":
        return formatting.percent(value)
    if name.endswith("_bytes"):
        return formatting.memory(value)
    if name.endswith("_s") and not name.endswith("per_s"):
        return formatting.duration(value)
    return formatting.quantity(value, 4 if "loss" in name else 3)
