"""The planner's answers in words: sentences, money, days, verdicts. Pure; knows no page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from webui.presentation import formatting

# of the capacity: it fits, and a longer sequence or a fragmented allocator may be too much
TIGHT: Final = 0.92
# terms a person meets most, in words; the rest is said by its own name
_TERMS: Final = {
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
    """$840, $12,300, $1.24M."""
    real = formatting.number(usd)
    if real is None:
        return formatting.DASH
    if real >= 1e6:
        return f"${formatting.quantity(real).replace('G', 'B')}"
    return f"${real:,.0f}" if real >= 10 else f"${real:,.2f}"


def days(value: Any) -> str:
    """95 days, or hours and minutes below two."""
    real = formatting.number(value)
    if real is None:
        return formatting.DASH
    if real < 2:
        return formatting.duration(real * 86400)
    if real >= 3650:
        return f"{formatting.quantity(round(real / 365.25, 1))} years"
    return f"{real:,.0f} days" if real >= 20 else f"{real:.1f} days"


def glyph(plan: Mapping[str, Any]) -> str:
    """dp4·tp2·pp2·z1 bf16, as plain text."""
    axes, rest = formatting.plan_words(plan)
    return f"{'·'.join(axes)} {rest}".strip()


def details(plan: Mapping[str, Any]) -> str:
    """What the glyph leaves out: micro-batches, schedule."""
    micro, dp = int(plan.get("micro_batch_size") or 1), int(plan.get("dp") or 1)
    rounds = max(1, int(plan.get("global_batch_size") or 1) // (micro * dp))
    parts = [f"micro-batch {micro} × {rounds:,}"]
    if int(plan.get("pp") or 1) > 1:
        virtual = int(plan.get("virtual_stages") or 1)
        parts.append(str(plan.get("schedule", "1f1b")) + (f" × {virtual}" if virtual > 1 else ""))
    if int(plan.get("dp_replicate") or 1) > 1:
        parts.append(f"{plan['dp_replicate']} copies")
    if plan.get("prefetch_layers") is not None:
        parts.append(f"prefetch {plan['prefetch_layers']}")
    return ", ".join(parts)


def verdict(answer: Mapping[str, Any]) -> tuple[str, str]:
    """`(fits | tight | too large, good | warn | bad)`."""
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
    """`(bytes, capacity)` of host memory for a device; None where nobody told it."""
    told = answer.get("host") or {}
    return formatting.number(told.get("host_bytes")) or 0.0, formatting.number(
        told.get("host_capacity_bytes")
    )


def room(memory: Mapping[str, Any]) -> str:
    """62.1 of 80.0 GiB."""
    total, capacity = (
        formatting.memory(memory.get("total_bytes")),
        formatting.memory(memory.get("capacity_bytes")),
    )
    if total.split(" ")[-1] == capacity.split(" ")[-1]:
        total = total.split(" ")[0]
    return f"{total} of {capacity}"


def total_usd(answer: Mapping[str, Any], tokens: float | None) -> float | None:
    each = formatting.number(answer.get("usd_per_billion_tokens"))
    return each * tokens / 1e9 if each is not None and tokens else None


def headline(
    found: Mapping[str, Any],
    chosen: Mapping[str, Any] | None,
    *,
    best: bool,
    tokens: float | None,
    objective: str,
) -> tuple[str, str]:
    """`(the plan, the rest of the sentence)`: which plan to run, whether it fits, how fast and for
    how much.
    """
    if chosen is None:
        legal = int(found.get("legal") or found.get("enumerated") or 0)
        if not legal:
            return "", "No plan is legal here: the fixed axes leave none."
        return "", f"None of {formatting.count(legal, 'legal plan')} fits."
    memory, step = chosen["memory"], formatting.seconds(chosen["step_time_s"])
    fit = int(found.get("fit") or 0)
    says, mood = verdict(chosen)
    held, has = host(chosen)
    if mood == "bad" and has is not None and held > has:
        away = f"it offloads {formatting.memory(held)} a device, the host has {formatting.memory(has)} for each"
        return glyph(chosen["plan"]), f" does not fit: {away}."
    if mood == "bad":
        where = (
            f" on stage {memory.get('stage', 0)}"
            if len(memory.get("per_stage_total_bytes") or []) > 1
            else ""
        )
        closest = (
            ""
            if fit
            else f"; it is the closest of {formatting.count(int(found.get('legal') or 0), 'legal plan')}"
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
    rest += f"{step} a step{within}, MFU {formatting.percent(chosen.get('mfu'))}, {room(memory)}"
    rest += " (tight)" if says == "tight" else ""
    rest += (
        f" if the host holds {formatting.memory(held)} more for each"
        if held and has is None
        else ""
    )
    if tokens and chosen.get("days") is not None:
        usd = total_usd(chosen, tokens)
        rest += f"; {formatting.quantity(tokens)} tokens take {days(chosen['days'])}" + (
            f" and {money(usd)}" if usd else ""
        )
    return glyph(chosen["plan"]), rest + "."


def term_words(name: str) -> str:
    plain = name.removesuffix("_s").removesuffix("_bytes")
    return _TERMS.get(name, plain.replace("_", " "))


def in_unit(value: Any, unit: str) -> str:
    """A term's value as people read it; a list of stages by its ends."""
    if isinstance(value, list):
        if not value:
            return formatting.DASH
        shown = [in_unit(each, unit) for each in value]
        if len(set(shown)) == 1:
            return f"{shown[0]} on each of {len(shown)}"
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
    """The same for a term of that name: shares have no unit, and are read as percent."""
    share = name in _SHARES or name.rpartition("_")[2] in ("fraction", "share", "efficiency")
    return (
        formatting.percent(value)
        if share and isinstance(value, int | float)
        else in_unit(value, unit)
    )


def prefixed(real: float, unit: str) -> str:
    """312 TFLOP/s: four digits with a metric prefix."""
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
    first = problems[0]
    more = f", and {len(problems) - 1} more" if len(problems) > 1 else ""
    return f"{first['message']}{'; try ' + first['hint'] if first.get('hint') else ''}{more}."
