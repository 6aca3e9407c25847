"""The planner's answers as its page shows them: rows, the chosen plan's parts, two plans beside
each other. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from webui.planner import phrases
from webui.planner.charts import communication, time
from webui.planner.charts import memory as plan_memory
from webui.planner.charts.scatter import Scatter, scatter
from webui.planner.form import Question
from webui.planner.plan_link import key_of
from webui.presentation import formatting

# tiles of the chosen plan: (name of the number, title, hue)
_TILES: Final = (
    ("step_time_s", "Step time", "time"),
    ("tokens_per_s_per_device", "Tokens/s per device", "throughput"),
    ("mfu", "MFU", "mfu"),
    ("total_bytes", "Memory", "mem-params"),
    ("days", "Time to train", "time"),
    ("usd_per_billion_tokens", "Cost", "event"),
)
_PLAN_ROWS: Final = (
    ("dp", "data parallel"),
    ("tp", "tensor parallel"),
    ("pp", "pipeline parallel"),
    ("cp", "context parallel"),
    ("ep", "expert parallel"),
    ("zero", "ZeRO stage"),
    ("dp_replicate", "copies"),
    ("sequence_parallel", "sequence parallel"),
    ("micro_batch_size", "micro-batch"),
    ("recompute", "recompute"),
    ("schedule", "pipeline schedule"),
    ("virtual_stages", "stages a device"),
    ("offload", "offload"),
    ("precision", "precision"),
    ("prefetch_layers", "prefetched layers"),
)


def row(
    rank: int, answer: Mapping[str, Any], alike: int, question: Question, chosen: str
) -> dict[str, Any]:
    """One line of the table; `alike` more plans differ from it in prefetched layers alone."""
    plan, memory = answer["plan"], answer["memory"]
    key, (held, _) = key_of(plan), phrases.host(answer)
    total, capacity = (
        formatting.number(memory.get("total_bytes")) or 0.0,
        formatting.number(memory.get("capacity_bytes")) or 0.0,
    )
    says, mood = phrases.verdict(answer)
    return {
        "rank": rank,
        "key": key,
        "plan": plan,
        "details": phrases.details(plan),
        "alike": alike,
        "chosen": key == chosen,
        "compared": key in question.compare,
        "query": question.query(plan=key),
        "fits": bool(answer.get("fits")),
        "verdict": says,
        "mood": mood,
        "step_time": formatting.seconds(answer["step_time_s"], 4),
        "interval": spread(answer),
        "tokens": formatting.quantity(answer["tokens_per_s_per_device"]),
        "mfu": formatting.percent(answer["mfu"]),
        "bar": plan_memory.pieces(memory, with_free=False),
        "host": f"+ {formatting.memory(held)} of host" if held else "",
        "memory": formatting.memory(total),
        "share": formatting.percent(total / capacity) if capacity else "",
        "cost": phrases.money(answer.get("usd_per_billion_tokens")),
        "bubble": formatting.percent(answer.get("bubble_fraction")),
    }


def distinct(plans: Sequence[Mapping[str, Any]], most: int) -> list[tuple[Mapping[str, Any], int]]:
    """The first of each kind of plan, and how many like it follow: those that differ in prefetched
    layers alone.
    """
    kinds: dict[str, list[Mapping[str, Any]]] = {}
    for answer in plans:
        kinds.setdefault(key_of({**answer["plan"], "prefetch_layers": None}), []).append(answer)
    return [(same[0], len(same) - 1) for same in list(kinds.values())[:most]]


def interval(answer: Mapping[str, Any]) -> str:
    """The 80% interval of the step's time."""
    step = formatting.number(answer.get("step_time_s"))
    low, high = (
        formatting.number(answer.get("step_time_low_s")),
        formatting.number(answer.get("step_time_high_s")),
    )
    if not step or low is None or high is None or high <= low:
        return ""
    return f"{formatting.seconds(low)} to {formatting.seconds(high)}"


