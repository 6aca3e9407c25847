"""The page that simulates a server under load: latencies, throughput and the largest rate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from django.http import HttpResponse
from django.shortcuts import render
from django.utils.translation import gettext
from django.utils.translation import gettext_noop as _
from django.views.decorators.http import require_GET

from orchestrator.common.errors import Refusal
from orchestrator.planner import user_api
from orchestrator.planner.plan_request import BadRequest
from orchestrator.runs import selectors as runs
from orchestrator.runs.serving.deployment import served_deployment
from webui.planner.calculators.serving import SERVING
from webui.planner.calculators.small_form import (
    DEVICE,
    first_problem,
    form_context,
    parse_fields,
)
from webui.planner.charts.curve import curve
from webui.planner.form_fields import FIELDS
from webui.planner.form_fields import PlannerField as F
from webui.presentation import formatting
from webui.views.access import PageRequest, page
from workers.contracts.base import Problem, problem

_RATES: Final = (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0)  # times the form's, for the charts
_REQUESTS: Final = 400
_SHARED: Final = {field.name: field for field in SERVING}
LOAD: Final = (
    F(
        "run",
        _("Serve run"),
        "int",
        "",
        _("Uses this run's model, parallel plan and measured step times."),
    ),
    FIELDS["model"],
    DEVICE,
    _SHARED["tp"],
    _SHARED["replicas"],
    _SHARED["quantize"],
    F("rate", _("Arrival rate"), "float", "4", unit=_("requests/s"), least=1e-3, most=1e5),
    F(
        "process",
        _("Arrivals"),
        "choice",
        "poisson",
        choices=(
            ("poisson", _("random (Poisson)")),
            ("constant", _("evenly spaced")),
            ("gamma", _("in bursts (gamma, cv 2)")),
        ),
    ),
    F("prompt_len", _("Mean prompt length"), "int", "1024", unit=_("tokens"), most=2**24),
    F("output_len", _("Mean output length"), "int", "256", unit=_("tokens"), most=2**24),
    F(
        "length_cv",
        _("Spread of lengths"),
        "float",
        "0.8",
        _("Standard deviation divided by the mean; 0 gives equal lengths."),
        least=0,
        most=10,
    ),
    F(
        "shared_prefix",
        _("Shared prefix"),
        "int",
        "",
        _("For example a system prompt."),
        unit=_("tokens"),
        most=2**24,
    ),
    F("max_seqs", _("Sequences at a time"), "int", "", _("Default 256."), most=4096),
    F("max_batch_tokens", _("Tokens per step"), "int", "", _("Default 2,048."), most=2**20),
    F("ttft_limit", _("First token within"), "float", "", unit="s", least=1e-4, most=1e5),
    F("tpot_limit", _("Time per token within"), "float", "", unit="s", least=1e-5, most=1e5),
    F("prefill", _("Prefill replicas"), "int", "", _("Run prefill on its own replicas."), most=256),
    F("decode", _("Decode replicas"), "int", "", most=256),
)
_ROWS: Final = (
    ("ttft_s", _("First token")),
    ("tpot_s", _("Each next token")),
    ("latency_s", _("Whole answer")),
    ("queue_s", _("Waiting in the queue")),
)
_TIME: Final = (
    ("prefill", _("steps with prompt tokens"), "throughput"),
    ("decode", _("decode steps"), "time-2"),
    ("idle", _("idle"), "mem-other"),
)


@page
@require_GET
def serving_load(request: PageRequest) -> HttpResponse:
    """Latency percentiles, throughput, use of time, and latency by rate."""
    values, inputs, problems = parse_fields(request, LOAD)
    answer: dict[str, Any] = {}
    if not problems:
        try:
            answer = user_api.simulate_serving(user=request.user, request=_request(request, inputs))
        except BadRequest as refused:
            problems = [_form_problem(item) for item in refused.problems]
    context = {
        **form_context("planner-serving-load", LOAD, values, problems, request.user),
        **(_simulated(answer, inputs) if answer else {}),
        "headline": _headline(answer, inputs) if answer else "",
        "rest": _summary(answer) if answer else first_problem(problems),
        "heavy": True,
    }
    return render(request, "webui/planner/serving_load.html", context)


def _request(request: PageRequest, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The simulation request; a serve run's deployment replaces model and device.

    Raises BadRequest.
    """
    split = {name: inputs[name] for name in ("prefill", "decode") if inputs[name]}
    lengths = {"cv": inputs["length_cv"]}
    load = {
        "rate": inputs["rate"],
        "process": inputs["process"],
        "prompt": {"mean": inputs["prompt_len"], **lengths},
        "output": {"mean": inputs["output_len"], **lengths},
        "shared_prefix": inputs["shared_prefix"] or 0,
        "requests": _REQUESTS,
    }
    limits = {"ttft_s": inputs["ttft_limit"], "tpot_s": inputs["tpot_limit"]}
    values: dict[str, Any] = {
        "load": load,
        "rates": [times * inputs["rate"] for times in _RATES],
        **{name: inputs[name] for name in ("max_seqs", "max_batch_tokens") if inputs[name]},
    }
    if split:
        values["disaggregated"] = split
    if any(limits.values()):
        values["limits"] = limits
    if inputs["run"]:
        try:
            run = runs.run_get(user=request.user, id=inputs["run"])
        except Refusal as refusal:
            raise BadRequest(
                [problem("run", str(refusal), gettext("Use the id of a serve run."))]
            ) from None
        return {**served_deployment(run=run), **values}
    devices = inputs["tp"] * max(inputs["replicas"], sum(split.values()))
    per_node = min(8, devices)
    cluster = {
        "device": inputs["device"],
        "nodes": -(-devices // per_node),
        "devices_per_node": per_node,
    }
    own = {name: inputs[name] for name in ("model", "tp", "replicas", "quantize")}
    return {**own, "cluster": cluster, **values}


def _form_problem(item: Problem) -> dict[str, str]:
    """A problem under the name of the form's field."""
    names = {
        "load.prompt": "prompt_len",
        "load.output": "output_len",
        "disaggregated": "prefill",
        "limits": "ttft_limit",
    }
    field = next(
        (name for path, name in names.items() if item.field.startswith(path)),
        item.field.rpartition(".")[2],
    )
    return {"field": field, "message": item.message, "hint": item.hint}


def _simulated(answer: Mapping[str, Any], inputs: Mapping[str, Any]) -> dict[str, Any]:
    rate, search = float(inputs["rate"]), answer.get("search")
    return {
        "answered": True,
        "latencies": [
            {"label": gettext(label), **answer[name]} for name, label in _ROWS if answer[name]
        ],
        "throughput": [
            (gettext("Output tokens/s"), formatting.quantity(answer["tokens_per_s"])),
            (gettext("Requests/s"), formatting.quantity(answer["requests_per_s"])),
            (gettext("Largest requests/s"), formatting.quantity(answer["capacity"])),
            (gettext("USD per million tokens"), f"{answer['usd_per_million_tokens']:.3g}"),
        ],
        "facts": [
            (gettext("Requests in a step"), f"{answer['running']['mean']:.1f}"),
            (gettext("Requests waiting"), f"{answer['waiting']['mean']:.1f}"),
            (gettext("Mean step"), formatting.seconds(answer["step_s"])),
            (gettext("Cache in use"), formatting.percent(answer["cache_use"]["mean"])),
            (gettext("Preemptions"), f"{answer['preemptions']:,}"),
        ],
        "time_bar": [
            {
                "label": gettext(label),
                "hue": hue,
                "share": round(100 * answer["time"][name], 2),
                "text": formatting.percent(answer["time"][name]),
            }
            for name, label, hue in _TIME
        ],
        "measured": answer["step_times"] == "measured",
        "saturated": answer["saturated"],
        "charts": [
            _chart(answer["by_rate"], rate, "ttft_s", gettext("First token by rate, p99")),
            _chart(answer["by_rate"], rate, "tpot_s", gettext("Time per token by rate, p99")),
        ],
        "by_rate": answer["by_rate"],
        "search": search,
        "search_rate": formatting.quantity(search["rate"]) if search and search["rate"] else "",
        "wanted_rate": formatting.quantity(rate),
    }


def _chart(rows: list[dict[str, Any]], rate: float, name: str, title: str) -> dict[str, Any]:
    points = [
        (
            row["rate"],
            1e3 * row[name]["p99"],
            gettext("%(rate)s requests/s: %(time)s")
            % {
                "rate": formatting.quantity(row["rate"]),
                "time": formatting.seconds(row[name]["p99"]),
            },
            row["rate"] == rate,
        )
        for row in rows
        if row[name]
    ]
    return {"id": name, "title": title, "curve": curve(points, x_unit="/s", y_unit=" ms")}


def _headline(answer: Mapping[str, Any], inputs: Mapping[str, Any]) -> str:
    if inputs["run"]:
        return gettext("Run %(run)s") % {"run": inputs["run"]}
    return gettext("%(model)s on %(devices)s %(device)s") % {
        "model": inputs["model"],
        "devices": f"{answer['devices']:,}",
        "device": inputs["device"],
    }


def _summary(answer: Mapping[str, Any]) -> str:
    first, each = answer["ttft_s"], answer["tpot_s"]
    values = {
        "first": formatting.seconds(first["p99"]),
        "each": formatting.seconds(each["p99"] if each else None),
        "rate": formatting.quantity(answer["tokens_per_s"]),
        "most": formatting.quantity(answer["capacity"]),
    }
    if answer["saturated"]:
        text = gettext(
            " cannot serve this load: it serves at most %(most)s requests/s, so the queue "
            "keeps growing."
        )
        return text % values
    return (
        gettext(
            ": 99%% of requests get their first token within %(first)s and each next one within "
            "%(each)s; %(rate)s tokens/s."
        )
        % values
    )
