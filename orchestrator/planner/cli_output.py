"""Formats answers as text for a terminal: a summary line, then a table.

Depends only on the shape of answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from workers.contracts.catalog.units import GIB, format_gib, format_time

_SHOWN_DEPTH = 4
_TREES = ("step_time_s", "mfu", "tokens_per_s_per_device", "usd_per_billion_tokens")


def format_search(scenario: Mapping[str, Any], answer: Mapping[str, Any], *, top: int) -> str:
    """The summary, the ranked plans, rejected plans, and changes that help if nothing fits."""
    cluster, work = scenario["cluster"], scenario["workload"]
    where = (
        f"{_model(scenario)} on {cluster['nodes']} x {cluster['devices_per_node']} x "
        f"{cluster['device']}"
    )
    batch = (
        f"{work['seq_len']:,} tokens per sequence, {work['global_batch_size']:,} sequences per step"
    )
    head = f"{where}, {batch}: {answer['enumerated']:,} legal plans, {answer['fit']:,} fit"
    lines = []
    if answer["fit"]:
        best = answer["plans"][0]
        step, low, high = (
            _number(best[name]) for name in ("step_time_s", "step_time_low_s", "step_time_high_s")
        )
        mfu = _number(best["mfu"])
        lines.append(
            f"{head}. The best takes {format_time(step)} per step ({format_time(low)} to "
            f"{format_time(high)}), {mfu:.1%} MFU."
        )
        lines += ["", *_table(_rows(answer["plans"][:top], answer["pareto"]))]
        lines.append(
            f"* on the Pareto front of time and memory; the search took {answer['seconds']:.2f} s"
        )
    else:
        lines.append(f"{head}.")
        if "closest" in answer:
            memory = answer["closest"]["memory"]
            need, capacity = memory["total_bytes"] / GIB, memory["capacity_bytes"] / GIB
            smallest = format_plan(answer["closest"]["plan"])
            lines.append(f"The smallest plan needs {need:.1f} of {capacity:.1f} GiB: {smallest}.")
        advice = [f"Would fit: {item['message']}" for item in answer.get("advice", ())]
        lines += advice or _no_advice(answer)
    lines += [str(note) for note in answer.get("notes", ())]
    for reason, number in list(answer["rejected"].items())[:6]:
        lines.append(f"rejected {number:>12,}  {reason}")
    return "\n".join(lines) + "\n"


def _no_advice(answer: Mapping[str, Any]) -> list[str]:
    """A line that says that no single change is sufficient."""
    if "closest" not in answer:
        return []
    return [
        "No single change of devices, sequence, batch or fixed fields is sufficient: change "
        "several at once."
    ]


def format_trees(answer: Mapping[str, Any]) -> str:
    """The trees of the best plan's memory and main numbers, or of the named numbers."""
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


def format_serving(request: Mapping[str, Any], answer: Mapping[str, Any]) -> str:
    """The verdict and the main numbers of a serving answer."""
    cluster, memory = request["cluster"], answer["memory"]
    all_devices = f"{cluster['nodes']} x {cluster['devices_per_node']} x {cluster['device']}"
    where = f"{_model(request)} on {answer['devices']} of {all_devices}"
    verdict = "fits" if answer["fits"] else "does not fit"
    rows = [
        ("first token", format_time(_number(answer["ttft_s"]))),
        ("each next token", format_time(_number(answer["tpot_s"]))),
        ("tokens/s", f"{_number(answer['tokens_per_s']):,.0f}"),
        ("time for prompts", f"{_number(answer['prompt_share']):.0%}"),
        ("concurrent sequences", str(answer["batch"])),
        ("max concurrent sequences", f"{_number(answer['max_concurrency']):,.0f}"),
        ("KV cache per token", f"{_number(answer['kv_bytes_per_token']) / 1024:,.1f} KiB"),
        ("weights per device", format_gib(_number(memory["weights_bytes_per_device"]))),
        (
            "total per device",
            f"{_number(memory['total_bytes']) / GIB:.1f} of "
            f"{format_gib(_number(memory['capacity_bytes']))}",
        ),
        ("USD per million tokens", f"{_number(answer['usd_per_million_tokens']):.3g}"),
        ("decode is bound by", str(answer["bound"])),
    ]
    width = max(len(name) for name, _ in rows)
    lines = [f"{where} {verdict}.", "", *(f"{name:<{width}}  {value}" for name, value in rows)]
    lines += [f"Would fit: {item}" for item in answer.get("suggestions", ())]
    return "\n".join(lines) + "\n"


