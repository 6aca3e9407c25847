"""A plan as a short text that stands in a link, and back:
`dp4.tp2.pp2.z1.sp.mb2.rc_selective.s_1f1b.bf16`.

Knows the plan's fields that a search may choose; the global batch stands in the link on its own.
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
}
_WORDS: Final = {
    "rc": "recompute",
    "s": "schedule",
    "off": "offload",
    "rd": "reduce_dtype",
    "gd": "grad_dtype",
}
_PRECISIONS: Final = ("fp32", "bf16", "fp16", "fp8")
_USUAL: Final[dict[str, Any]] = {
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
LONGEST: Final = 160


def key_of(plan: Mapping[str, Any]) -> str:
    """What is not usual, in a steady order; the same plan has the same text everywhere."""
    parts = [f"{axis}{plan[axis]}" for axis in _AXES if _said(plan, axis)]
    parts += [f"{short}{plan[name]}" for short, name in _NUMBERS.items() if _said(plan, name)]
    parts += ["sp"] if plan.get("sequence_parallel") else []
    parts += [f"{short}_{plan[name]}" for short, name in _WORDS.items() if _said(plan, name)]
    if plan.get("stage_layers"):
        parts.append("l_" + "-".join(str(layers) for layers in plan["stage_layers"]))
    return ".".join([*parts, str(plan.get("precision") or "fp32")])


def plan_of(key: str, *, global_batch_size: int) -> dict[str, Any] | None:
    """The plan that the text stands for, all its fields given; None where it stands for none.

    Whether it is legal is not asked here: a field that no plan may have is left as it is, for the
    planner to refuse.
    """
    if not key or len(key) > LONGEST:
        return None
    plan: dict[str, Any] = {"global_batch_size": global_batch_size}
    for part in key.split("."):
        if part == "sp":
            plan["sequence_parallel"] = True
        elif part in _PRECISIONS:
            plan["precision"] = part
        elif found := re.fullmatch(r"l_(\d{1,4}(?:-\d{1,4})*)", part):
            plan["stage_layers"] = [int(layers) for layers in found[1].split("-")]
        elif found := re.fullmatch(r"([a-z]+)(\d{1,7})", part):
            name = found[1] if found[1] in _AXES else _NUMBERS.get(found[1])
            if name is None:
                return None
            plan[name] = int(found[2])
        elif (found := re.fullmatch(r"([a-z]+)_([a-z0-9_]+)", part)) and found[1] in _WORDS:
            plan[_WORDS[found[1]]] = found[2]
        else:
            return None
    try:
        return ParallelPlan.from_dict(plan).to_dict()
    except ValidationError:
        return plan


def _said(plan: Mapping[str, Any], name: str) -> bool:
    return plan.get(name) not in (None, _USUAL.get(name))
