"""How a run's numbers hold, in one or two sentences: overflows, loss scale, what was not finite,
experts. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from webui.presentation import formatting

_BALANCED = 0.5  # of the largest expert load above even
_UNSCALED = {
    "fp32": "; fp32 needs no loss scale",
    "bf16": "; bf16 has fp32's range and needs no loss scale",
}


def numerics_sentence(
    events: Sequence[tuple[str, Mapping[str, Any]]],
    latest: Mapping[str, float],
    *,
    precision: str,
    full: bool = False,
) -> str:
    """`events` are `(type, data)`, oldest first; `full`: there are more than these."""
    parts = [_odd(events), _scale(events, latest, full), _experts(latest)]
    told = [part for part in parts if part]
    if told:
        return " ".join(told)
    if not latest:
        return "No step is logged yet."
    return f"All numbers are finite{_UNSCALED.get(precision, '')}."


def _odd(events: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """Where it stopped being finite: ranks tell the same step, the first with a module names it."""
    odd = [data for type, data in events if type == "non_finite"]
    if not odd:
        return ""
    first = next((data for data in odd if data.get("module")), odd[0])
    what = str(first.get("what") or "a value").partition(", first in")[0]
    step = formatting.number(first.get("step"))
    when = f" at step {int(step):,}" if step is not None else ""
    if not first.get("module"):
        return f"The {what} was not finite{when}; no module was found that it began in."
    whose = str(first.get("what") or "").rpartition("(rank ")[2].rstrip(")")
    rank = first.get("rank", whose if whose.isdecimal() else None)
    where = f"{first['module']} on rank {rank}" if rank is not None else first["module"]
    return f"The {what} was not finite{when}: it began in {where}."


def _scale(
    events: Sequence[tuple[str, Mapping[str, Any]]], latest: Mapping[str, float], full: bool
) -> str:
    scale = formatting.number(latest.get("loss_scale"))
    if scale is None:
        return ""
    skipped = sum(1 for type, _ in events if type == "overflow_skipped_step")
    changes = [data for type, data in events if type == "loss_scale_changed"]
    pairs = [
        (formatting.number(data.get("old")), formatting.number(data.get("new"))) for data in changes
    ]
    moves = [new - old for old, new in pairs if old is not None and new is not None]
    fell, grew = sum(1 for move in moves if move < 0), sum(1 for move in moves if move > 0)
    now = f"The loss scale is {formatting.quantity(scale)}"
    if not skipped and not moves:
        return f"{now} and has not moved: no gradient overflowed."
    least = "at least " if full else ""
    went = formatting.listed(
        [f"{word} {_times(count)}" for word, count in (("fell", fell), ("grew", grew)) if count]
    )
    skips = (
        f"{least}{formatting.count(skipped, 'step was', 'steps were')} skipped because gradients "
        "overflowed"
    )
    return f"{now}" + (f"; it {went}" if went else "") + (f", and {skips}." if skipped else ".")


def _experts(latest: Mapping[str, float]) -> str:
    above = formatting.number(latest.get("moe/max_violation"))
    if above is None:
        return ""
    how = "balanced" if above <= _BALANCED else "out of balance"
    return f"Experts are {how}: the fullest takes {formatting.percent(above)} more than its even share."


def _times(count: int) -> str:
    return {1: "once", 2: "twice"}.get(count, f"{count} times")
