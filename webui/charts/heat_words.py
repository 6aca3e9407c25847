"""What a heat map says in one sentence: who is late, which layer loses gradients, which expert is full. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, median

from webui import words
from webui.charts.heat import Strip

_LATE = 0.05  # of a step: a rank that is later than this in the middle is told
_LOST = 0.01  # of a layer's gradient
_FULL = 1.5  # times the even load
_LOADS = "moe/load/"
_RECENT = 50


def skew_summary(strips: Sequence[Strip], step_s: float | None) -> str:
    """The rank that is latest in the middle of its last steps, and whether that matters."""
    late = []
    for strip in strips:
        recent = [value for value in strip.y[-_RECENT:] if math.isfinite(value)]
        if recent:
            late.append((median(recent), strip.name + (f" ({strip.place})" if strip.place else "")))
    if not late:
        return "No rank has told its arrival yet."
    most, who = max(late)
    if most <= 0:
        return "No rank comes after another of its stage."
    share = most / step_s if step_s else None
    if share is None or share < _LATE:
        of = f", {words.percent(share)} of a step" if share is not None else ""
        return f"Ranks come together now: the latest, {who}, {words.seconds(most)} after the first{of}."
    others = words.seconds(median(each for each, _ in late))
    return (
        f"{_capital(who)} comes {words.seconds(most)} after the first, {words.percent(share)} of a step; "
        f"the median rank {others}."
    )


def underflow_summary(strips: Sequence[Strip]) -> str:
    newest = {strip.name: strip.y[-1] for strip in strips if len(strip.y) and math.isfinite(strip.y[-1])}
    if not newest:
        return "No layer has told its gradients yet."
    worst = max(newest, key=lambda name: newest[name])
    mean = words.percent(fmean(newest.values()))
    if newest[worst] < _LOST:
        return f"Almost nothing is lost: {words.percent(newest[worst])} at most, in {worst}; {mean} in the mean."
    lost = f"{_capital(worst)} loses {words.percent(newest[worst])} of its gradient entries, the mean layer {mean}"
    return f"{lost}: a larger loss scale would keep more."


def experts_now(latest: Mapping[str, float]) -> dict[int, dict[int, float]]:
    """`{layer: {expert: load}}` of the newest step."""
    found: dict[int, dict[int, float]] = {}
    for name, value in latest.items():
        layer, _, expert = name.removeprefix(_LOADS).partition("/")
        if name.startswith(_LOADS) and layer.isdecimal() and expert.isdecimal():
            found.setdefault(int(layer), {})[int(expert)] = value
    return dict(sorted(found.items()))


def loads_summary(by_layer: Mapping[int, Mapping[int, float]], *, of_steps: bool = False) -> str:
    cells = [
        (load, layer, expert)
        for layer, row in by_layer.items()
        for expert, load in row.items()
        if math.isfinite(load)
    ]  # fmt: skip
    if not cells:
        return "No expert has told its load yet."
    load, layer, expert = max(cells)
    idle = sum(1 for share, _, _ in cells if share == 0)
    when = "Now the fullest" if of_steps else "The fullest"
    says = f"{when} is expert {expert} of layer {layer} with {words.quantity(load, 3)} times the even load"
    says += ": well balanced." if load < _FULL else "."
    return says + (f" {words.count(idle, 'expert gets', 'experts get')} no token at all." if idle else "")


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
