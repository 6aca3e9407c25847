"""Summarizes heat maps in one sentence: late ranks, gradients, weights, expert loads. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, median

from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from webui.charts.heat import Strip
from webui.presentation import formatting

_LATE = 0.05  # of a step: a median delay above this is reported
_LOST = 0.01  # of a layer's gradient entries
_FULL = 1.5  # times the even load
_VANISHING = 1e4  # ratio of the largest to the smallest gradient norm
_LOADS = "moe/load/"
_RECENT = 50


def skew_summary(strips: Sequence[Strip], step_s: float | None) -> str:
    """Name the rank with the largest median delay, and whether it matters."""
    late = []
    for strip in strips:
        recent = [value for value in strip.y[-_RECENT:] if math.isfinite(value)]
        if recent:
            late.append((median(recent), strip.name + (f" ({strip.place})" if strip.place else "")))
    if not late:
        return _("No arrival times reported yet.")
    delay, rank = max(late)
    if delay <= 0:
        return _("All ranks of a stage arrive together.")
    values = {
        "rank": rank,
        "Rank": _capital(rank),
        "delay": formatting.seconds(delay),
        "median": formatting.seconds(median(entry for entry, name in late)),
    }
    share = delay / step_s if step_s else None
    if share is None:
        return (
            _("Ranks arrive together: the last, %(rank)s, arrives %(delay)s after the first.")
            % values
        )
    values["share"] = formatting.percent(share)
    if share < _LATE:
        return (
            _(
                "Ranks arrive together: the last, %(rank)s, arrives %(delay)s after the first, "
                "%(share)s of a step."
            )
            % values
        )
    return (
        _(
            "%(Rank)s arrives %(delay)s after the first, %(share)s of a step; the median rank "
            "%(median)s."
        )
        % values
    )


def underflow_summary(strips: Sequence[Strip]) -> str:
    """Name the layer that loses the largest share of its gradient entries."""
    newest = {
        strip.name: strip.y[-1] for strip in strips if len(strip.y) and math.isfinite(strip.y[-1])
    }
    if not newest:
        return _("No gradients reported yet.")
    worst = max(newest, key=lambda name: newest[name])
    values = {
        "layer": worst,
        "Layer": _capital(worst),
        "share": formatting.percent(newest[worst]),
        "mean": formatting.percent(fmean(newest.values())),
    }
    if newest[worst] < _LOST:
        return _("Almost no underflow: at most %(share)s, in %(layer)s; mean %(mean)s.") % values
    return (
        _(
            "%(Layer)s loses %(share)s of its gradient entries, the mean layer %(mean)s: a larger "
            "loss scale would reduce this."
        )
        % values
    )


def norm(value: float) -> str:
    """Format a norm; below 0.001 as a power of ten."""
    return (
        formatting.quantity(value)
        if value == 0 or value >= 1e-3
        else f"{value:.2e}".replace("e-0", "e-")
    )


def gradients_summary(strips: Sequence[Strip]) -> str:
    """Name the layers with the largest and smallest gradients, or those without any."""
    newest = {strip.name: strip.y[-1] for strip in strips if len(strip.y)}
    non_finite = [name for name, value in newest.items() if not math.isfinite(value)]
    if non_finite:
        return _("The newest gradient of %(layers)s is not finite.") % {
            "layers": formatting.listed(non_finite[:4])
        }
    none = [name for name, value in newest.items() if value == 0]
    if none:
        layers = formatting.listed(none[:4]) + (_(" and more") if len(none) > 4 else "")
        return _("No gradient reaches %(layers)s.") % {"layers": layers}
    if not newest:
        return _("No gradients reported yet.")
    largest = max(newest, key=lambda name: newest[name])
    smallest = min(newest, key=lambda name: newest[name])
    text = _("The largest norm is %(value)s, in %(layer)s") % {
        "value": norm(newest[largest]),
        "layer": largest,
    }
    if largest == smallest:
        return f"{text}."
    ratio = newest[largest] / newest[smallest]
    text += _("; the smallest %(value)s, in %(layer)s: %(ratio)s times smaller") % {
        "value": norm(newest[smallest]),
        "layer": smallest,
        "ratio": formatting.quantity(ratio, 2),
    }
    return text + (_(", a vanishing gradient.") if ratio > _VANISHING else ".")


def since_first(strip: Strip) -> Strip:
    """Divide a curve by its first positive value."""
    first = next((value for value in strip.y if math.isfinite(value) and value > 0), 1.0)
    return Strip(strip.name, strip.x, [value / first for value in strip.y], strip.place)


def weights_summary(strips: Sequence[Strip]) -> str:
    """Name the layer whose weight norm changed most since the first value."""
    ends = [(strip.name, strip.y[0], strip.y[-1]) for strip in strips if len(strip.y)]
    valid = [
        (name, first, last)
        for name, first, last in ends
        if first > 0 and last > 0 and math.isfinite(first) and math.isfinite(last)
    ]
    if not valid:
        return _("No weights reported yet.")
    name, first, last = max(valid, key=lambda entry: abs(math.log(entry[2] / entry[1])))
    mean = fmean(last / first for name, first, last in valid)
    return _(
        "%(layer)s changed most, from %(first)s to %(last)s; the mean layer's norm is %(mean)s "
        "times its first."
    ) % {
        "layer": _capital(name),
        "first": norm(first),
        "last": norm(last),
        "mean": formatting.quantity(mean),
    }


def newest_loads(latest: Mapping[str, float]) -> dict[int, dict[int, float]]:
    """Return `{layer: {expert: load}}` of the newest step."""
    loads: dict[int, dict[int, float]] = {}
    for name, value in latest.items():
        layer, _separator, expert = name.removeprefix(_LOADS).partition("/")
        if name.startswith(_LOADS) and layer.isdecimal() and expert.isdecimal():
            loads.setdefault(int(layer), {})[int(expert)] = value
    return dict(sorted(loads.items()))


def loads_summary(by_layer: Mapping[int, Mapping[int, float]]) -> str:
    """Name the fullest expert and count experts without tokens."""
    cells = [
        (load, layer, expert)
        for layer, row in by_layer.items()
        for expert, load in row.items()
        if math.isfinite(load)
    ]
    if not cells:
        return _("No expert loads reported yet.")
    load, layer, expert = max(cells)
    idle = sum(1 for cell in cells if cell[0] == 0)
    text = _(
        "Expert %(expert)s of layer %(layer)s is fullest, with %(load)s times the even load"
    ) % {
        "expert": expert,
        "layer": layer,
        "load": formatting.quantity(load, 3),
    }
    text += _(": well balanced.") if load < _FULL else "."
    if idle:
        text += " " + ngettext(
            "%(count)s expert gets no tokens.", "%(count)s experts get no tokens.", idle
        ) % {"count": f"{idle:,}"}
    return text


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
