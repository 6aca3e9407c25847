"""Views of the planner's serving, scaling-law and textbook-example pages."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, Final

from django.http import HttpResponse
from django.shortcuts import render
from django.views.decorators.http import require_GET

from orchestrator.planner import user_api
from orchestrator.planner.plan_request import BadRequest
from orchestrator.planner.scaling import scaling as scaled
from orchestrator.planner.store import selectors
from orchestrator.planner.textbook_examples import EXAMPLES, Example
from webui.planner import phrases
from webui.planner.charts.curve import curve
from webui.planner.form import parse_value
from webui.planner.form_fields import FIELDS, PlannerField
from webui.presentation import formatting
from webui.views.access import PageRequest, page
from workers.contracts.catalog.devices import DEVICES, Device

F = PlannerField
_DEVICE: Final = F(
    "device",
    "Device",
    "choice",
    "h100-80g",
    choices=tuple((name, name) for name in DEVICES),
    wide=True,
)
SCALING: Final = (
    F("parameters", "Parameters", "amount", "7G", "Empty if a budget is inputs.", most=1e18),
    F("tokens", "Tokens", "amount", "", "Empty: 20 per parameter.", most=1e18),
    _DEVICE,
    F("devices", "Devices", "int", "64", most=2**31),
    F("mfu", "MFU", "float", "0.4", "Fraction of the datasheet peak, 0 to 1.", least=1e-6, most=1),
    F("tokens_per_parameter", "Tokens per parameter", "float", "20", least=1e-3, most=1e6),
    F(
        "budget_days",
        "Time budget (days)",
        "float",
        "",
        "Computes the largest model for it.",
        least=1e-6,
        most=1e6,
    ),
    F(
        "recompute",
        "Recompute",
        "choice",
        "0",
        choices=(("0", "none: 6 N D"), ("1", "full: 8 N D")),
    ),
)
SERVING: Final = (
    FIELDS["model"],
    _DEVICE,
    F("tp", "Tensor parallel", "int", "1", most=4096),
    F("pp", "Pipeline parallel", "int", "1", most=4096),
    F("replicas", "Replicas", "int", "1", most=2**20),
    F("prompt_len", "Prompt length", "int", "1024", "Tokens.", most=2**24),
    F("output_len", "Output length", "int", "256", "Tokens.", most=2**24),
    F("batch", "Batch size", "int", "", "Empty: as many as fit.", most=2**24),
    F(
        "quantize",
        "Weights",
        "choice",
        "none",
        choices=(
            ("none", "bf16"),
            ("fp32", "fp32"),
            ("fp8", "fp8"),
            ("int8", "int8"),
            ("int4", "int4"),
        ),
    ),
    F(
        "kv_dtype",
        "KV cache",
        "choice",
        "bf16",
        choices=tuple((name, name) for name in ("fp32", "bf16", "fp16", "fp8", "int8")),
    ),
    F(
        "acceptance",
        "Draft acceptance",
        "float",
        "",
        "0 to 1; empty: no speculative decoding.",
        least=0,
        most=1,
    ),
    F("draft_cost", "Draft cost", "float", "0.05", "Fraction of a model step.", least=1e-6, most=1),
)
_SERVING_TILES: Final = (
    ("ttft_s", "Time to first token", "time"),
    ("tpot_s", "Time per token", "time-2"),
    ("tokens_per_s", "Total tokens/s", "throughput"),
    ("max_concurrency", "Max concurrency", "mfu"),
    ("usd_per_million_tokens", "Cost per million tokens", "event"),
)
_SCALING_TILES: Final = (
    ("total_flops", "Compute", "mfu"),
    ("days", "Time", "time"),
    ("usd", "Cost", "event"),
    ("energy_kwh", "Energy", "event"),
    ("optimal_tokens", "Optimal tokens", "throughput"),
    ("expected_loss", "Expected loss", "loss"),
    ("budget_parameters", "Budget: parameters", "mem-params"),
    ("budget_tokens", "Budget: tokens", "throughput"),
    ("budget_flops", "Budget: compute", "mfu"),
)
_SERVING_MEMORY: Final = (
    ("weights_bytes_per_device", "weights", "mem-params"),
    ("kv", "KV cache", "mem-kv_cache"),
    ("activations_bytes", "activations", "mem-activations"),
    ("reserved_bytes", "reserved", "mem-other"),
)


@page
@require_GET
def serving(request: PageRequest) -> HttpResponse:
    """The serving page: latency, throughput, memory and cost of a deployment."""
    values, inputs, problems = _parse_fields(request, SERVING)
    answer: dict[str, Any] = {}
    if not problems:
        devices = inputs["tp"] * inputs["pp"] * inputs["replicas"]
        per_node = min(8, devices)
        cluster = {
            "device": inputs["device"],
            "nodes": -(-devices // per_node),
            "devices_per_node": per_node,
        }
        request_values = {
            name: value for name, value in inputs.items() if name != "device" and value is not None
        }
        try:
            answer = user_api.serving(
                user=request.user, request={**request_values, "cluster": cluster, "explain": True}
            )
        except BadRequest as refused:
            problems = [
                {"field": item.field.rpartition(".")[2], "message": item.message, "hint": item.hint}
                for item in refused.problems
            ]
    context = {
        **_context("planner-serving", SERVING, values, problems, request.user),
        **(_served(answer) if answer else {}),
        "headline": values["model"] if answer else "",
        "rest": _serving_summary(answer, inputs) if answer else _first(problems),
    }
    return render(request, "webui/planner/serving.html", context)


@page
@require_GET
def scaling(request: PageRequest) -> HttpResponse:
    """The scaling-law page: compute, time, cost and optimal sizes."""
    values, inputs, problems = _parse_fields(request, SCALING)
    answer: dict[str, Any] = {}
    if not problems:
        entry = selectors.own_devices(user=request.user).get(inputs["device"]) or DEVICES.get(
            inputs["device"]
        )
        answer = (
            _scaled(inputs, entry)
            if entry
            else {"ok": False, "problems": [_unknown_device(inputs["device"])]}
        )
        if not answer["ok"]:
            problems, answer = answer["problems"], {}
    context = {
        **_context("planner-scaling", SCALING, values, problems, request.user),
        "headline": "",
        "tiles": _tiles(_SCALING_TILES, answer),
        "rest": _scaling_summary(answer, inputs) if answer else _first(problems),
        "answered": bool(answer),
    }
    return render(request, "webui/planner/scaling.html", context)


@page
@require_GET
def examples(request: PageRequest) -> HttpResponse:
    """The textbook-example page."""
    shown = [_example(each) for each in EXAMPLES]
    context = {
        "tab": "planner-examples",
        "examples": shown,
        "headline": "",
        "rest": "Calculations from textbooks, and what their simple formulas omit.",
    }
    return render(request, "webui/planner/examples.html", context)


def _example(example: Example) -> dict[str, Any]:
    worked = example.compute()
    address = {"planner": "planner", "scaling": "planner-scaling", "serving": "planner-serving"}[
        example.page
    ]
    rows = [
        [{"text": _cell(cell), "number": isinstance(cell, int | float)} for cell in row]
        for row in worked.rows
    ]
    heads = [
        {"text": head, "number": bool(rows) and rows[0][at]["number"]}
        for at, head in enumerate(worked.columns)
    ]
    return {"example": example, "worked": worked, "heads": heads, "rows": rows, "page": address}


def _cell(value: str | float) -> str:
    if isinstance(value, str):
        return value
    if abs(value) >= 1e6:
        return phrases.prefixed(value, "").strip()
    return f"{value:,.0f}" if value == int(value) or abs(value) >= 1000 else f"{value:.4g}"


def _parse_fields(
    request: PageRequest, fields: tuple[PlannerField, ...]
) -> tuple[dict[str, str], dict[str, Any], list[dict[str, str]]]:
    """Parses a small form into `(texts, values, problems)`."""
    values, inputs, problems = {}, {}, []
    sent = any(field.name in request.GET for field in fields)
    for field in fields:
        # an empty field of a submitted form stays empty; without a query, defaults apply
        text = request.GET.get(
            field.name, "" if sent and field.kind == "amount" else field.default
        ).strip()
        values[field.name] = text
        empty = not text and (field.kind in ("amount",) or not field.default)
        value = None if empty else parse_value(field, text)
        if isinstance(value, dict):
            problems.append(value)
        inputs[field.name] = value
    return values, inputs, problems


def _context(
    tab: str,
    fields: tuple[PlannerField, ...],
    values: dict[str, str],
    problems: list[dict[str, str]],
    user: Any,
) -> dict[str, Any]:
    items, own = [], [(name, f"{name} (mine)") for name in selectors.own_devices(user=user)]
    for field in fields:
        choices = list(field.choices)
        value = values[field.name]
        if field.name == "device":
            choices = [*own, *choices]
        if field.kind == "choice" and value not in dict(choices):
            choices.append((value, value))
        if field.name == "model":
            choices = [each for each in choices if each[0] != "own"]
        errors = [item for item in problems if item["field"] == field.name]
        items.append({"field": field, "value": value, "choices": choices, "errors": errors})
    labels = {field.name: field.label for field in fields}
    labelled = [{**item, "label": labels.get(item["field"], "")} for item in problems]
    return {"tab": tab, "fields": items, "problems": labelled}


def _served(answer: Mapping[str, Any]) -> dict[str, Any]:
    memory, batch = answer["memory"], int(answer["batch"])
    value = {name: tree["value"] for name, tree in memory.items()}
    capacity = value["capacity_bytes"]
    known = {
        **value,
        "kv": max(
            0.0,
            value["total_bytes"]
            - sum(
                value[name]
                for name in ("weights_bytes_per_device", "activations_bytes", "reserved_bytes")
            ),
        ),
    }
    bar = [
        {
            "label": label,
            "hue": hue,
            "size": formatting.memory(known[name]),
            "share": round(100 * known[name] / capacity, 2),
        }
        for name, label, hue in _SERVING_MEMORY
    ]
    points = [
        (
            1e3 * each["tpot_s"],
            each["tokens_per_s"],
            f"batch {each['batch']}: {formatting.seconds(each['tpot_s'])} per token, "
            f"{formatting.quantity(each['tokens_per_s'])} tokens/s",
            each["batch"] == batch,
        )
        for each in answer["curve"]
    ]
    speculative = answer.get("speculative")
    return {
        "answered": True,
        "tiles": _tiles(_SERVING_TILES, answer),
        "bar": bar,
        "fits": answer["fits"],
        "room": phrases.room(value),
        "suggestions": answer.get("suggestions", []),
        "notes": answer["notes"],
        "curve": answer["curve"],
        "curve_chart": curve(points, x_unit="", y_unit=""),
        "memory_tiles": _tiles(
            (
                ("kv_bytes_per_token", "KV cache per token", "mem-kv_cache"),
                ("kv_bytes_per_sequence", "KV cache per sequence", "mem-kv_cache"),
                ("crossover_batch", "Compute-bound from batch", "mfu"),
            ),
            answer,
        ),
        "speculative": speculative
        and {
            "drafts": speculative["draft_tokens"],
            "pays": speculative["pays"],
            "speedup": f"{speculative['speculative_speedup']['value']:.2f}",
        },
    }


def _serving_summary(answer: Mapping[str, Any], inputs: Mapping[str, Any]) -> str:
    devices = formatting.count(int(answer["devices"]), str(inputs["device"]), str(inputs["device"]))
    if not answer["fits"]:
        room = phrases.room({name: tree["value"] for name, tree in answer["memory"].items()})
        return f" does not fit {devices}: {room}."
    return (
        f" on {devices} serves batches of {int(answer['batch']):,}: first token after "
        f"{formatting.seconds(answer['ttft_s']['value'])}, then "
        f"{formatting.seconds(answer['tpot_s']['value'])} per token, "
        f"{formatting.quantity(answer['tokens_per_s']['value'])} tokens/s in total; bound by "
        f"{answer['bound']}."
    )


def _scaling_summary(answer: Mapping[str, Any], inputs: Mapping[str, Any]) -> str:
    sentences = []
    if "days" in answer:
        tokens = formatting.quantity(answer["tokens"])
        sentences.append(
            f"{formatting.quantity(inputs['parameters'])} parameters on {tokens} tokens train in "
            f"{phrases.days(answer['days']['value'])} on {inputs['devices']:,} "
            f"{inputs['device']} for "
            f"{phrases.money(answer['usd']['value'])}."
        )
    if "budget_parameters" in answer:
        sentences.append(
            f"{inputs['budget_days']:g} days of {inputs['devices']:,} {inputs['device']} train "
            f"{formatting.quantity(answer['budget_parameters']['value'])} parameters on "
            f"{formatting.quantity(answer['budget_tokens']['value'])} tokens."
        )
    return " ".join(sentences)


def _tiles(
    names: tuple[tuple[str, str, str], ...], answer: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Returns a tile per number of the answer: value, formula and inputs."""
    tiles = []
    for name, title, hue in names:
        tree = answer.get(name)
        if not isinstance(tree, dict):
            continue
        inputs = [
            {
                "name": phrases.term_label(each["name"]),
                "value": phrases.in_unit(each["value"], each["unit"]),
            }
            for each in tree["inputs"]
        ]
        tiles.append(
            {
                "title": title,
                "hue": hue,
                "value": _tile_value(name, tree),
                "formula": tree["formula"],
                "source": tree["source"],
                "name": name,
                "inputs": inputs,
            }
        )
    return tiles


