"""Plan keys: short text of a plan for links, such as `dp4.tp2.z1.sp.mb2.rc_selective.bf16`.

A key has the fields that a search may choose; the global batch size is a separate query value.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from pydantic import ValidationError

from workers.contracts import ParallelPlan

_AXES: Final = ("dp", "tp", "pp", "cp", "ep")
_NUMBERS: Final = {
    "z": "zero",
    "mb": "micro_batch_size",
    "v": "virtual_stages",
    "rep": "dp_replicate",
    "pre": "prefetch_layers",
    "live": "max_live_params",
    "keep": "param_persistence_threshold",
}
_NAMES: Final = {
    "rc": "recompute",
    "s": "schedule",
    "off": "offload",
    "rd": "reduce_dtype",
    "gd": "grad_dtype",
    "pd": "params_dtype",
}
_PRECISIONS: Final = ("fp32", "bf16", "fp16", "fp8")
_DEFAULTS: Final[dict[str, Any]] = {
    **dict.fromkeys(_AXES, 1),
    "zero": 0,
    "micro_batch_size": 1,
    "virtual_stages": 1,
    "dp_replicate": 1,
    "recompute": "none",
    "schedule": "1f1b",
    "offload": "none",
    "sequence_parallel": False,
    "precision": "fp32",
}
MAX_KEY_CHARS: Final = 160


def plan_key(plan: Mapping[str, Any]) -> str:
    """Returns the key: all non-default fields in fixed order."""
    parts = [f"{axis}{plan[axis]}" for axis in _AXES if _differs(plan, axis)]
    parts += [f"{short}{plan[name]}" for short, name in _NUMBERS.items() if _differs(plan, name)]
    parts += ["sp"] if plan.get("sequence_parallel") else []
    parts += [f"{short}_{plan[name]}" for short, name in _NAMES.items() if _differs(plan, name)]
    if plan.get("stage_layers"):
        parts.append("l_" + "-".join(str(layers) for layers in plan["stage_layers"]))
    return ".".join([*parts, str(plan.get("precision") or "fp32")])


def parse_plan_key(key: str, *, global_batch_size: int) -> dict[str, Any] | None:
    """Parses a key into a full plan; returns None if the syntax is invalid.

    Does not check the values: the planner rejects invalid plans.
    """
    if not key or len(key) > MAX_KEY_CHARS:
        return None
    plan: dict[str, Any] = {"global_batch_size": global_batch_size}
    for part in key.split("."):
        if part == "sp":
            plan["sequence_parallel"] = True
        elif part in _PRECISIONS:
            plan["precision"] = part
        elif match := re.fullmatch(r"l_(\d{1,4}(?:-\d{1,4})*)", part):
            plan["stage_layers"] = [int(layers) for layers in match[1].split("-")]
        elif match := re.fullmatch(r"([a-z]+)(\d{1,13})", part):
            name = match[1] if match[1] in _AXES else _NUMBERS.get(match[1])
            if name is None:
                return None
            plan[name] = int(match[2])
        elif (match := re.fullmatch(r"([a-z]+)_([a-z0-9_]+)", part)) and match[1] in _NAMES:
            plan[_NAMES[match[1]]] = match[2]
        else:
            return None
    try:
        return ParallelPlan.from_dict(plan).to_dict()
    except ValidationError:
        return plan


def _differs(plan: Mapping[str, Any], name: str) -> bool:
    return plan.get(name) not in (None, _DEFAULTS.get(name))
