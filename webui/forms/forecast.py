"""Describes the planner's forecast of a training spec: memory fit, speed, duration.

Pure functions; the forecast comes from the service that predicts the run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlencode

from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from webui.forms import forecast_serving
from webui.planner import phrases
from webui.planner.charts import memory as plan_memory
from webui.planner.form_fields import OWN
from webui.planner.plan_link import plan_key
from webui.presentation import formatting
from workers.contracts.catalog.devices import DEVICES


def describe(spec: Mapping[str, Any], forecast: Mapping[str, Any]) -> dict[str, Any] | None:
    """`{mood, verdict, summary, bar, facts, changes, assumed, link}`; None without a
    prediction.
    """
    predicted = forecast.get("prediction")
    if not predicted:
        return None
    if predicted.get("kind") == "serving":
        return forecast_serving.describe(spec, forecast)
    memory, train = predicted["memory"], spec.get("train") or {}
    verdict, mood = phrases.verdict(predicted)
    assumed = bool(predicted.get("assumed"))
    device = str(predicted.get("device") or "")
    speed = _("%(time)s per step") % {"time": formatting.seconds(predicted["step_time_s"])}
    low, high = predicted.get("step_time_low_s"), predicted.get("step_time_high_s")
    facts = [
        (
            _("Step"),
            _("%(speed)s, %(low)s to %(high)s")
            % {"speed": speed, "low": formatting.seconds(low), "high": formatting.seconds(high)}
            if low and high and high > low
            else speed,
        ),
        (
            _("Speed"),
            _("%(speed)s tokens/s, MFU %(mfu)s")
            % {
                "speed": formatting.quantity(predicted.get("tokens_per_s")),
                "mfu": formatting.percent(predicted.get("mfu")),
            },
        ),
    ]
    steps = train.get("steps")
    if isinstance(steps, int) and steps > 0:
        took = formatting.estimate(steps * predicted["step_time_s"])
        text = _("%(time)s, without checkpoints and validation") % {"time": took}
        facts.append((_("Duration"), text))
    if trials := forecast.get("trials"):
        text = _("%(count)s plans before the first step, about %(time)s, at most %(most)s")
        values = {"count": trials["plans"], "time": formatting.estimate(trials["seconds"])}
        facts.append(
            (_("Trials"), text % {**values, "most": formatting.estimate(trials["budget_s"])})
        )
    if predicted.get("bubble_fraction"):
        facts.append((_("Bubble"), formatting.percent(predicted["bubble_fraction"])))
    if share := predicted.get("generation_share"):
        text = _("%(share)s of the step") % {"share": formatting.percent(share)}
        facts.append((_("Generation"), text))
    if splits := predicted.get("splits"):
        used = used_split(spec, predicted)
        if used is not None:
            text = _("%(training)s train, %(rollouts)s sample; %(count)s splits compared")
            values = {name: used[name] for name in ("training", "rollouts")}
            facts.append((_("Devices"), text % {**values, "count": len(splits)}))
    return {
        "verdict": verdict,
        "mood": "warn" if assumed and mood == "bad" else mood,
        "device": device,
        "assumed": assumed,
        "summary": phrases.room(memory),
        "bar": plan_memory.segments(memory, with_free=False),
        "facts": facts,
        "changes": list(forecast.get("advice") or []),
        "blocks": bool(forecast.get("misfits")),
        "link": planner_query(spec, forecast),
        "calibration": predicted.get("calibration") or "",
        "notes": list(predicted.get("notes") or []),
    }


def sizes_hint(preview: Mapping[str, Any]) -> str:
    """The devices that an elastic run may train on, for the field of its minimum; else empty.

    With a minimum: the sizes with predicted step times. Without: which sizes are possible.
    """
    if sizes := preview.get("sizes"):
        return _("Sizes: %(sizes)s.") % {
            "sizes": "; ".join(_size(size) for size in reversed(sizes))
        }
    if possible := preview.get("possible_sizes"):
        return _("Possible sizes: %(sizes)s devices.") % {
            "sizes": formatting.listed([str(size) for size in possible])
        }
    return ""


def _size(size: Mapping[str, Any]) -> str:
    count = ngettext("%(count)s device", "%(count)s devices", size["devices"]) % {
        "count": size["devices"]
    }
    if size["fits"] is False:
        return _("%(devices)s (does not fit)") % {"devices": count}
    if size["step_time_s"] is None:
        return count
    return _("%(devices)s (%(time)s per step)") % {
        "devices": count,
        "time": formatting.seconds(size["step_time_s"], 2),
    }


def used_split(spec: Mapping[str, Any], prediction: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The split of devices between training and rollouts that the run has; None if none is
    stored.
    """
    splits = [each for each in prediction.get("splits") or [] if each["step_time_s"] is not None]
    train = spec.get("train") or {}
    body = train.get(str(train.get("objective"))) or {}
    number = (body.get("rollout") or {}).get("devices")
    if number == "auto":
        fitting = [each for each in splits if each["fits"]] or splits
        return min(fitting, key=lambda each: (each["step_time_s"], each["rollouts"]), default=None)
    return next((each for each in splits if each["rollouts"] == number), None)


def planner_query(spec: Mapping[str, Any], forecast: Mapping[str, Any]) -> str:
    """Return the planner query of the model, devices and plan; empty if it cannot show them."""
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
        "plan": plan_key(plan),
    }
    if isinstance(model, dict):
        pairs["shape"] = json.dumps(model, separators=(",", ":"))
    return urlencode({name: value for name, value in pairs.items() if value is not None})
