"""Answers as text for a terminal: a sentence first, then a table.

Knows answers' shapes; computes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

GIB = 2**30
_SHOWN_DEPTH = 4
_TREES = ("step_time_s", "mfu", "tokens_per_s_per_device", "usd_per_billion_tokens")


def told_search(scene: Mapping[str, Any], answer: Mapping[str, Any], *, top: int) -> str:
    """The sentence, the ranked plans, what was left out, and what would help where nothing fits."""
    cluster, work = scene["cluster"], scene["workload"]
    where = (
        f"{_model(scene)} on {cluster['nodes']} x {cluster['devices_per_node']} x "
        f"{cluster['device']}"
    )
    work_words = (
        f"{work['seq_len']:,} tokens a sequence, {work['global_batch_size']:,} sequences a step"
    )
    head = f"{where}, {work_words}: {answer['enumerated']:,} legal plans, {answer['fit']:,} fit"
    lines = []
    if answer["fit"]:
        best = answer["plans"][0]
        step, low, high = (
            _of(best[name]) for name in ("step_time_s", "step_time_low_s", "step_time_high_s")
        )
        mfu = _of(best["mfu"])
        lines.append(
            f"{head}. The best takes {duration(step)} a step ({duration(low)} to "
            f"{duration(high)}), {mfu:.1%} MFU."
        )
        lines += ["", *_table(_rows(answer["plans"][:top], answer["pareto"]))]
        lines.append(
            f"* no other plan is better in time and memory both; {answer['seconds']:.2f} s for "
            "the search"
        )
    else:
        lines.append(f"{head}.")
        if "closest" in answer:
            memory = answer["closest"]["memory"]
            need, have = memory["total_bytes"] / GIB, memory["capacity_bytes"] / GIB
            least = plan_words(answer["closest"]["plan"])
            lines.append(
                f"The one that needs least needs {need:.1f} GiB of {have:.1f} GiB: {least}."
            )
        lines += [f"Would fit: {each['says']}" for each in answer.get("advice", ())] or _no_advice(
            answer
        )
    lines += [str(note) for note in answer.get("notes", ())]
    for reason, number in list(answer["rejected"].items())[:6]:
        lines.append(f"left out {number:>12,}  {reason}")
    return "\n".join(lines) + "\n"


def _no_advice(answer: Mapping[str, Any]) -> list[str]:
    """Nothing fits, and none of the changes that were tried helps by itself."""
    if "closest" not in answer:
        return []
    return [
        (
            "No single change of devices, sequence, batch or fixed fields is enough: change "
            "several "
            "at once."
        )
    ]


def told_trees(answer: Mapping[str, Any]) -> str:
    """The best plan's memory and main numbers, or those asked for by name, each with its formula
    and inputs.
    """
    if not answer["plans"]:
        return ""
    best = answer["plans"][0]
    named = best.get("explained")
    trees = (
        named.values()
        if named
        else [best["memory"]["total_bytes"], *(best[name] for name in _TREES)]
    )
    return "\n" + "\n".join(line for tree in trees if tree for line in _tree(tree, 0)) + "\n"


def told_serving(request: Mapping[str, Any], answer: Mapping[str, Any]) -> str:
    cluster, memory = request["cluster"], answer["memory"]
    all_devices = f"{cluster['nodes']} x {cluster['devices_per_node']} x {cluster['device']}"
    where = f"{_model(request)} on {answer['devices']} of {all_devices}"
    verdict = "fits" if answer["fits"] else "does not fit"
    rows = [
        ("first token", duration(_of(answer["ttft_s"]))),
        ("each further token", duration(_of(answer["tpot_s"]))),
        ("tokens/s", f"{_of(answer['tokens_per_s']):,.0f}"),
        ("sequences at once", str(answer["batch"])),
        ("most sequences", f"{_of(answer['max_concurrency']):,.0f}"),
        ("KV cache a token", f"{_of(answer['kv_bytes_per_token']) / 1024:,.1f} KiB"),
        ("weights a device", f"{_of(memory['weights_bytes_per_device']) / GIB:.1f} GiB"),
        (
            "in all a device",
            f"{_of(memory['total_bytes']) / GIB:.1f} of {_of(memory['capacity_bytes']) / GIB:.1f} "
            "GiB",
        ),
        ("USD per million tokens", f"{_of(answer['usd_per_million_tokens']):.3g}"),
        ("a step waits for", str(answer["bound"])),
    ]
    width = max(len(name) for name, _ in rows)
    lines = [f"{where} {verdict}.", "", *(f"{name:<{width}}  {value}" for name, value in rows)]
    lines += [f"Would fit: {each}" for each in answer.get("suggestions", ())]
    return "\n".join(lines) + "\n"


def duration(seconds: float) -> str:
    """Three digits in the unit that a person would say: ms, s, minutes, hours or days."""
    if seconds < 0.9995:
        return f"{seconds * 1e3:.3g} ms"
    for limit, unit, size in ((120, "s", 1), (7200, "min", 60), (172_800, "h", 3600)):
        if seconds < limit:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 86_400:,.1f} days"


def plan_words(plan: Mapping[str, Any]) -> str:
    """`dp 8, tp 2, zero 1, micro-batch 2, recompute full`."""
    degrees = [
        f"{name} {plan[name]}" for name in ("dp", "tp", "pp", "cp", "ep") if plan.get(name, 1) > 1
    ] or ["one device"]
    more = [f"zero {plan['zero']}"] if plan.get("zero") else []
    more.append(f"micro-batch {plan.get('micro_batch_size', 1)}")
    more += [
        f"{name} {plan[name]}"
        for name in ("recompute", "offload")
        if plan.get(name, "none") != "none"
    ]
    more += [f"{plan['schedule']}"] if plan.get("pp", 1) > 1 else []
    return ", ".join([*degrees, *more, str(plan.get("precision", "fp32"))])


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns as wide as their widest cell, numbers to the right."""
    return _table([list(head), *[list(row) for row in rows]])


