"""The form of a new sweep: parameters as lines of text, options by method → a definition."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from django.utils.translation import gettext as _
from pydantic import ValidationError

from orchestrator.common.errors import Refusal
from orchestrator.sweeps.definition import SweepDefinition
from workers.contracts.base import validation_problems

_RANGE = re.compile(r"^(?P<low>\S+)\s*\.\.\s*(?P<high>\S+?)(?P<words>(?:\s+\S+)*)$")
START = {
    "kind": "train",
    "model": "llama-tiny",
    "plan": {"dp": 1, "micro_batch_size": 4, "global_batch_size": 4},
    "train": {
        "steps": 100,
        "seq_len": 64,
        "optimizer": {"name": "adamw", "lr": 0.001},
        "checkpoint": {"every_steps": 50, "keep": 2},
    },
}
INITIAL: dict[str, str] = {
    "name": "",
    "spec": json.dumps(START, indent=2),
    "parameters": (
        "train.optimizer.lr = 1e-4 .. 3e-2 log\ntrain.optimizer.weight_decay = 0, 0.01, 0.1"
    ),
    "method": "tpe",
    "metric": "loss",
    "goal": "minimize",
    "use": "last",
    "runs": "12",
    "device_hours": "",
    "parallel": "2",
    "seed": "0",
    "min_steps": "20",
    "factor": "3",
    "population": "4",
    "every_steps": "25",
}


def definition_of(fields: Mapping[str, str]) -> SweepDefinition:
    """The definition that the form's fields describe. Raises Refusal 422 with their problems."""
    body: dict[str, Any] = {
        "spec": _spec(fields.get("spec", "")),
        "parameters": parameters_of(fields.get("parameters", "")),
        "method": fields.get("method", ""),
        "metric": {
            "name": fields.get("metric", ""),
            "goal": fields.get("goal", ""),
            "use": fields.get("use", ""),
        },
        "budget": _numbers(fields, ("runs", "device_hours")),
        **_numbers(fields, ("parallel", "seed")),
    }
    if body["method"] == "asha":
        body["asha"] = _numbers(fields, ("min_steps", "factor"))
    if body["method"] == "pbt":
        body["pbt"] = _numbers(fields, ("population", "every_steps"))
    try:
        return SweepDefinition.from_dict(body)
    except ValidationError as error:
        raise _invalid([item.to_dict() for item in validation_problems(error)]) from None


def parameters_of(text: str) -> dict[str, dict[str, Any]]:
    """Parameters by path from lines: `path = 1, 2, 4`, or `path = 1e-4 .. 0.1 log`.

    After a range: `log`, `integer`, and a number of points for a grid.
    """
    parameters: dict[str, dict[str, Any]] = {}
    for line in filter(None, (line.strip() for line in text.splitlines())):
        path, equals, value = (part.strip() for part in line.partition("="))
        if not equals or not path or not value:
            raise _invalid_line(line)
        parameters[path] = _parameter(value, line)
    return parameters


def _parameter(text: str, line: str) -> dict[str, Any]:
    match = _RANGE.match(text)
    if match is None:
        return {"values": [_value(part.strip()) for part in text.split(",") if part.strip()]}
    parameter: dict[str, Any] = {"min": _value(match["low"]), "max": _value(match["high"])}
    for word in match["words"].split():
        if word == "log":
            parameter["scale"] = "log"
        elif word == "integer":
            parameter["integer"] = True
        elif word.isdecimal():
            parameter["points"] = int(word)
        else:
            raise _invalid_line(line)
    return parameter


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _spec(text: str) -> dict[str, Any]:
    try:
        spec = json.loads(text)
    except ValueError as error:
        message = _("the spec is not JSON: %(error)s") % {"error": error}
        raise _invalid([{"field": "spec", "message": message, "hint": ""}]) from None
    return spec if isinstance(spec, dict) else {}


def _numbers(fields: Mapping[str, str], names: tuple[str, ...]) -> dict[str, Any]:
    """The fields that are not empty; text that is not a number is refused by its field."""
    return {name: _value(fields[name]) for name in names if fields.get(name, "").strip()}


def _invalid_line(line: str) -> Refusal:
    message = _("%(line)r is not a parameter") % {"line": line[:80]}
    hint = _("Write for example train.optimizer.lr = 1e-4 .. 0.1 log.")
    return _invalid([{"field": "parameters", "message": message, "hint": hint}])


def _invalid(problems: list[dict[str, str]]) -> Refusal:
    title = _("The sweep cannot be started as it is")
    return Refusal("sweep-invalid", title, 422, title, problems)