def spread(answer: Mapping[str, Any]) -> str:
    """The same interval as shares of the step's time: −17% +21%."""
    step = formatting.number(answer.get("step_time_s"))
    low, high = (
        formatting.number(answer.get("step_time_low_s")),
        formatting.number(answer.get("step_time_high_s")),
    )
    if not step or low is None or high is None or high <= low:
        return ""
    return f"{low / step - 1:+.0%} {high / step - 1:+.0%}".replace("-", "−")


def drawn(plans: Sequence[Mapping[str, Any]], pareto: Sequence[int], chosen: str) -> Scatter | None:
    points = [
        {
            "key": key_of(answer["plan"]),
            "glyph": phrases.glyph(answer["plan"]),
            "step_time_s": answer["step_time_s"],
            "total_bytes": answer["memory"]["total_bytes"],
            "capacity_bytes": answer["memory"]["capacity_bytes"],
            "fits": answer.get("fits"),
        }
        for answer in plans
    ]
    return scatter(points, pareto=pareto, chosen=chosen)


def chosen(
    answer: Mapping[str, Any],
    question: Question,
    tokens: float | None,
    terms: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """Everything of one plan but its pipeline; `terms` are those that an answer line has no place
    for.
    """
    plan, memory = answer["plan"], answer["memory"]
    says, mood = phrases.verdict(answer)
    key = key_of(plan)
    return {
        "plan": plan,
        "key": key,
        "details": phrases.details(plan),
        "sentence": formatting.plan_sentence(plan),
        "verdict": says,
        "mood": mood,
        "tiles": _tiles(answer, tokens, question, key),
        "treemap": plan_memory.treemap(memory),
        "memory_says": plan_memory.summary(memory),
        "stages": plan_memory.stages(memory),
        "time": time.waterfall(answer),
        "comm": communication.kinds(answer.get("comm") or {}),
        "comm_says": communication.summary(answer.get("comm") or {}),
        "calls": communication.calls(answer.get("collectives")),
        "notes": answer.get("notes") or [],
        "servers": communication.servers(
            (terms or {}).get("parameter_server_bytes", 0.0),
            (terms or {}).get("parameter_server_link_bytes", 0.0),
            int(plan.get("dp") or 1),
        ),
        "query": question.query(plan=key),
        "json": json.dumps({**question.line(plan), "answer": _plain(answer)}, indent=2),
        "run": run_spec(question, plan),
    }


def run_spec(question: Question, plan: Mapping[str, Any]) -> str:
    """The new-run form's spec of this plan, as JSON without spaces."""
    line = question.line(plan)
    workload, device = line["workload"], line["cluster"]["device"]
    step_tokens = workload["seq_len"] * int(plan["global_batch_size"])
    steps = max(1, -(-int(workload["tokens"]) // step_tokens)) if workload.get("tokens") else 1000
    defaults = {
        "dp": 1,
        "tp": 1,
        "pp": 1,
        "cp": 1,
        "ep": 1,
        "zero": 0,
        "sequence_parallel": False,
        "offload": "none",
        "recompute": "none",
        "schedule": "1f1b",
        "virtual_stages": 1,
        "dp_replicate": 1,
    }
    spec: dict[str, Any] = {
        "kind": "train",
        "model": line["model"],
        "plan": {
            name: value
            for name, value in plan.items()
            if value is not None and value != defaults.get(name, ())
        },
        "train": {"steps": steps, "seq_len": workload["seq_len"]},
    }
    if isinstance(device, str):
        spec["resources"] = {"device": device}
    return json.dumps(spec, separators=(",", ":"))


def compared(
    first: Mapping[str, Any], second: Mapping[str, Any], tokens: float | None
) -> list[dict[str, Any]]:
    """`{name, first, second, change, mood}`: what of the plans differs, then the numbers that do,
    with their ratio.
    """
    rows: list[dict[str, Any]] = []
    for name, word in _PLAN_ROWS:
        one, two = _told(first["plan"].get(name)), _told(second["plan"].get(name))
        if one != two:
            rows.append({"name": word, "first": one, "second": two, "change": "", "mood": ""})
    for word, get, show, less in _numbers(tokens):
        before, after = formatting.number(get(first)), formatting.number(get(second))
        if before is None or after is None or (not before and not after):
            continue
        change = _change(before, after, less)
        if change["change"] != "same":
            rows.append({"name": word, "first": show(before), "second": show(after), **change})
    return rows


def _numbers(tokens: float | None) -> list[tuple[str, Any, Any, bool]]:
    """(word, getter, how it is shown, whether less is better)."""
    listed: list[tuple[str, Any, Any, bool]] = [
        ("step time", lambda a: a["step_time_s"], formatting.seconds, True),
        *(
            (part, lambda a, n=name: a["time"].get(n), formatting.seconds, True)
            for name, part, _ in time.PARTS
        ),
        ("tokens/s per device", lambda a: a["tokens_per_s_per_device"], formatting.quantity, False),
        ("MFU", lambda a: a["mfu"], formatting.percent, False),
        ("memory", lambda a: a["memory"]["total_bytes"], formatting.memory, True),
        *(
            (part, lambda a, n=name: a["memory"].get(n), formatting.memory, True)
            for name, part, _ in plan_memory.CATEGORIES
        ),
        ("host memory a device", lambda a: phrases.host(a)[0], formatting.memory, True),
        *(
            (
                f"sent for {kind} parallel",
                lambda a, n=name: (a.get("comm") or {}).get(n),
                formatting.memory,
                True,
            )
            for name, kind, _ in communication.KINDS
        ),
    ]
    if tokens:
        listed += [
            ("time to train", lambda a: a.get("days"), phrases.days, True),
            ("cost", lambda a: phrases.total_usd(a, tokens), phrases.money, True),
        ]
    return listed


def _change(one: float, two: float, less: bool) -> dict[str, str]:
    if not one or not two:
        return {"change": "", "mood": ""}
    share = two / one - 1
    if abs(share) < 0.0005:
        return {"change": "same", "mood": ""}
    better = (share < 0) == less
    return {"change": f"{share:+.1%}".replace("-", "−"), "mood": "good" if better else "bad"}


def _told(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "yes" if value else "no" if value is False else formatting.DASH
    return str(value)


def _tiles(
    answer: Mapping[str, Any], tokens: float | None, question: Question, key: str
) -> list[dict[str, str]]:
    memory = answer["memory"]
    usd = phrases.total_usd(answer, tokens)
    capacity = formatting.memory(memory.get("capacity_bytes"))
    shown = {
        "step_time_s": (formatting.seconds(answer["step_time_s"]), interval(answer)),
        "tokens_per_s_per_device": (
            formatting.quantity(answer["tokens_per_s_per_device"]),
            f"{formatting.quantity(answer['tflops_per_device'])} TFLOP/s",
        ),
        "mfu": (formatting.percent(answer["mfu"]), f"HFU {formatting.percent(answer['hfu'])}"),
        "total_bytes": (formatting.memory(memory["total_bytes"]), f"of {capacity}"),
        "days": (
            phrases.days(answer.get("days")),
            f"{formatting.quantity(tokens)} tokens" if tokens else "",
        ),
        "usd_per_billion_tokens": (
            phrases.money(usd if usd is not None else answer.get("usd_per_billion_tokens")),
            f"{phrases.money(answer.get('usd_per_billion_tokens'))} per G tokens"
            if usd
            else "per G tokens",
        ),
    }
    return [
        {
            "name": name,
            "title": title,
            "hue": hue,
            "value": shown[name][0],
            "more": shown[name][1],
            "query": question.query(plan=key, why=name),
        }
        for name, title, hue in _TILES
        if not (name == "days" and answer.get("days") is None)
    ]


def _plain(answer: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in answer.items() if name not in ("plan", "id")}