def _rows(plans: Sequence[Mapping[str, Any]], pareto: Sequence[int]) -> list[list[str]]:
    head = [
        "",
        "dp",
        "tp",
        "pp",
        "cp",
        "ep",
        "zero",
        "sp",
        "micro",
        "recompute",
        "offload",
        "schedule",
        "GiB",
        "step",
        "MFU",
        "tokens/s/device",
        "USD/10^9 tokens",
        "days",
    ]
    rows = [head]
    front = set(pareto)
    for place, each in enumerate(plans):
        plan, days = each["plan"], each["days"]
        schedule = (
            f"{plan['schedule']} x{plan['virtual_stages']}"
            if plan["virtual_stages"] > 1
            else plan["schedule"]
        )
        copies = (
            f"{plan['zero']} /{plan['dp_replicate']}"
            if plan.get("dp_replicate")
            else str(plan["zero"])
        )
        rows.append(
            [
                f"{place + 1}{'*' if place in front else ''}",
                *(str(plan[name]) for name in ("dp", "tp", "pp", "cp", "ep")),
                copies,
                "yes" if plan["sequence_parallel"] else "",
                str(plan["micro_batch_size"]),
                plan["recompute"],
                plan["offload"],
                schedule if plan["pp"] > 1 else "",
                f"{_of(each['memory']['total_bytes']) / GIB:.1f}",
                duration(_of(each["step_time_s"])),
                f"{_of(each['mfu']):.1%}",
                f"{_of(each['tokens_per_s_per_device']):,.0f}",
                f"{_of(each['usd_per_billion_tokens']):,.0f}",
                f"{_of(days):,.1f}" if days is not None else "",
            ]
        )
    kept = [at for at in range(len(head)) if any(row[at] for row in rows[1:])]
    return [[row[at] for at in kept] for row in rows]


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    return [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _tree(tree: Mapping[str, Any], depth: int) -> list[str]:
    formula = "" if tree["formula"] == "given" else f" = {tree['formula']}"
    source = f"  [{tree['source']}]" if tree["source"] else ""
    line = (
        f"{'  ' * depth}{tree['name']} {_short(tree['value'])} {tree['unit']}".rstrip()
        + formula
        + source
    )
    if depth >= _SHOWN_DEPTH:
        return [line]
    return [line, *(each for below in tree["inputs"] for each in _tree(below, depth + 1))]


def _short(value: Any) -> str:
    if isinstance(value, list):
        return (
            "["
            + ", ".join(_short(each) for each in value[:8])
            + (", …]" if len(value) > 8 else "]")
        )
    return "unknown" if value is None else f"{value:,.0f}" if abs(value) >= 1e6 else f"{value:.6g}"


def _of(value: Any) -> float:
    """The number, or the number of its tree."""
    found = value["value"] if isinstance(value, Mapping) else value
    return float("nan") if found is None else float(found)


def _model(scene: Mapping[str, Any]) -> str:
    model = scene["model"]
    return str(model) if isinstance(model, str) else str(model.get("name", "the model"))
