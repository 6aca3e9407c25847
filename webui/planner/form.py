"""The planner's question as a link holds it: fields to a request line, back to a query, with what
is wrong beside them.

Pure; what is legal and what fits is said by the planner.
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

from webui.planner import plan_link
from webui.planner.form_fields import ANY, AXES, FIELDS, OWN, OWN_DEVICE, PlannerField
from workers.contracts.catalog.units import GIB

SHOWN: Final = 12  # plans in the table before more are asked for
MOST: Final = 100
LONGEST_SHAPE: Final = 60_000
# stand in every link, so that it means the same when a default changes
_ALWAYS: Final = (
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
_SUFFIXES: Final = {"k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9, "t": 1e12, "p": 1e15}
# where the planner's own field names stand on the page
_PLACES: Final = {
    "model": "model",
    "cluster.device": "device",
    "cluster.nodes": "nodes",
    "workload.seq_len": "seq_len",
    "cluster.devices_per_node": "devices_per_node",
    "workload.global_batch_size": "global_batch_size",
    "plan.global_batch_size": "global_batch_size",
    "workload.tokens": "tokens",
    "framework": "framework",
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
class Question:
    """`values` hold every field's text, `plan` and `compare` plans as `planner_plan` writes them."""

    values: Mapping[str, str]
    plan: str = ""
    compare: tuple[str, ...] = ()
    top: int = SHOWN
    unread: tuple[Problem, ...] = field(default=())  # of the link's own parts

    @cached_property
    def _read(self) -> tuple[dict[str, Any], list[Problem]]:
        values: dict[str, Any] = {}
        problems = list(self.unread)
        own_device = self.values["device"] == OWN
        for name, about in FIELDS.items():
            if (name == "shape" and self.values["model"] != OWN) or (
                about in OWN_DEVICE and not own_device
            ):
                continue
            value = read(about, self.values[name])
            if isinstance(value, dict) and set(value) == {"field", "message", "hint"}:
                problems.append(value)
            else:
                values[name] = value
        return values, problems

    @property
    def problems(self) -> list[Problem]:
        """What cannot be read as it stands; the planner says the rest."""
        return self._read[1]

    @property
    def global_batch(self) -> int:
        return int(self._read[0].get("global_batch_size") or 1)

    def line(self, plan: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The planner's request line; without a plan it is what a search is asked for.

        Only where nothing is unread.
        """
        found = self._read[0]
        cluster = {
            "device": self._device(found),
            "nodes": found["nodes"],
            "devices_per_node": found["devices_per_node"],
            "intra_node_gb_per_s": found["intra"],
            "inter_node_gb_per_s": found["inter"],
            "usd_per_device_hour": found["price"],
            "host_gib_per_device": found["host"],
        }
        workload = {"seq_len": found["seq_len"], "tokens": found["tokens"]}
        if plan is None:
            workload["global_batch_size"] = found["global_batch_size"]
        line = {
            "model": found["shape"] if self.values["model"] == OWN else found["model"],
            "cluster": {key: value for key, value in cluster.items() if value is not None},
            "workload": {key: value for key, value in workload.items() if value is not None},
            "framework": {"name": found["framework"]},
        }
        return line if plan is None else {**line, "plan": dict(plan)}

    def fixed(self) -> dict[str, Any]:
        """The axes that are not left to the search."""
        found = self._read[0]
        fixed = {
            about.name: found[about.name]
            for about in AXES
            if found.get(about.name) not in (None, ANY)
        }
        return {name: int(value) if name == "zero" else value for name, value in fixed.items()}

    @property
    def objective(self) -> str:
        return self.values["objective"]

    def plan_dict(self, key: str) -> dict[str, Any] | None:
        return plan_link.plan_of(key, global_batch_size=self.global_batch)

    def query(self, **changes: Any) -> str:
        """The link's query with some of `plan`, `compare`, `top`, `why` or a field changed."""
        why = changes.pop("why", "")
        own = {name: changes.pop(name) for name in ("plan", "compare", "top") if name in changes}
        asked = replace(self, values={**self.values, **changes}, **own)
        pairs = [
            (name, asked.values[name])
            for name, about in FIELDS.items()
            if asked._stands(about) and (name in _ALWAYS or asked.values[name] != about.default)
        ]
        pairs += [("plan", asked.plan)] if asked.plan else []
        pairs += [("compare", key) for key in asked.compare]
        pairs += [("top", str(asked.top))] if asked.top != SHOWN else []
        pairs += [("why", str(why))] if why else []
        return urlencode(pairs)

    def _stands(self, about: PlannerField) -> bool:
        if about in OWN_DEVICE:
            return self.values["device"] == OWN
        return about.name != "shape" or self.values["model"] == OWN

    def _device(self, found: Mapping[str, Any]) -> Any:
        if self.values["device"] != OWN:
            return found["device"]
        peaks = {
            "fp32": found["own_fp32"],
            "bf16": found["own_tflops"],
            "fp16": found["own_tflops"],
        }
        return {
            "name": "my own device",
            "peak_tflops": peaks,
            "memory_bytes": int(found["own_memory"] * GIB),
            "memory_gb_per_s": found["own_bandwidth"],
            "power_w": found["own_power"],
            "intra_node_gb_per_s": found["intra"] or 64.0,
            "inter_node_gb_per_s": found["inter"] or 12.5,
            "usd_per_hour": found["price"] or 0.0,
        }


def question(given: Any) -> Question:
    """From a request's query (a QueryDict): unknown names are left alone, missing ones take their
    default.
    """
    values = {name: given.get(name, about.default).strip() for name, about in FIELDS.items()}
    for name, _, value in (part.strip().partition("=") for part in given.get("fix", "").split(",")):
        if name in values and not given.get(name):
            values[name] = value.strip()
    unread: list[Problem] = []
    plan = _key(given.get("plan", ""))
    if plan is None:
        shown = given["plan"][:60]
        unread.append(
            said("plan", f"{shown!r} is not a plan as links write it", "a row of the table")
        )
    keys = [key for key in map(_key, given.getlist("compare")) if key]
    top = given.get("top", "")
    shown = min(MOST, max(1, int(top))) if top.isdecimal() and len(top) < 6 else SHOWN
    return Question(values, plan or "", tuple(dict.fromkeys(keys))[:2], shown, tuple(unread))


def _key(text: str) -> str | None:
    """A plan's text in its steady order; empty for none, None for what is no plan."""
    plan = plan_link.plan_of(text, global_batch_size=1) if text else {}
    return None if plan is None else plan_link.key_of(plan) if plan else ""


def read(about: PlannerField, text: str) -> Any:
    """The value of a field's text; None for empty where that means something; a problem, as an
    object, where wrong.
    """
    if about.kind == "json":
        return _shape(about, text)
    if about.name == "device" and 0 < len(text) <= 120:
        return text  # the catalogue's, or one of the person's own: the planner knows
    if about.kind in ("choice", "text"):
        known = [choice for choice, _ in about.choices]
        if text in known or not known:
            return text
        return said(
            about.name,
            f"{text[:60]!r} is not one of the choices",
            ", ".join(name for name in known[:6] if name),
        )
    if not text:
        if about.default == ANY or about.name == "tokens":
            return None
        return said(about.name, f"{about.label.lower()} is empty", about.default)
    plain = text.replace(",", "").replace("_", "").replace(" ", "")
    if about.kind == "int":
        value: float | int | None = int(plain) if re.fullmatch(r"[+-]?\d{1,18}", plain) else None
    else:
        value = amount(plain)
    if value is None:
        return said(
            about.name,
            f"{text[:40]!r} is not a {'whole ' if about.kind == 'int' else ''}number",
            about.default or "8",
        )
    if not about.least <= value <= about.most:
        least, most = (
            f"{each:,.0f}" if each >= 1 else f"{each:g}" for each in (about.least, about.most)
        )
        return said(
            about.name, f"{text[:40]} is not between {least} and {most}", about.default or "8"
        )
    return value


def amount(text: str) -> float | None:
    """`300G`, `1.5T`, `3e11`: a finite number of at most metric suffixes; None for anything else."""
    found = re.fullmatch(
        r"([+-]?(?:\d+\.?\d*|\.\d+))(e[+-]?\d{1,3})?([kmgbtp])?", text, re.IGNORECASE
    )
    if not found:
        return None
    value = float(found[1] + (found[2] or "")) * _SUFFIXES.get((found[3] or "").lower(), 1.0)
    return value if math.isfinite(value) else None


def placed(problems: list[dict[str, Any]]) -> list[Problem]:
    """The planner's problems by the page's fields."""
    names = {about.name for about in AXES}
    found = []
    for item in problems:
        path = str(item.get("field", ""))
        tail = path.rpartition(".")[2]
        place = _PLACES.get(path) or (tail if tail in names else "")
        while not place and "." in path:
            path = path.rpartition(".")[0]
            place = _PLACES.get(path, "")
        found.append(
            said(
                place or "model",
                str(item.get("message", "")),
                str(item.get("hint") or ""),
            )
        )
    return found


def said(name: str, says: str, try_: str = "") -> Problem:
    return {"field": name, "message": says, "hint": try_}


def _shape(about: PlannerField, text: str) -> Any:
    example = (
        '{"layers": 32, "hidden": 4096, "heads": 32, "ffn": 14336, "vocab": 128256, '
        '"max_seq_len": 8192}'
    )
    if not text:
        return said(about.name, "there is no shape yet", f"paste a config.json, or {example}")
    if len(text) > LONGEST_SHAPE:
        return said(
            about.name,
            f"{len(text):,} characters are too many for a shape",
            "its config.json alone",
        )
    try:
        shape = json.loads(text)
    except (ValueError, RecursionError) as error:
        return said(about.name, f"the JSON cannot be read: {error}", "a config.json as it is")
    return (
        shape
        if isinstance(shape, dict)
        else said(about.name, "a shape is an object in braces", example)
    )
