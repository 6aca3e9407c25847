"""Describes the planner's forecast of an inference spec: memory fit, latency, throughput, cache.

Pure functions; returns the same shape as `forecast.describe`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import urlencode

from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from webui.presentation import formatting
from workers.contracts.catalog.devices import DEVICES

_MEMORY: Final = (
    ("weights_bytes_per_device", "mem-params"),
    ("activations_bytes", "mem-activations"),
)
_TIGHT: Final = 0.9


def describe(spec: Mapping[str, Any], forecast: Mapping[str, Any]) -> dict[str, Any]:
    """Return the forecast as the check shows it."""
    predicted = forecast["prediction"]
    memory, alone, full = predicted["memory"], predicted["alone"], predicted["full"]
    fits, assumed = bool(predicted["fits"]), bool(predicted.get("assumed"))
    capacity = memory["capacity_bytes"] or 1
    share = memory["total_bytes"] / capacity
    verdict, mood = (
        (_("does not fit"), "bad")
        if not fits
        else (_("tight"), "warn")
        if share > _TIGHT
        else (_("fits"), "good")
    )
    batch = full["batch"]
    facts = [
        (
            _("Time to first token"),
            _("%(time)s for one request (%(prompt)s prompt tokens, %(output)s output tokens)")
            % {
                "time": formatting.seconds(alone["ttft_s"]),
                "prompt": f"{predicted['prompt_len']:,}",
                "output": f"{predicted['output_len']:,}",
            },
        ),
        (
            _("Time per token"),
            _("%(alone)s for one request, %(full)s with %(count)s concurrent")
            % {
                "alone": formatting.seconds(alone["tpot_s"]),
                "full": formatting.seconds(full["tpot_s"]),
                "count": batch,
            },
        ),
        (
            _("Throughput"),
            _("%(speed)s tokens/s with %(count)s concurrent; bound by %(bound)s")
            % {
                "speed": formatting.quantity(full["tokens_per_s"]),
                "count": batch,
                "bound": predicted["bound"],
            },
        ),
        (
            _("KV cache"),
            ngettext(
                "%(count)s block of 16 tokens, %(size)s",
                "%(count)s blocks of 16 tokens, %(size)s",
                predicted["kv_blocks"],
            )
            % {
                "count": f"{predicted['kv_blocks']:,}",
                "size": formatting.memory(_cache_bytes(predicted)),
            },
        ),
    ]
    weights = memory["weights_bytes_per_device"]
    return {
        "verdict": verdict,
        "mood": "warn" if assumed and mood == "bad" else mood,
        "device": predicted["device"],
        "assumed": assumed,
        "summary": _("%(weights)s of weights in %(capacity)s")
        % {"weights": formatting.memory(weights), "capacity": formatting.memory(capacity)},
        "bar": [
            {"share": round(100 * memory[name] / capacity, 2), "hue": hue} for name, hue in _MEMORY
        ]
        + [{"share": round(100 * _cache_bytes(predicted) / capacity, 2), "hue": "mem-kv_cache"}],
        "facts": facts,
        "changes": list(predicted.get("suggestions") or predicted.get("try") or []),
        "blocks": bool(forecast.get("misfits")),
        "link": "",
        "serving_link": _link(spec, predicted),
        "calibration": "",
        "notes": list(predicted.get("notes") or []),
    }


def _cache_bytes(predicted: Mapping[str, Any]) -> float:
    return float(predicted["kv_blocks"] * 16 * predicted["kv_bytes_per_token"])


def _link(spec: Mapping[str, Any], predicted: Mapping[str, Any]) -> str:
    """Return the query of the planner's serving page; empty if it cannot show the model."""
    if predicted["device"] not in DEVICES or not isinstance(spec.get("model"), str):
        return ""
    query = {
        "model": spec["model"],
        "device": predicted["device"],
        "prompt_len": predicted["prompt_len"],
        "output_len": predicted["output_len"],
        "batch": predicted["full"]["batch"],
    }
    return urlencode(query)
