"""The serving page: latency, throughput, memory and cost of a deployment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from django.http import HttpResponse
from django.shortcuts import render
from django.utils.translation import gettext
from django.utils.translation import gettext_noop as _
from django.views.decorators.http import require_GET

from orchestrator.planner import user_api
from orchestrator.planner.plan_request import BadRequest
from webui.planner import phrases
from webui.planner.calculators.small_form import (
    DEVICE,
    first_problem,
    form_context,
    number_tiles,
    parse_fields,
)
from webui.planner.charts.curve import curve
from webui.planner.form_fields import FIELDS
from webui.planner.form_fields import PlannerField as F
from webui.presentation import formatting
from webui.views.access import PageRequest, page

SERVING: Final = (
    FIELDS["model"],
    DEVICE,
    F("tp", _("Tensor parallel"), "int", "1", most=4096),
    F("pp", _("Pipeline parallel"), "int", "1", most=4096),
    F("replicas", _("Replicas"), "int", "1", most=2**20),
    F("prompt_len", _("Prompt length"), "int", "1024", unit=_("tokens"), most=2**24),
    F("output_len", _("Output length"), "int", "256", unit=_("tokens"), most=2**24),
    F("batch", _("Batch size"), "int", "", _("Leave empty for as many as fit."), most=2**24),
    F(
        "quantize",
        _("Weights"),
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
        _("KV cache"),
        "choice",
        "bf16",
        choices=tuple((name, name) for name in ("fp32", "bf16", "fp16", "fp8", "int8")),
    ),
    F(
        "acceptance",
        _("Draft acceptance"),
        "float",
        "",
        _("0 to 1. Leave empty without speculative decoding."),
        least=0,
        most=1,
    ),
    F(
        "draft_cost",
        _("Draft cost"),
        "float",
        "0.05",
        _("Fraction of a model step."),
        least=1e-6,
        most=1,
    ),
)
_SERVING_TILES: Final = (
    ("ttft_s", _("Time to first token"), "time"),
    ("tpot_s", _("Time per token"), "time-2"),
    ("tokens_per_s", _("Total tokens/s"), "throughput"),
    ("max_concurrency", _("Max concurrency"), "mfu"),
    ("usd_per_million_tokens", _("Cost per million tokens"), "event"),
)
_SERVING_MEMORY: Final = (
    ("weights_bytes_per_device", _("weights"), "mem-params"),
    ("kv", _("KV cache"), "mem-kv_cache"),
    ("activations_bytes", _("activations"), "mem-activations"),
    ("reserved_bytes", _("reserved"), "mem-other"),
)


@page
@require_GET
def serving(request: PageRequest) -> HttpResponse:
    """The serving page: latency, throughput, memory and cost of a deployment."""
    values, inputs, problems = parse_fields(request, SERVING)
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
        **form_context("planner-serving", SERVING, values, problems, request.user),
        **(_served(answer) if answer else {}),
        "headline": values["model"] if answer else "",
        "rest": _serving_summary(answer, inputs) if answer else first_problem(problems),
    }
    return render(request, "webui/planner/serving.html", context)


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
            "label": gettext(label),
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
            gettext("batch %(size)s: %(time)s per token, %(rate)s tokens/s")
            % {
                "size": each["batch"],
                "time": formatting.seconds(each["tpot_s"]),
                "rate": formatting.quantity(each["tokens_per_s"]),
            },
            each["batch"] == batch,
        )
        for each in answer["curve"]
    ]
    speculative = answer.get("speculative")
    return {
        "answered": True,
        "tiles": number_tiles(_SERVING_TILES, answer),
        "bar": bar,
        "fits": answer["fits"],
        "room": phrases.room(value),
        "suggestions": answer.get("suggestions", []),
        "notes": answer["notes"],
        "curve": answer["curve"],
        "curve_chart": curve(points, x_unit="", y_unit=""),
        "memory_tiles": number_tiles(
            (
                ("kv_bytes_per_token", _("KV cache per token"), "mem-kv_cache"),
                ("kv_bytes_per_sequence", _("KV cache per sequence"), "mem-kv_cache"),
                ("crossover_batch", _("Compute-bound from batch"), "mfu"),
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
    count = int(answer["devices"])
    values = {"devices": f"{count:,} {inputs['device']}"}
    if not answer["fits"]:
        room = phrases.room({name: tree["value"] for name, tree in answer["memory"].items()})
        return gettext(" does not fit on %(devices)s: it needs %(room)s.") % {
            **values,
            "room": room,
        }
    return gettext(
        " on %(devices)s serves batches of %(batch)s: first token after %(first)s, then %(each)s "
        "per token, %(rate)s tokens/s in total; bound by %(limit)s."
    ) % {
        **values,
        "batch": f"{int(answer['batch']):,}",
        "first": formatting.seconds(answer["ttft_s"]["value"]),
        "each": formatting.seconds(answer["tpot_s"]["value"]),
        "rate": formatting.quantity(answer["tokens_per_s"]["value"]),
        "limit": answer["bound"],
    }
