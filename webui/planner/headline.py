"""Headline of a planner answer: whether the plan fits, its speed and its cost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from webui.planner import phrases
from webui.presentation import formatting


def describe_result(
    result: Mapping[str, Any],
    chosen: Mapping[str, Any] | None,
    *,
    best: bool,
    tokens: float | None,
    objective: str,
) -> tuple[str, str]:
    """Returns `(plan, rest of the sentence)`: whether it fits, its speed and its cost."""
    if chosen is None:
        legal = int(result.get("legal") or result.get("enumerated") or 0)
        if not legal:
            return "", _("No plan is valid with these constraints.")
        text = ngettext(
            "The only valid plan does not fit.", "None of %(count)s valid plans fits.", legal
        )
        return "", text % {"count": f"{legal:,}"}
    glyph_text = phrases.glyph(chosen["plan"])
    if phrases.verdict(chosen)[1] == "bad":
        return glyph_text, _does_not_fit(result, chosen)
    return glyph_text, _fits(result, chosen, best=best, tokens=tokens, objective=objective)


def _does_not_fit(result: Mapping[str, Any], chosen: Mapping[str, Any]) -> str:
    memory, legal = chosen["memory"], int(result.get("legal") or 0)
    offloaded, host_capacity = phrases.host(chosen)
    if host_capacity is not None and offloaded > host_capacity:
        return _(
            " does not fit: it offloads %(offloaded)s per device, the host has only "
            "%(capacity)s per device."
        ) % {
            "offloaded": formatting.memory(offloaded),
            "capacity": formatting.memory(host_capacity),
        }
    if len(memory.get("per_stage_total_bytes") or []) > 1:
        text = _(" does not fit: it needs %(room)s on stage %(stage)s")
    else:
        text = _(" does not fit: it needs %(room)s")
    text %= {"room": phrases.room(memory), "stage": memory.get("stage", 0)}
    if not int(result.get("fit") or 0):
        text += ngettext(
            "; it is the only valid plan", "; it is the closest of %(count)s valid plans", legal
        ) % {"count": f"{legal:,}"}
    return f"{text}."


def _fits(
    result: Mapping[str, Any],
    chosen: Mapping[str, Any],
    *,
    best: bool,
    tokens: float | None,
    objective: str,
) -> str:
    fit = int(result.get("fit") or 0)
    text = ": "
    if best and fit == 1:
        text = _(" is the only plan that fits: ")
    elif best and fit:
        text = _(" is %(superlative)s of %(count)s plans that fit: ") % {
            "superlative": _superlative(objective),
            "count": f"{fit:,}",
        }
    text += _("%(time)s per step") % {"time": formatting.seconds(chosen["step_time_s"])}
    low, high = chosen.get("step_time_low_s"), chosen.get("step_time_high_s")
    if low and high and high > low:
        text += _(" (%(low)s to %(high)s)") % {
            "low": formatting.seconds(low),
            "high": formatting.seconds(high),
        }
    text += f", MFU {formatting.percent(chosen.get('mfu'))}, {phrases.room(chosen['memory'])}"
    if phrases.verdict(chosen)[1] == "warn":
        text += _(" (tight)")
    offloaded, host_capacity = phrases.host(chosen)
    if offloaded and host_capacity is None:
        text += _(" if the host has %(memory)s of free memory per device") % {
            "memory": formatting.memory(offloaded)
        }
    if tokens and chosen.get("days") is not None:
        text += _cost(chosen, tokens)
    return f"{text}."


def _superlative(objective: str) -> str:
    names = {"time": _("the fastest"), "cost": _("the cheapest"), "memory": _("the smallest")}
    return names.get(objective, _("the best"))


def _cost(chosen: Mapping[str, Any], tokens: float) -> str:
    usd = phrases.total_usd(chosen, tokens)
    values = {"tokens": formatting.quantity(tokens), "time": phrases.days(chosen["days"])}
    if not usd:
        return _("; %(tokens)s tokens take %(time)s") % values
    return _("; %(tokens)s tokens take %(time)s and cost %(usd)s") % {
        **values,
        "usd": phrases.money(usd),
    }
