"""The scaling-law page: compute, time, cost and optimal sizes."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any, Final

from django.http import HttpResponse
from django.shortcuts import render
from django.utils.translation import gettext
from django.utils.translation import gettext_noop as _
from django.views.decorators.http import require_GET

from orchestrator.planner.scaling import scaling as scaled
from orchestrator.planner.store import selectors
from webui.planner import phrases
from webui.planner.calculators.small_form import (
    DEVICE,
    first_problem,
    form_context,
    number_tiles,
    parse_fields,
)
from webui.planner.form_fields import PlannerField as F
from webui.presentation import formatting
from webui.views.access import PageRequest, page
from workers.contracts.catalog.devices import DEVICES, Device

SCALING: Final = (
    F(
        "parameters",
        _("Parameters"),
        "amount",
        "7G",
        _("Leave empty if you enter a time budget."),
        most=1e18,
    ),
    F("tokens", _("Tokens"), "amount", "", _("Leave empty for 20 per parameter."), most=1e18),
    DEVICE,
    F("devices", _("Devices"), "int", "64", most=2**31),
    F(
        "mfu",
        _("MFU"),
        "float",
        "0.4",
        _("Fraction of the datasheet peak, 0 to 1."),
        least=1e-6,
        most=1,
    ),
    F("tokens_per_parameter", _("Tokens per parameter"), "float", "20", least=1e-3, most=1e6),
    F(
        "budget_days",
        _("Time budget"),
        "float",
        "",
        unit=_("days"),
        hint=_("Calculates the largest model for this time."),
        least=1e-6,
        most=1e6,
    ),
    F(
        "recompute",
        _("Recompute"),
        "choice",
        "0",
        choices=(("0", _("none: 6 N D")), ("1", _("full: 8 N D"))),
    ),
)
_SCALING_TILES: Final = (
    ("total_flops", _("Compute"), "mfu"),
    ("days", _("Time"), "time"),
    ("usd", _("Cost"), "event"),
    ("energy_kwh", _("Energy"), "event"),
    ("optimal_tokens", _("Optimal tokens"), "throughput"),
    ("expected_loss", _("Expected loss"), "loss"),
    ("budget_parameters", _("Budget: parameters"), "mem-params"),
    ("budget_tokens", _("Budget: tokens"), "throughput"),
    ("budget_flops", _("Budget: compute"), "mfu"),
)


@page
@require_GET
def scaling(request: PageRequest) -> HttpResponse:
    """The scaling-law page: compute, time, cost and optimal sizes."""
    values, inputs, problems = parse_fields(request, SCALING)
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
        **form_context("planner-scaling", SCALING, values, problems, request.user),
        "headline": "",
        "tiles": number_tiles(_SCALING_TILES, answer),
        "rest": _scaling_summary(answer, inputs) if answer else first_problem(problems),
        "answered": bool(answer),
    }
    return render(request, "webui/planner/scaling.html", context)


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
    message = gettext("%(name)r is neither in the device catalog nor one of your devices") % {
        "name": name[:60]
    }
    hint = gettext("Use a device such as %(names)s.") % {"names": ", ".join(near)}
    return {"field": "device", "message": message, "hint": hint}


def _scaling_summary(answer: Mapping[str, Any], inputs: Mapping[str, Any]) -> str:
    sentences = []
    devices = f"{inputs['devices']:,} {inputs['device']}"
    if "days" in answer:
        sentences.append(
            gettext(
                "%(parameters)s parameters on %(tokens)s tokens train in %(time)s on %(devices)s "
                "for %(usd)s."
            )
            % {
                "parameters": formatting.quantity(inputs["parameters"]),
                "tokens": formatting.quantity(answer["tokens"]),
                "time": phrases.days(answer["days"]["value"]),
                "devices": devices,
                "usd": phrases.money(answer["usd"]["value"]),
            }
        )
    if "budget_parameters" in answer:
        sentences.append(
            gettext(
                "%(days)s days of %(devices)s train %(parameters)s parameters on %(tokens)s tokens."
            )
            % {
                "days": f"{inputs['budget_days']:g}",
                "devices": devices,
                "parameters": formatting.quantity(answer["budget_parameters"]["value"]),
                "tokens": formatting.quantity(answer["budget_tokens"]["value"]),
            }
        )
    return " ".join(sentences)
