"""Small forms of the calculators: device field, parsing, context and tiles of numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from django.utils.translation import gettext as _
from django.utils.translation import gettext_noop

from orchestrator.planner.store import selectors
from webui.planner import phrases
from webui.planner.form import parse_value
from webui.planner.form_fields import PlannerField
from webui.presentation import formatting
from webui.presentation.problems import problem_text
from webui.views.access import PageRequest
from workers.contracts.catalog.devices import DEVICES

DEVICE: Final = PlannerField(
    "device",
    gettext_noop("Device"),
    "choice",
    "h100-80g",
    choices=tuple((name, name) for name in DEVICES),
    wide=True,
)


def parse_fields(
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


def form_context(
    tab: str,
    fields: tuple[PlannerField, ...],
    values: dict[str, str],
    problems: list[dict[str, str]],
    user: Any,
) -> dict[str, Any]:
    """Returns the template context of a small form: fields with choices and errors."""
    items, own = (
        [],
        [
            (name, _("%(name)s (mine)") % {"name": name})
            for name in selectors.own_devices(user=user)
        ],
    )
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
    labels = {field.name: _(field.label) for field in fields}
    labeled = [{**item, "label": labels.get(item["field"], "")} for item in problems]
    return {"tab": tab, "fields": items, "problems": labeled}


def number_tiles(
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
                "title": _(title),
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


def first_problem(problems: list[dict[str, str]]) -> str:
    """Returns the first problem as sentences; empty without problems."""
    if not problems:
        return ""
    text = problem_text(problems[0])
    return f"{text[:1].upper()}{text[1:]}"
