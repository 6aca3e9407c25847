"""Text of planner answers: headline, verdict, money, days and units."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from webui.presentation import formatting

# share of the capacity above which a plan counts as tight
TIGHT: Final = 0.92
# labels of common terms; others are derived from the name
_TERM_LABELS: Final = {
    "params_bytes": "parameters",
    "grads_bytes": "gradients",
    "optimizer_bytes": "optimizer states",
    "activations_bytes": "activations",
    "logits_bytes": "logits",
    "buffers_bytes": "buffers",
    "unattributed_bytes": "unattributed",
    "total_bytes": "memory",
    "capacity_bytes": "capacity",
    "compute_s": "compute",
    "exposed_comm_s": "exposed communication",
    "bubble_s": "pipeline bubble",
    "optimizer_s": "optimizer",
    "other_s": "other",
    "step_time_s": "step time",
    "tokens_per_s_per_device": "tokens/s per device",
    "mfu": "MFU",
    "hfu": "HFU",
    "tflops_per_device": "model TFLOP/s per device",
    "bubble_fraction": "bubble",
    "days": "days",
    "usd_per_billion_tokens": "dollars per billion tokens",
    "kwh_per_billion_tokens": "kWh per billion tokens",
    "step_time_low_s": "step time, low end",
    "step_time_high_s": "step time, high end",
    "host_bytes": "host memory",
    "all_reduce_bytes": "all-reduce",
    "all_gather_bytes": "all-gather",
    "reduce_scatter_bytes": "reduce-scatter",
    "broadcast_bytes": "broadcast",
    "all_to_all_bytes": "all-to-all",
    "send_bytes": "sent between stages",
    "tp_call_bytes": "calls of tensor ranks",
    "ttft_s": "time to first token",
    "tpot_s": "time per output token",
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
        return f"{formatting.quantity(round(real / 365.25, 1))} years"
    return f"{real:,.0f} days" if real >= 20 else f"{real:.1f} days"


def glyph(plan: Mapping[str, Any]) -> str:
    """Returns the plan as plain text: dp4·tp2·pp2·z1 bf16."""
    axes, rest = formatting.plan_parts(plan)
    return f"{'·'.join(axes)} {rest}".strip()


def details(plan: Mapping[str, Any]) -> str:
    """Returns what the glyph omits: micro-batches, schedule, replicas, prefetch."""
    micro, dp = int(plan.get("micro_batch_size") or 1), int(plan.get("dp") or 1)
    rounds = max(1, int(plan.get("global_batch_size") or 1) // (micro * dp))
    parts = [f"micro-batch {micro} × {rounds:,}"]
    if int(plan.get("pp") or 1) > 1:
        virtual = int(plan.get("virtual_stages") or 1)
        parts.append(str(plan.get("schedule", "1f1b")) + (f" × {virtual}" if virtual > 1 else ""))
    if int(plan.get("dp_replicate") or 1) > 1:
        parts.append(f"{plan['dp_replicate']} replicas")
    if plan.get("prefetch_layers") is not None:
        parts.append(f"prefetch {plan['prefetch_layers']}")
    return ", ".join(parts)


def verdict(answer: Mapping[str, Any]) -> tuple[str, str]:
    """Returns `(fits | tight | does not fit, good | warn | bad)`."""
    memory = answer.get("memory") or {}
    total, capacity = (
        formatting.number(memory.get("total_bytes")),
        formatting.number(memory.get("capacity_bytes")),
    )
    if not answer.get("fits"):
        return "does not fit", "bad"
    return (
        ("tight", "warn") if total and capacity and total > TIGHT * capacity else ("fits", "good")
    )


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
    return f"{total} of {capacity}"


def total_usd(answer: Mapping[str, Any], tokens: float | None) -> float | None:
    """Returns the cost of training on `tokens`; None if unknown."""
    each = formatting.number(answer.get("usd_per_billion_tokens"))
    return each * tokens / 1e9 if each is not None and tokens else None


def headline(
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
            return "", "No plan is valid with these fixed axes."
        return "", f"None of {formatting.count(legal, 'valid plan')} fits."
    memory, step = chosen["memory"], formatting.seconds(chosen["step_time_s"])
    fit = int(result.get("fit") or 0)
    label, mood = verdict(chosen)
    offloaded, host_capacity = host(chosen)
    if mood == "bad" and host_capacity is not None and offloaded > host_capacity:
        return glyph(chosen["plan"]), (
            f" does not fit: it offloads {formatting.memory(offloaded)} per device, the host has "
            f"only {formatting.memory(host_capacity)} per device."
        )
    if mood == "bad":
        where = (
            f" on stage {memory.get('stage', 0)}"
            if len(memory.get("per_stage_total_bytes") or []) > 1
            else ""
        )
        closest = (
            ""
            if fit
            else "; it is the closest of "
            f"{formatting.count(int(result.get('legal') or 0), 'valid plan')}"
        )
        return glyph(chosen["plan"]), f" does not fit: it needs {room(memory)}{where}{closest}."
    superlative = {"time": "the fastest", "cost": "the cheapest", "memory": "the lightest"}.get(
        objective, "the best"
    )
    rest = (
        f" is {superlative} of {formatting.count(fit, 'plan that fits', 'plans that fit')}: "
        if best and fit
        else ": "
    )
    low, high = chosen.get("step_time_low_s"), chosen.get("step_time_high_s")
    within = (
        f" ({formatting.seconds(low)} to {formatting.seconds(high)})"
        if low and high and high > low
        else ""
    )
    rest += f"{step} per step{within}, MFU {formatting.percent(chosen.get('mfu'))}, {room(memory)}"
    rest += " (tight)" if label == "tight" else ""
    rest += (
        f" if the host has {formatting.memory(offloaded)} of free memory per device"
        if offloaded and host_capacity is None
        else ""
    )
    if tokens and chosen.get("days") is not None:
        usd = total_usd(chosen, tokens)
        rest += f"; {formatting.quantity(tokens)} tokens take {days(chosen['days'])}" + (
            f" and {money(usd)}" if usd else ""
        )
    return glyph(chosen["plan"]), rest + "."


def term_label(name: str) -> str:
    """Returns the label of a term."""
    plain = name.removesuffix("_s").removesuffix("_bytes")
    return _TERM_LABELS.get(name, plain.replace("_", " "))


def in_unit(value: Any, unit: str) -> str:
    """Formats a term's value; long lists of stages are shortened."""
    if isinstance(value, list):
        if not value:
            return formatting.DASH
        shown = [in_unit(each, unit) for each in value]
        if len(set(shown)) == 1:
            return f"{shown[0]} on all {len(shown)}"
        return (
            ", ".join(shown)
            if len(shown) <= 4
            else f"{shown[0]}, {shown[1]} … {shown[-1]} over {len(shown)}"
        )
    real = formatting.number(value)
    if real is None:
        return formatting.DASH
    if unit in ("bytes", "B"):
        return f"{formatting.memory(real)}"
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
    first = problems[0]
    more = f", and {len(problems) - 1} more" if len(problems) > 1 else ""
    return (
        f"{first['message']}{' (try: ' + first['hint'] + ')' if first.get('hint') else ''}{more}."
    )
