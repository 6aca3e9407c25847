"""State of the planner form: parses the query string, builds the planner request and links.

The planner itself checks which plans are valid and fit.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Final
from urllib.parse import urlencode

from django.utils.translation import gettext as _

from webui.planner import plan_link
from webui.planner.form_fields import ANY, AXES, FIELDS, OWN, OWN_DEVICE, PlannerField
from workers.contracts.catalog.units import GIB

DEFAULT_PLANS: Final = 12  # plans in the table by default
MAX_PLANS: Final = 100
MAX_SHAPE_CHARS: Final = 60_000
# part of every link, so that its meaning does not depend on the defaults
_ALWAYS_IN_LINK: Final = (
    "model",
    "device",
    "nodes",
    "devices_per_node",
    "seq_len",
    "global_batch_size",
    "tokens",
    "framework",
    "precision",
)
_WITHOUT_RANK: Final = ("ia3", "bitfit")
_SUFFIXES: Final = {"k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9, "t": 1e12, "p": 1e15}
# planner request field → form field
_FORM_FIELDS: Final = {
    "model": "model",
    "cluster.device": "device",
    "cluster.nodes": "nodes",
    "workload.seq_len": "seq_len",
    "cluster.devices_per_node": "devices_per_node",
    "workload.global_batch_size": "global_batch_size",
    "plan.global_batch_size": "global_batch_size",
    "workload.tokens": "tokens",
    "framework": "framework",
    "train": "method",
    "train.objective": "task",
    "train.distill": "teacher",
    "train.adapter.rank": "rank",
    "teacher": "teacher",
    "cluster.intra_node_gb_per_s": "intra",
    "cluster.inter_node_gb_per_s": "inter",
    "objective": "objective",
    "cluster.usd_per_device_hour": "price",
    "cluster.host_gib_per_device": "host",
    "cluster": "nodes",
    "workload": "seq_len",
    "seq_len": "seq_len",
    "global_batch_size": "global_batch_size",
    "top": "objective",
}

Problem = dict[str, str]


@dataclass(frozen=True)
class FormState:
    """Text of every field; `plan` and `compare` are plan keys (see `plan_link`)."""

    values: Mapping[str, str]
    plan: str = ""
    compare: tuple[str, ...] = ()
    top: int = DEFAULT_PLANS
    link_problems: tuple[Problem, ...] = field(default=())

    @cached_property
    def _parsed(self) -> tuple[dict[str, Any], list[Problem]]:
        values: dict[str, Any] = {}
        problems = list(self.link_problems)
        own_device = self.values["device"] == OWN
        for name, spec in FIELDS.items():
            if (name == "shape" and self.values["model"] != OWN) or (
                spec in OWN_DEVICE and not own_device
            ):
                continue
            value = parse_value(spec, self.values[name])
            if isinstance(value, dict) and set(value) == {"field", "message", "hint"}:
                problems.append(value)
            else:
                values[name] = value
        return values, problems

    @property
    def problems(self) -> list[Problem]:
        """Problems of parsing; the planner checks the rest."""
        return self._parsed[1]

    @property
    def global_batch(self) -> int:
        """Global batch size; 1 if it cannot be parsed."""
        return int(self._parsed[0].get("global_batch_size") or 1)

    def line(self, plan: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Returns the planner request of one plan, or of a search; requires no parse problems."""
        values = self._parsed[0]
        cluster = {
            "device": self._device(values),
            "nodes": values["nodes"],
            "devices_per_node": values["devices_per_node"],
            "intra_node_gb_per_s": values["intra"],
            "inter_node_gb_per_s": values["inter"],
            "usd_per_device_hour": values["price"],
            "host_gib_per_device": values["host"],
        }
        workload = {"seq_len": values["seq_len"], "tokens": values["tokens"]}
        if plan is None:
            workload["global_batch_size"] = values["global_batch_size"]
        line = {
            "model": values["shape"] if self.values["model"] == OWN else values["model"],
            "cluster": {key: value for key, value in cluster.items() if value is not None},
            "workload": {key: value for key, value in workload.items() if value is not None},
            "framework": {"name": values["framework"]},
            **self._training(values),
        }
        return line if plan is None else {**line, "plan": dict(plan)}

    def _training(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Returns `train` and `teacher` of the request; empty if all weights are pre-trained."""
        task, method = values["task"], values["method"]
        train: dict[str, Any] = {} if task == "pretrain" else {"objective": task}
        if method != "full":
            ranked = method not in _WITHOUT_RANK
            train["adapter"] = {"method": method, **({"rank": values["rank"]} if ranked else {})}
        teacher = {"teacher": values["teacher"]} if values["teacher"] else {}
        return {**({"train": train} if train else {}), **teacher}

    def fixed(self) -> dict[str, Any]:
        """Returns the axes that the search must not change."""
        values = self._parsed[0]
        fixed = {
            spec.name: values[spec.name]
            for spec in AXES
            if values.get(spec.name) not in (None, ANY)
        }
        return {name: int(value) if name == "zero" else value for name, value in fixed.items()}

    @property
    def objective(self) -> str:
        """The ranking criterion."""
        return self.values["objective"]

    def plan_dict(self, key: str) -> dict[str, Any] | None:
        """Returns the plan of a key; None if the key is invalid."""
        return plan_link.parse_plan_key(key, global_batch_size=self.global_batch)

    def query(self, **changes: Any) -> str:
        """Returns the query string with changes to fields or `plan`, `compare`, `top`, `why`."""
        why = changes.pop("why", "")
        own = {name: changes.pop(name) for name in ("plan", "compare", "top") if name in changes}
        state = replace(self, values={**self.values, **changes}, **own)
        pairs = [
            (name, state.values[name])
            for name, spec in FIELDS.items()
            if state._applies(spec)
            and (name in _ALWAYS_IN_LINK or state.values[name] != spec.default)
        ]
        pairs += [("plan", state.plan)] if state.plan else []
        pairs += [("compare", key) for key in state.compare]
        pairs += [("top", str(state.top))] if state.top != DEFAULT_PLANS else []
        pairs += [("why", str(why))] if why else []
        return urlencode(pairs)

    def _applies(self, spec: PlannerField) -> bool:
        if spec in OWN_DEVICE:
            return self.values["device"] == OWN
        return spec.name != "shape" or self.values["model"] == OWN

    def _device(self, values: Mapping[str, Any]) -> Any:
        if self.values["device"] != OWN:
            return values["device"]
        peaks = {
            "fp32": values["own_fp32"],
            "bf16": values["own_tflops"],
            "fp16": values["own_tflops"],
        }
        return {
            "name": "my own device",
            "peak_tflops": peaks,
            "memory_bytes": int(values["own_memory"] * GIB),
            "memory_gb_per_s": values["own_bandwidth"],
            "power_w": values["own_power"],
            "intra_node_gb_per_s": values["intra"] or 64.0,
            "inter_node_gb_per_s": values["inter"] or 12.5,
            "usd_per_hour": values["price"] or 0.0,
        }


def parse_form(data: Any) -> FormState:
    """Parses a QueryDict; ignores unknown names and uses defaults for missing ones."""
    values = {name: data.get(name, spec.default).strip() for name, spec in FIELDS.items()}
    for part in data.get("fix", "").split(","):
        name, value = [*part.strip().split("=", 1), ""][:2]
        if name in values and not data.get(name):
            values[name] = value.strip()
    link_problems: list[Problem] = []
    plan = _key(data.get("plan", ""))
    if plan is None:
        shown = data["plan"][:60]
        link_problems.append(
            problem(
                "plan",
                _("%(key)r is not a valid plan key") % {"key": shown},
                _("Select a row of the table."),
            )
        )
    keys = [key for key in map(_key, data.getlist("compare")) if key]
    top = data.get("top", "")
    shown = min(MAX_PLANS, max(1, int(top))) if top.isdecimal() and len(top) < 6 else DEFAULT_PLANS
    return FormState(
        values, plan or "", tuple(dict.fromkeys(keys))[:2], shown, tuple(link_problems)
    )


def _key(text: str) -> str | None:
    """Returns the normalized plan key; empty for empty text, None if it is invalid."""
    plan = plan_link.parse_plan_key(text, global_batch_size=1) if text else {}
    return None if plan is None else plan_link.plan_key(plan) if plan else ""


def parse_value(spec: PlannerField, text: str) -> Any:
    """Parses a field's text: the value, None if it is optional and empty, or a problem (dict)."""
    if spec.kind == "json":
        return _shape(spec, text)
    if spec.name == "device" and 0 < len(text) <= 120:
        return text  # a catalog or user device: the planner checks it
    if spec.kind in ("choice", "text"):
        known = [choice for choice, label in spec.choices]
        if text in known or not known:
            return text
        return problem(
            spec.name,
            _("%(value)r is not one of the choices") % {"value": text[:60]},
            _("Use one of %(choices)s.")
            % {"choices": ", ".join(name for name in known[:6] if name)},
        )
    if not text:
        if spec.default == ANY or spec.name == "tokens":
            return None
        return problem(
            spec.name, _("%(field)s is empty") % {"field": _(spec.label)}, _example(spec)
        )
    plain = text.replace(",", "").replace("_", "").replace(" ", "")
    if spec.kind == "int":
        value: float | int | None = int(plain) if re.fullmatch(r"[+-]?\d{1,18}", plain) else None
    else:
        value = parse_amount(plain)
    if value is None:
        return problem(
            spec.name,
            (
                _("%(value)r is not an integer")
                if spec.kind == "int"
                else _("%(value)r is not a number")
            )
            % {"value": text[:40]},
            _example(spec),
        )
    if not spec.least <= value <= spec.most:
        least, most = (
            f"{each:,.0f}" if each >= 1 else f"{each:g}" for each in (spec.least, spec.most)
        )
        limits = {"value": text[:40], "least": least, "most": most}
        return problem(
            spec.name,
            _("%(value)s is not between %(least)s and %(most)s") % limits,
            _("Use a value from %(least)s to %(most)s.") % limits,
        )
    return value


def _example(spec: PlannerField) -> str:
    return _("Enter a value such as %(example)s") % {"example": spec.default or "8"}


def parse_amount(text: str) -> float | None:
    """Parses `300G`, `1.5T` or `3e11`; returns None if it is not a finite number."""
    match = re.fullmatch(
        r"([+-]?(?:\d+\.?\d*|\.\d+))(e[+-]?\d{1,3})?([kmgbtp])?", text, re.IGNORECASE
    )
    if not match:
        return None
    value = float(match[1] + (match[2] or "")) * _SUFFIXES.get((match[3] or "").lower(), 1.0)
    return value if math.isfinite(value) else None


def map_problems(problems: list[dict[str, Any]]) -> list[Problem]:
    """Maps the planner's problems to form fields."""
    names = {spec.name for spec in AXES}
    mapped = []
    for item in problems:
        path = str(item.get("field", ""))
        tail = path.rpartition(".")[2]
        place = _FORM_FIELDS.get(path) or (tail if tail in names else "")
        while not place and "." in path:
            path = path.rpartition(".")[0]
            place = _FORM_FIELDS.get(path, "")
        mapped.append(
            problem(
                place or "model",
                str(item.get("message", "")),
                str(item.get("hint") or ""),
            )
        )
    return mapped


def problem(name: str, message: str, hint: str = "") -> Problem:
    """Returns a problem of a field."""
    return {"field": name, "message": message, "hint": hint}


def _shape(spec: PlannerField, text: str) -> Any:
    example = (
        '{"layers": 32, "hidden": 4096, "heads": 32, "ffn": 14336, "vocab": 128256, '
        '"max_seq_len": 8192}'
    )
    paste = _("Paste a config.json, or a model such as %(example)s") % {"example": example}
    if not text:
        return problem(spec.name, _("the model JSON is empty"), paste)
    if len(text) > MAX_SHAPE_CHARS:
        return problem(
            spec.name,
            _("the model JSON has %(count)s characters, at most %(most)s are allowed")
            % {"count": f"{len(text):,}", "most": f"{MAX_SHAPE_CHARS:,}"},
            _("Paste only the config.json."),
        )
    try:
        shape = json.loads(text)
    except (ValueError, RecursionError) as error:
        return problem(
            spec.name,
            _("the model JSON is invalid: %(error)s") % {"error": error},
            _("Paste the unchanged config.json."),
        )
    return (
        shape
        if isinstance(shape, dict)
        else problem(spec.name, _("the model must be a JSON object"), paste)
    )
