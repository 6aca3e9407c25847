"""What the planner says of a spec while it is typed: fits, tight or does not fit and what would,
how fast, how long.

Pure; the forecast itself comes from the service that would predict the run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode

from webui.forms import forecast_serving
from webui.planner import phrases
from webui.planner.charts import memory as plan_memory
from webui.planner.form_fields import OWN
from webui.planner.plan_link import key_of
from webui.presentation import formatting
from workers.contracts.catalog.devices import DEVICES


def told(spec: Mapping[str, Any], forecast: Mapping[str, Any]) -> dict[str, Any] | None:
    """`{mood, verdict, says, bar, facts, changes, assumed, link}`; None where the planner has
    nothing to say.
    """
    predicted = forecast.get("prediction")
    if not predicted:
        return None
    if predicted.get("kind") == "serving":
        return forecast_serving.told(spec, forecast)
    memory, train = predicted["memory"], spec.get("train") or {}
    verdict, mood = phrases.verdict(predicted)
    assumed = bool(predicted.get("assumed"))
    device = str(predicted.get("device") or "")
    speed = f"{formatting.seconds(predicted['step_time_s'])} a step"
    low, high = predicted.get("step_time_low_s"), predicted.get("step_time_high_s")
    facts = [
        (
            "Step",
            f"{speed}, {formatting.seconds(low)} to {formatting.seconds(high)}"
            if low and high and high > low
            else speed,
        ),
        (
            "Speed",
            f"{formatting.quantity(predicted.get('tokens_per_s'))} tokens/s, MFU "
            f"{formatting.percent(predicted.get('mfu'))}",
        ),
    ]
    steps = train.get("steps")
    if isinstance(steps, int) and steps > 0:
        took = formatting.duration(steps * predicted["step_time_s"])
        facts.append(("Done in", f"about {took}, without checkpoints and validation"))
    if predicted.get("bubble_fraction"):
        facts.append(("Bubble", formatting.percent(predicted["bubble_fraction"])))
    return {
        "verdict": verdict,
        "mood": "warn" if assumed and mood == "bad" else mood,
        "device": device,
        "assumed": assumed,
        "says": phrases.room(memory),
        "bar": plan_memory.pieces(memory, with_free=False),
        "facts": facts,
        "changes": list(forecast.get("advice") or []),
        "blocks": bool(forecast.get("misfits")),
        "link": planner_query(spec, forecast),
        "calibration": predicted.get("calibration") or "",
    }


def planner_query(spec: Mapping[str, Any], forecast: Mapping[str, Any]) -> str:
    """The planner's link for the same model, devices and plan; empty where the page cannot show it."""
    plan, predicted, model = (
        forecast.get("plan"),
        forecast.get("prediction") or {},
        spec.get("model", "llama-tiny"),
    )
    cluster, train = predicted.get("cluster") or {}, spec.get("train") or {}
    device = cluster.get("device")
    device = device.get("name") if isinstance(device, Mapping) else device
    if not plan or device not in DEVICES or not isinstance(model, str | dict):
        return ""
    tokens = (
        int(train.get("steps") or 0)
        * int(train.get("seq_len") or 0)
        * int(plan["global_batch_size"])
    )
    pairs = {
        "model": model if isinstance(model, str) else OWN,
        "device": device,
        "nodes": cluster.get("nodes", 1),
        "devices_per_node": cluster.get("devices_per_node", 1),
        "seq_len": train.get("seq_len"),
        "global_batch_size": plan["global_batch_size"],
        "tokens": tokens or "",
        "precision": plan.get("precision", ""),
        "plan": key_of(plan),
    }
    if isinstance(model, dict):
        pairs["shape"] = json.dumps(model, separators=(",", ":"))
    return urlencode({name: value for name, value in pairs.items() if value is not None})
