"""Template context of planner answers: table rows, the selected plan and comparisons."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from django.utils.translation import gettext as _
from django.utils.translation import gettext_noop

from webui.planner import phrases
from webui.planner.charts import communication, time
from webui.planner.charts import memory as plan_memory
from webui.planner.charts.scatter import Scatter, scatter
from webui.planner.form import FormState
from webui.planner.plan_link import plan_key
from webui.presentation import formatting

# tiles of the chosen plan: (name of the number, title, hue)
_TILES: Final = (
    ("step_time_s", gettext_noop("Step time"), "time"),
    ("tokens_per_s_per_device", gettext_noop("Tokens/s per device"), "throughput"),
    ("mfu", gettext_noop("MFU"), "mfu"),
    ("total_bytes", gettext_noop("Memory"), "mem-params"),
    ("days", gettext_noop("Time to train"), "time"),
    ("usd_per_billion_tokens", gettext_noop("Cost"), "event"),
)
# plan field → label
PLAN_ROWS: Final = (
    ("dp", gettext_noop("data parallel")),
    ("tp", gettext_noop("tensor parallel")),
    ("pp", gettext_noop("pipeline parallel")),
    ("cp", gettext_noop("context parallel")),
    ("ep", gettext_noop("expert parallel")),
    ("zero", gettext_noop("ZeRO stage")),
    ("dp_replicate", gettext_noop("replicas")),
    ("sequence_parallel", gettext_noop("sequence parallel")),
    ("micro_batch_size", gettext_noop("micro-batch")),
    ("global_batch_size", gettext_noop("global batch")),
    ("recompute", gettext_noop("recompute")),
    ("schedule", gettext_noop("pipeline schedule")),
    ("virtual_stages", gettext_noop("stages per device")),
    ("offload", gettext_noop("offload")),
    ("precision", gettext_noop("precision")),
    ("prefetch_layers", gettext_noop("prefetched layers")),
    ("max_live_params", gettext_noop("gathered parameters")),
    ("param_persistence_threshold", gettext_noop("persistence threshold")),
    ("params_dtype", gettext_noop("stored weights")),
)


def row(
    rank: int, answer: Mapping[str, Any], alike: int, state: FormState, chosen: str
) -> dict[str, Any]:
    """Returns a table row; `alike` more plans differ only in prefetched layers."""
    plan, memory = answer["plan"], answer["memory"]
    key, offloaded = plan_key(plan), phrases.host(answer)[0]
    total, capacity = (
        formatting.number(memory.get("total_bytes")) or 0.0,
        formatting.number(memory.get("capacity_bytes")) or 0.0,
    )
    verdict, mood = phrases.verdict(answer)
    return {
        "rank": rank,
        "key": key,
        "plan": plan,
        "details": phrases.details(plan),
        "alike": alike,
        "chosen": key == chosen,
        "compared": key in state.compare,
        "query": state.query(plan=key),
        "fits": bool(answer.get("fits")),
        "verdict": verdict,
        "mood": mood,
        "step_time": formatting.seconds(answer["step_time_s"], 4),
        "interval": spread(answer),
        "tokens": formatting.quantity(answer["tokens_per_s_per_device"]),
        "mfu": formatting.percent(answer["mfu"]),
        "bar": plan_memory.segments(memory, with_free=False),
        "host": (
            _("+ %(memory)s host") % {"memory": formatting.memory(offloaded)} if offloaded else ""
        ),
        "memory": formatting.memory(total),
        "share": formatting.percent(total / capacity) if capacity else "",
        "cost": phrases.money(answer.get("usd_per_billion_tokens")),
        "bubble": formatting.percent(answer.get("bubble_fraction")),
    }


def distinct(plans: Sequence[Mapping[str, Any]], most: int) -> list[tuple[Mapping[str, Any], int]]:
    """Groups plans that differ only in prefetched layers: `(first, number of others)`."""
    kinds: dict[str, list[Mapping[str, Any]]] = {}
    for answer in plans:
        kinds.setdefault(plan_key({**answer["plan"], "prefetch_layers": None}), []).append(answer)
    return [(same[0], len(same) - 1) for same in list(kinds.values())[:most]]


def interval(answer: Mapping[str, Any]) -> str:
    """Returns the 80% interval of the step time."""
    bounds = _bounds(answer)
    return time.interval(*bounds[1:]) if bounds else ""


def spread(answer: Mapping[str, Any]) -> str:
    """Returns the 80% interval relative to the step time: −17% +21%."""
    bounds = _bounds(answer)
    if bounds is None:
        return ""
    step, low, high = bounds
    return f"{low / step - 1:+.0%} {high / step - 1:+.0%}".replace("-", "−")


def _bounds(answer: Mapping[str, Any]) -> tuple[float, float, float] | None:
    """Step time and the ends of its 80% interval in seconds; None without an interval."""
    names = ("step_time_s", "step_time_low_s", "step_time_high_s")
    step, low, high = (formatting.number(answer.get(name)) for name in names)
    if not step or low is None or high is None or high <= low:
        return None
    return step, low, high


def drawn(plans: Sequence[Mapping[str, Any]], pareto: Sequence[int], chosen: str) -> Scatter | None:
    """Draws the plans as a scatter plot."""
    points = [
        {
            "key": plan_key(answer["plan"]),
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
    state: FormState,
    tokens: float | None,
    terms: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """Returns the context of the selected plan; `terms` are values that the answer line lacks."""
    plan, memory = answer["plan"], answer["memory"]
    verdict, mood = phrases.verdict(answer)
    key = plan_key(plan)
    return {
        "plan": plan,
        "key": key,
        "details": phrases.details(plan),
        "sentence": formatting.describe_plan(plan),
        "verdict": verdict,
        "mood": mood,
        "tiles": _tiles(answer, tokens, state, key),
        "treemap": plan_memory.treemap(memory),
        "memory_summary": plan_memory.summary(memory),
        "memory_peaks": plan_memory.two_peaks(memory),
        "stages": plan_memory.stages(memory),
        "time": time.waterfall(answer),
        "comm": communication.kinds(answer.get("comm") or {}),
        "comm_summary": communication.summary(answer.get("comm") or {}),
        "calls": communication.calls(answer.get("collectives")),
        "notes": answer.get("notes") or [],
        "servers": communication.servers(
            (terms or {}).get("parameter_server_bytes", 0.0),
            (terms or {}).get("parameter_server_link_bytes", 0.0),
            int(plan.get("dp") or 1),
        ),
        "query": state.query(plan=key),
        "json": json.dumps({**state.line(plan), "answer": _plain(answer)}, indent=2),
        "run": run_spec(state, plan),
    }


def run_spec(state: FormState, plan: Mapping[str, Any]) -> str:
    """Returns the run spec of this plan for the new-run form, as compact JSON."""
    line = state.line(plan)
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
    """Returns rows `{name, first, second, change, mood}`: plan fields, then numbers that differ."""
    rows: list[dict[str, Any]] = []
    for name, label in PLAN_ROWS:
        one, two = _plan_value(first["plan"].get(name)), _plan_value(second["plan"].get(name))
        if one != two:
            rows.append({"name": _(label), "first": one, "second": two, "change": "", "mood": ""})
    for label, get, show, less in _numbers(tokens):
        before, after = formatting.number(get(first)), formatting.number(get(second))
        if before is None or after is None or (not before and not after):
            continue
        change = _change(before, after, less)
        if change["change"] != "same":
            rows.append({"name": label, "first": show(before), "second": show(after), **change})
    return rows


def _numbers(tokens: float | None) -> list[tuple[str, Any, Any, bool]]:
    """Returns `(label, getter, formatter, whether less is better)` of each number."""
    listed: list[tuple[str, Any, Any, bool]] = [
        (_("step time"), lambda a: a["step_time_s"], formatting.seconds, True),
        *(
            (_(part), lambda a, n=name: a["time"].get(n), formatting.seconds, True)
            for name, part, hue in time.PARTS
        ),
        (
            _("tokens/s per device"),
            lambda a: a["tokens_per_s_per_device"],
            formatting.quantity,
            False,
        ),
        ("MFU", lambda a: a["mfu"], formatting.percent, False),
        (_("memory"), lambda a: a["memory"]["total_bytes"], formatting.memory, True),
        *(
            (_(part), lambda a, n=name: a["memory"].get(n), formatting.memory, True)
            for name, part, hue in plan_memory.CATEGORIES
        ),
        (_("host memory per device"), lambda a: phrases.host(a)[0], formatting.memory, True),
        *(
            (
                _("sent for %(axis)s") % {"axis": _(label)},
                lambda a, n=name: (a.get("comm") or {}).get(n),
                formatting.memory,
                True,
            )
            for name, label, about in communication.KINDS
        ),
    ]
    if tokens:
        listed += [
            (_("time to train"), lambda a: a.get("days"), phrases.days, True),
            (_("cost"), lambda a: phrases.total_usd(a, tokens), phrases.money, True),
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


def _plan_value(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return _("yes") if value else _("no") if value is False else formatting.DASH
    return str(value)


def _tiles(
    answer: Mapping[str, Any], tokens: float | None, state: FormState, key: str
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
        "total_bytes": (
            formatting.memory(memory["total_bytes"]),
            _("of %(capacity)s") % {"capacity": capacity},
        ),
        "days": (
            phrases.days(answer.get("days")),
            _("%(count)s tokens") % {"count": formatting.quantity(tokens)} if tokens else "",
        ),
        "usd_per_billion_tokens": (
            phrases.money(usd if usd is not None else answer.get("usd_per_billion_tokens")),
            _("%(usd)s per billion tokens")
            % {"usd": phrases.money(answer.get("usd_per_billion_tokens"))}
            if usd
            else _("per billion tokens"),
        ),
    }
    return [
        {
            "name": name,
            "title": _(title),
            "hue": hue,
            "value": shown[name][0],
            "more": shown[name][1],
            "query": state.query(plan=key, why=name),
        }
        for name, title, hue in _TILES
        if not (name == "days" and answer.get("days") is None)
    ]


def _plain(answer: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in answer.items() if name not in ("plan", "id")}
