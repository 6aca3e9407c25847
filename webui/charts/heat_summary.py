"""What a heat map says in one sentence: who is late, which layer loses gradients, which expert is
full. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, median

from webui.charts.heat import Strip
from webui.presentation import formatting

_LATE = 0.05  # of a step: a rank that is later than this in the middle is told
_LOST = 0.01  # of a layer's gradient
_FULL = 1.5  # times the even load
_FADED = 1e4  # between the largest and the smallest gradient of layers
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
        of = f", {formatting.percent(share)} of a step" if share is not None else ""
        return (
            f"Ranks come together now: the latest, {who}, {formatting.seconds(most)} after the "
            f"first{of}."
        )
    others = formatting.seconds(median(each for each, _ in late))
    return (
        f"{_capital(who)} comes {formatting.seconds(most)} after the first, {formatting.percent(share)} of "
        "a step; "
        f"the median rank {others}."
    )


def underflow_summary(strips: Sequence[Strip]) -> str:
    newest = {
        strip.name: strip.y[-1] for strip in strips if len(strip.y) and math.isfinite(strip.y[-1])
    }
    if not newest:
        return "No layer has told its gradients yet."
    worst = max(newest, key=lambda name: newest[name])
    mean = formatting.percent(fmean(newest.values()))
    if newest[worst] < _LOST:
        return (
            f"Almost nothing is lost: {formatting.percent(newest[worst])} at most, in {worst}; "
            f"{mean} in the mean."
        )
    lost = (
        f"{_capital(worst)} loses {formatting.percent(newest[worst])} of its gradient entries, the "
        f"mean layer {mean}"
    )
    return f"{lost}: a larger loss scale would keep more."


def norm(value: float) -> str:
    """A norm in words: below a thousandth by its power of ten."""
    return (
        formatting.quantity(value)
        if value == 0 or value >= 1e-3
        else f"{value:.2e}".replace("e-0", "e-")
    )


def gradients_summary(strips: Sequence[Strip]) -> str:
    """Where the gradient is largest now, and whether it reaches every layer."""
    newest = {strip.name: strip.y[-1] for strip in strips if len(strip.y)}
    odd = [name for name, value in newest.items() if not math.isfinite(value)]
    if odd:
        return f"The newest gradient of {formatting.listed(odd[:4])} is not finite."
    none = [name for name, value in newest.items() if value == 0]
    if none:
        return f"No gradient reaches {formatting.listed(none[:4])}{' and more' if len(none) > 4 else ''}."
    if not newest:
        return "No layer has told its gradient yet."
    most, least = (
        max(newest, key=lambda name: newest[name]),
        min(newest, key=lambda name: newest[name]),
    )
    says = f"Now the largest is {norm(newest[most])}, of {most}"
    if most == least:
        return f"{says}."
    ratio = newest[most] / newest[least]
    says += f"; the smallest {norm(newest[least])}, of {least}"
    return (
        f"{says}: {formatting.quantity(ratio, 2)} times "
        f"less{', which hardly learns' if ratio > _FADED else ''}."
    )


def since_first(strip: Strip) -> Strip:
    """A curve over its own first value that is above nothing."""
    first = next((value for value in strip.y if math.isfinite(value) and value > 0), 1.0)
    return Strip(strip.name, strip.x, [value / first for value in strip.y], strip.place)


def weights_summary(strips: Sequence[Strip]) -> str:
    """Which layer's weights have moved most from where they began."""
    told = [(strip.name, strip.y[0], strip.y[-1]) for strip in strips if len(strip.y)]
    sound = [
        each
        for each in told
        if each[1] > 0 and each[2] > 0 and math.isfinite(each[1]) and math.isfinite(each[2])
    ]
    if not sound:
        return "No layer has told its weights yet."
    name, first, last = max(sound, key=lambda each: abs(math.log(each[2] / each[1])))
    mean = fmean(last / first for _, first, last in sound)
    moved = f"from {norm(first)} to {norm(last)}"
    return (
        f"{_capital(name)} has moved most, {moved}; the mean layer's norm is "
        f"{formatting.quantity(mean)} times its first."
    )


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
    ]
    if not cells:
        return "No expert has told its load yet."
    load, layer, expert = max(cells)
    idle = sum(1 for share, _, _ in cells if share == 0)
    when = "Now the fullest" if of_steps else "The fullest"
    says = (
        f"{when} is expert {expert} of layer {layer} with {formatting.quantity(load, 3)} times the "
        "even load"
    )
    says += ": well balanced." if load < _FULL else "."
    return says + (
        f" {formatting.count(idle, 'expert gets', 'experts get')} no token at all." if idle else ""
    )


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