def format_serving_simulation(request: Mapping[str, Any], answer: Mapping[str, Any]) -> str:
    """The load, latency percentiles, throughput and use of a simulated server."""
    load = request["load"]
    what = f"{load['rate']:g} requests/s" if load["rate"] else f"{load['clients']} clients"
    first = f"{_model(request)} on {answer['devices']} x {request['cluster']['device']}, {what}"
    if answer["saturated"]:
        first += f": it serves at most {answer['capacity']:.3g}/s, so the queue keeps growing"
    rows = [
        ("output tokens/s", f"{answer['tokens_per_s']:,.0f}"),
        *(
            (name, " / ".join(format_time(answer[key][level]) for level in ("p50", "p90", "p99")))
            for name, key in (
                ("first token, p50 / p90 / p99", "ttft_s"),
                ("each next token", "tpot_s"),
                ("whole answer", "latency_s"),
            )
            if answer[key]
        ),
        ("requests in a step, mean", f"{answer['running']['mean']:.1f}"),
        ("requests waiting, mean", f"{answer['waiting']['mean']:.1f}"),
        ("cache in use, mean", f"{answer['cache_use']['mean']:.0%}"),
        ("prefill / decode / idle", " / ".join(f"{each:.0%}" for each in answer["time"].values())),
        ("USD per million tokens", f"{answer['usd_per_million_tokens']:.3g}"),
    ]
    if (search := answer.get("search")) is not None:
        rate = search["rate"]
        rows.append(("largest rate", "none meets the limits" if rate is None else f"{rate:.3g}/s"))
        if search["replicas"]:
            text = f"{search['replicas']} ({search['usd_per_hour']:.2f} USD/h)"
            rows.append(("replicas for this load", text))
    width = max(len(name) for name, _ in rows)
    return "\n".join([f"{first}.", "", *(f"{name:<{width}}  {text}" for name, text in rows), ""])


def format_plan(plan: Mapping[str, Any]) -> str:
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
    for index, answer in enumerate(plans):
        plan, days = answer["plan"], answer["days"]
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
                f"{index + 1}{'*' if index in front else ''}",
                *(str(plan[name]) for name in ("dp", "tp", "pp", "cp", "ep")),
                copies,
                "yes" if plan["sequence_parallel"] else "",
                str(plan["micro_batch_size"]),
                plan["recompute"],
                plan["offload"],
                schedule if plan["pp"] > 1 else "",
                f"{_number(answer['memory']['total_bytes']) / GIB:.1f}",
                format_time(_number(answer["step_time_s"])),
                f"{_number(answer['mfu']):.1%}",
                f"{_number(answer['tokens_per_s_per_device']):,.0f}",
                f"{_number(answer['usd_per_billion_tokens']):,.0f}",
                f"{_number(days):,.1f}" if days is not None else "",
            ]
        )
    columns = [index for index in range(len(head)) if any(row[index] for row in rows[1:])]
    return [[row[index] for index in columns] for row in rows]


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]))]
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
    return [line, *(text for below in tree["inputs"] for text in _tree(below, depth + 1))]


def _short(value: Any) -> str:
    if isinstance(value, list):
        return (
            "["
            + ", ".join(_short(item) for item in value[:8])
            + (", …]" if len(value) > 8 else "]")
        )
    return "unknown" if value is None else f"{value:,.0f}" if abs(value) >= 1e6 else f"{value:.6g}"


def _number(value: Any) -> float:
    """A number, or the value of its tree; nan for None."""
    number = value["value"] if isinstance(value, Mapping) else value
    return float("nan") if number is None else float(number)


def _model(scenario: Mapping[str, Any]) -> str:
    model = scenario["model"]
    return str(model) if isinstance(model, str) else str(model.get("name", "the model"))