def _tile_value(name: str, tree: Mapping[str, Any]) -> str:
    value = tree["value"]
    if name == "days":
        return phrases.days(value)
    if name == "usd_per_million_tokens":
        return phrases.money(value)
    if name in ("max_concurrency", "crossover_batch"):
        return f"{value:,.0f}"
    if name == "energy_kwh":
        return f"{formatting.quantity(value)} kWh"
    if name in ("tokens_per_s", "optimal_tokens", "budget_tokens", "budget_parameters"):
        return formatting.quantity(value)
    if name == "expected_loss":
        return f"{value:.3f}"
    return phrases.in_unit(value, tree["unit"])


def _scaled(inputs: Mapping[str, Any], entry: Device) -> dict[str, Any]:
    return scaled(
        parameters=inputs["parameters"],
        tokens=inputs["tokens"],
        devices=inputs["devices"],
        flops_per_device=inputs["mfu"] * entry.peak(entry.half) * 1e12,
        budget_days=inputs["budget_days"],
        tokens_per_parameter=inputs["tokens_per_parameter"],
        recompute=inputs["recompute"] == "1",
        usd_per_hour=entry.usd_per_hour,
        power_w=entry.power_w,
        explained=True,
    )


def _unknown_device(name: str) -> dict[str, str]:
    near = difflib.get_close_matches(name, DEVICES, n=3, cutoff=0.3) or list(DEVICES)
    message = f"{name[:60]!r} is neither in the device catalogue nor one of your devices"
    return {"field": "device", "message": message, "hint": ", ".join(near)}


def _first(problems: list[dict[str, str]]) -> str:
    if not problems:
        return ""
    message = problems[0]["message"]
    return f"{message[:1].upper()}{message[1:].rstrip('.')}."
