"""Text of planner answers: verdict, money, days, terms and units."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from django.utils.translation import gettext as _
from django.utils.translation import gettext_noop, ngettext

from webui.presentation import formatting
from webui.presentation.problems import problem_text

# share of the capacity above which a plan counts as tight
TIGHT: Final = 0.92
# labels of common terms; others are derived from the name
_TERM_LABELS: Final = {
    "params_bytes": gettext_noop("parameters"),
    "reference_bytes": gettext_noop("reference"),
    "grads_bytes": gettext_noop("gradients"),
    "optimizer_bytes": gettext_noop("optimizer states"),
    "activations_bytes": gettext_noop("activations"),
    "logits_bytes": gettext_noop("logits"),
    "buffers_bytes": gettext_noop("buffers"),
    "rollout_bytes": gettext_noop("rollouts"),
    "unattributed_bytes": gettext_noop("unattributed"),
    "total_bytes": gettext_noop("memory"),
    "capacity_bytes": gettext_noop("capacity"),
    "compute_s": gettext_noop("compute"),
    "exposed_comm_s": gettext_noop("exposed communication"),
    "bubble_s": gettext_noop("pipeline bubble"),
    "optimizer_s": gettext_noop("optimizer"),
    "rollout_s": gettext_noop("rollouts"),
    "other_s": gettext_noop("other"),
    "step_time_s": gettext_noop("step time"),
    "tokens_per_s_per_device": gettext_noop("tokens/s per device"),
    "mfu": gettext_noop("MFU"),
    "hfu": gettext_noop("HFU"),
    "tflops_per_device": gettext_noop("model TFLOP/s per device"),
    "bubble_fraction": gettext_noop("bubble"),
    "generation_share": gettext_noop("share of generation"),
    "days": gettext_noop("days"),
    "usd_per_billion_tokens": gettext_noop("US dollars per billion tokens"),
    "kwh_per_billion_tokens": gettext_noop("kWh per billion tokens"),
    "step_time_low_s": gettext_noop("step time, low end"),
    "step_time_high_s": gettext_noop("step time, high end"),
    "host_bytes": gettext_noop("host memory"),
    "all_reduce_bytes": gettext_noop("all-reduce"),
    "all_gather_bytes": gettext_noop("all-gather"),
    "reduce_scatter_bytes": gettext_noop("reduce-scatter"),
    "broadcast_bytes": gettext_noop("broadcast"),
    "all_to_all_bytes": gettext_noop("all-to-all"),
    "send_bytes": gettext_noop("sent between stages"),
    "tp_call_bytes": gettext_noop("one collective of the tensor ranks"),
    "ttft_s": gettext_noop("time to first token"),
    "tpot_s": gettext_noop("time per output token"),
}
_SHARES: Final = frozenset({"mfu", "hfu", "occupancy"})


def money(usd: Any) -> str:
    """Formats US dollars: $840, $12,300, $1.24M."""
    real = formatting.number(usd)
    if real is None:
        return formatting.DASH
    if real >= 1e6:
        return f"${formatting.quantity(real).replace('G', 'B')}"
    return f"${real:,.0f}" if real >= 10 else f"${real:,.2f}"


def days(value: Any) -> str:
    """Formats days; hours and minutes below two days."""
    real = formatting.number(value)
    if real is None:
        return formatting.DASH
    if real < 2:
        return formatting.duration(real * 86400)
    if real >= 3650:
        return _("%(count)s years") % {"count": formatting.quantity(round(real / 365.25, 1))}
    return _("%(count)s days") % {"count": f"{real:,.0f}" if real >= 20 else f"{real:.1f}"}


def glyph(plan: Mapping[str, Any]) -> str:
    """Returns the plan as plain text: dp4·tp2·pp2·z1 bf16."""
    axes, rest = formatting.plan_parts(plan)
    return f"{'·'.join(axes)} {rest}".strip()


def details(plan: Mapping[str, Any]) -> str:
    """Returns what the glyph omits: micro-batches, schedule, replicas, prefetch."""
    micro, dp = int(plan.get("micro_batch_size") or 1), int(plan.get("dp") or 1)
    rounds = max(1, int(plan.get("global_batch_size") or 1) // (micro * dp))
    parts = [_("micro-batch %(size)s × %(count)s") % {"size": micro, "count": f"{rounds:,}"}]
    if int(plan.get("pp") or 1) > 1:
        virtual = int(plan.get("virtual_stages") or 1)
        parts.append(str(plan.get("schedule", "1f1b")) + (f" × {virtual}" if virtual > 1 else ""))
    if int(plan.get("dp_replicate") or 1) > 1:
        parts.append(_("%(count)s replicas") % {"count": plan["dp_replicate"]})
    if plan.get("prefetch_layers") is not None:
        count = int(plan["prefetch_layers"])
        text = ngettext("prefetch of %(count)s layer", "prefetch of %(count)s layers", count)
        parts.append(text % {"count": count} if count else _("no prefetch"))
    return ", ".join(parts)


def verdict(answer: Mapping[str, Any]) -> tuple[str, str]:
    """Returns `(fits | tight | does not fit, good | warn | bad)`."""
    memory = answer.get("memory") or {}
    total, capacity = (
        formatting.number(memory.get("total_bytes")),
        formatting.number(memory.get("capacity_bytes")),
    )
    if not answer.get("fits"):
        return _("does not fit"), "bad"
    if total and capacity and total > TIGHT * capacity:
        return _("tight"), "warn"
    return _("fits"), "good"


def host(answer: Mapping[str, Any]) -> tuple[float, float | None]:
    """Returns `(bytes, capacity)` of host memory per device; capacity None if unknown."""
    host_memory = answer.get("host") or {}
    return formatting.number(host_memory.get("host_bytes")) or 0.0, formatting.number(
        host_memory.get("host_capacity_bytes")
    )


def room(memory: Mapping[str, Any]) -> str:
    """Returns used of available memory: 62.1 of 80.0 GiB."""
    total, capacity = (
        formatting.memory(memory.get("total_bytes")),
        formatting.memory(memory.get("capacity_bytes")),
    )
    if total.split(" ")[-1] == capacity.split(" ")[-1]:
        total = total.split(" ")[0]
    return _("%(used)s of %(capacity)s") % {"used": total, "capacity": capacity}


def total_usd(answer: Mapping[str, Any], tokens: float | None) -> float | None:
    """Returns the cost of training on `tokens`; None if unknown."""
    each = formatting.number(answer.get("usd_per_billion_tokens"))
    return each * tokens / 1e9 if each is not None and tokens else None


def term_label(name: str) -> str:
    """Returns the label of a term."""
    plain = name.removesuffix("_s").removesuffix("_bytes")
    return _(_TERM_LABELS[name]) if name in _TERM_LABELS else plain.replace("_", " ")


def in_unit(value: Any, unit: str) -> str:
    """Formats a term's value; long lists of stages are shortened."""
    if isinstance(value, list):
        if not value:
            return formatting.DASH
        shown = [in_unit(each, unit) for each in value]
        if len(set(shown)) == 1:
            return _("%(value)s on all %(count)s") % {"value": shown[0], "count": len(shown)}
        if len(shown) <= 4:
            return ", ".join(shown)
        return _("%(first)s, %(second)s … %(last)s over %(count)s stages") % {
            "first": shown[0],
            "second": shown[1],
            "last": shown[-1],
            "count": len(shown),
        }
    real = formatting.number(value)
    if real is None:
        return formatting.DASH
    if unit in ("bytes", "B"):
        return formatting.memory(real)
    if unit in ("B/s", "FLOP", "FLOP/s"):
        return prefixed(real, unit)
    if unit == "s":
        return formatting.seconds(real)
    if unit in ("", "1"):
        return (
            f"{real:,.0f}"
            if real == int(real) and abs(real) < 1e9
            else formatting.quantity(real, 4)
        )
    if unit in ("fraction", "share"):
        return formatting.percent(real)
    if unit == "USD":
        return money(real)
    return f"{formatting.quantity(real, 4)} {unit}"


def shown(name: str, value: Any, unit: str) -> str:
    """Formats a term's value; shares are shown as percent."""
    share = name in _SHARES or name.rpartition("_")[2] in ("fraction", "share", "efficiency")
    return (
        formatting.percent(value)
        if share and isinstance(value, int | float)
        else in_unit(value, unit)
    )


def prefixed(real: float, unit: str) -> str:
    """Formats four digits with a metric prefix: 312 TFLOP/s."""
    for size, prefix in (
        (1e24, "Y"),
        (1e21, "Z"),
        (1e18, "E"),
        (1e15, "P"),
        (1e12, "T"),
        (1e9, "G"),
        (1e6, "M"),
    ):
        if abs(real) >= size:
            return f"{real / size:.4g} {prefix}{unit}"
    return f"{real:,.4g} {unit}"


def listed_problems(problems: Sequence[Mapping[str, str]]) -> str:
    """Returns the first problem with its hint, and how many more there are."""
    text, more = problem_text(problems[0]), len(problems) - 1
    if more:
        text += " " + ngettext("%(count)s more problem.", "%(count)s more problems.", more) % {
            "count": more
        }
    return text
