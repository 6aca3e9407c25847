"""What the planner says of a run that answers, while its spec is typed: does it fit, how soon and
how fast it answers.

Pure; in the words and shape of `forecast`, whose other half this is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import urlencode

from webui.presentation import formatting
from workers.contracts.catalog.devices import DEVICES

_PIECES: Final = (
    ("weights_bytes_per_device", "mem-params"),
    ("activations_bytes", "mem-activations"),
)
_TIGHT: Final = 0.9


def told(spec: Mapping[str, Any], forecast: Mapping[str, Any]) -> dict[str, Any]:
    predicted = forecast["prediction"]
    memory, alone, full = predicted["memory"], predicted["alone"], predicted["full"]
    fits, assumed = bool(predicted["fits"]), bool(predicted.get("assumed"))
    capacity = memory["capacity_bytes"] or 1
    share = memory["total_bytes"] / capacity
    verdict, mood = (
        ("does not fit", "bad")
        if not fits
        else ("tight", "warn")
        if share > _TIGHT
        else ("fits", "good")
    )
    lengths = (
        f"prompts of {predicted['prompt_len']:,} tokens, answers of {predicted['output_len']:,}"
    )
    many = f"with {full['batch']} at once"
    facts = [
        ("First token", f"{formatting.seconds(alone['ttft_s'])} alone, for {lengths}"),
        (
            "A token",
            f"{formatting.seconds(alone['tpot_s'])} alone, {formatting.seconds(full['tpot_s'])} {many}",
        ),
        (
            "Speed",
            f"{formatting.quantity(full['tokens_per_s'])} tokens/s {many}; {predicted['bound']} is the "
            "limit",
        ),
        (
            "Cache",
            f"{formatting.count(predicted['kv_blocks'], 'block')} of 16 tokens, {_cache(predicted)}",
        ),
    ]
    weights = memory["weights_bytes_per_device"]
    return {
        "verdict": verdict,
        "mood": "warn" if assumed and mood == "bad" else mood,
        "device": predicted["device"],
        "assumed": assumed,
        "says": f"{formatting.memory(weights)} of weights in {formatting.memory(capacity)}",
        "bar": [
            {"share": round(100 * memory[name] / capacity, 2), "hue": hue} for name, hue in _PIECES
        ]
        + [{"share": round(100 * _cache_bytes(predicted) / capacity, 2), "hue": "mem-kv_cache"}],
        "facts": facts,
        "changes": list(predicted.get("suggestions") or predicted.get("try") or []),
        "blocks": bool(forecast.get("misfits")),
        "link": "",
        "serving_link": _link(spec, predicted),
        "calibration": "",
    }


def _cache_bytes(predicted: Mapping[str, Any]) -> float:
    return float(predicted["kv_blocks"] * 16 * predicted["kv_bytes_per_token"])


def _cache(predicted: Mapping[str, Any]) -> str:
    return f"{formatting.memory(_cache_bytes(predicted))}"


def _link(spec: Mapping[str, Any], predicted: Mapping[str, Any]) -> str:
    """The planner's serving page with the same question; empty where it cannot show it."""
    if predicted["device"] not in DEVICES or not isinstance(spec.get("model"), str):
        return ""
    asked = {
        "model": spec["model"],
        "device": predicted["device"],
        "prompt_len": predicted["prompt_len"],
        "output_len": predicted["output_len"],
        "batch": predicted["full"]["batch"],
    }
    return urlencode(asked)
