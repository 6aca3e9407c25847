"""Heat maps of the run page: arrival skew, gradients, weights, underflow, expert loads.

Each reads one curve per row, so the page loads them separately.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

from django.http import HttpRequest
from django.utils.translation import gettext as _

from orchestrator.runs import selectors as runs
from orchestrator.telemetry import selectors as telemetry
from webui.charts.heat import COLUMNS, ROWS, EventMark, Heat, Strip, heat
from webui.charts.heat_summary import (
    gradients_summary,
    loads_summary,
    newest_loads,
    norm,
    since_first,
    skew_summary,
    underflow_summary,
    weights_summary,
)
from webui.charts.ranks import describe_places
from webui.presentation import event_messages, formatting
from webui.presentation.run_facts import Facts

SKEW: Final = "comm/arrival_skew_s"
GRADIENTS: Final = "grad_norm/"
WEIGHTS: Final = "weight_norm/"
UNDERFLOW: Final = "grad_underflow/"
LOADS: Final = "moe/load/"
STALLS: Final = ("straggler", "hang")
_POINTS: Final = 4 * COLUMNS  # points per curve; buckets keep their extremes


@dataclass(frozen=True, slots=True)
class HeatCard:
    """A heat map with its card's text; `heat` is None without data, then `empty` explains why."""

    name: str
    title: str
    description: str
    heat: Heat | None
    empty: str
    layers: list[int] | None = None
    layer: int | None = None


def content(facts: Facts, request: HttpRequest) -> HeatCard | None:
    """Return the heat map named by `of`; None for an unknown name."""
    make = MAPS.get(request.GET.get("of", ""))
    return make(facts, request) if make else None


def available(facts: Facts, names: Iterable[str]) -> list[str]:
    """Return those of the named maps that the run has data for."""
    has = {
        "skew": SKEW in facts.latest,
        "gradients": any(name.startswith(GRADIENTS) for name in facts.latest),
        "weights": any(name.startswith(WEIGHTS) for name in facts.latest),
        "underflow": any(name.startswith(UNDERFLOW) for name in facts.latest),
        "loads": any(name.startswith(LOADS) for name in facts.latest),
        "experts": any(name.startswith(LOADS) for name in facts.latest),
    }
    return [name for name in names if has[name]]


def _skew(facts: Facts, request: HttpRequest) -> HeatCard:
    newest = {
        rank: values[SKEW]
        for rank, values in telemetry.latest_by_rank(run=facts.run).items()
        if SKEW in values
    }
    stalls = [
        event for event in runs.events_of(run=facts.run, types=STALLS, limit=200, newest=True)
    ]
    reported = {event.rank for event in stalls if event.rank is not None}
    # ranks reported as slow first, then the latest ones
    chosen = sorted(
        sorted(newest, key=lambda rank: (rank not in reported, -newest[rank], rank))[:ROWS]
    )
    attempt = next(iter(runs.attempts_of(run=facts.run)[:1]), None)
    where = describe_places(attempt.placement if attempt else [], facts.plan)
    strips = [
        _strip(
            facts,
            SKEW,
            _("rank %(rank)s") % {"rank": rank},
            rank=rank,
            place=where[rank] if rank < len(where) else "",
        )
        for rank in chosen
    ]
    messages = [event_messages.event_message(event) for event in stalls]
    marks = [
        EventMark(item.step, item.text, item.kind) for item in messages if item.step is not None
    ]
    chart = heat(
        strips,
        format=formatting.seconds,
        summary=skew_summary(strips, facts.latest.get("step_time_s")),
        marks=marks,
        left_out=len(newest) - len(chosen),
    )
    description = _(
        "delay of each rank's arrival at the first reduction of a step, within its stage"
    )
    return HeatCard(
        "skew",
        _("Arrival skew by rank"),
        description,
        chart,
        _("Runs with several ranks report this with their first logged step."),
    )


def _gradients(facts: Facts, request: HttpRequest) -> HeatCard:
    strips, left_out = _by_layer(facts, GRADIENTS)
    chart = heat(
        strips, format=norm, summary=gradients_summary(strips), scale="orders", left_out=left_out
    )
    description = _("gradient norm of each layer before clipping, colored by order of magnitude")
    return HeatCard(
        "gradients",
        _("Gradient norm by layer"),
        description,
        chart,
        _("Training runs report this with each logged step."),
    )


def _weights(facts: Facts, request: HttpRequest) -> HeatCard:
    """Relative to each layer's first norm: absolute norms hardly change."""
    strips, left_out = _by_layer(facts, WEIGHTS)
    grown = [since_first(strip) for strip in strips]
    chart = heat(
        grown, format=_times, summary=weights_summary(strips), scale="even", left_out=left_out
    )
    description = _("weight norm of each layer relative to its first value; 1 is unchanged")
    return HeatCard(
        "weights",
        _("Weight norm by layer"),
        description,
        chart,
        _("Training runs report this with every tenth logged step."),
    )


def _underflow(facts: Facts, request: HttpRequest) -> HeatCard:
    strips, left_out = _by_layer(facts, UNDERFLOW)
    chart = heat(
        strips, format=formatting.percent, summary=underflow_summary(strips), left_out=left_out
    )
    description = _("share of gradient entries of each layer that fp16 rounds to zero")
    return HeatCard(
        "underflow", _("Gradient underflow"), description, chart, _("fp16 runs report this.")
    )


def _loads(facts: Facts, request: HttpRequest) -> HeatCard:
    """Layers by experts in the newest step; reads no curve."""
    by_layer = newest_loads(facts.latest)
    strips = [
        Strip(
            _("layer %(layer)s") % {"layer": layer},
            sorted(row),
            [row[expert] for expert in sorted(row)],
        )
        for layer, row in list(by_layer.items())[:ROWS]
    ]
    chart = heat(
        strips,
        format=_times,
        summary=loads_summary(by_layer),
        scale="even",
        across=_("expert"),
        columns=4 * COLUMNS,
        left_out=max(0, len(by_layer) - ROWS),
    )
    description = _("tokens per expert in the newest step, relative to an even share; 1 is even")
    return HeatCard(
        "loads", _("Current expert loads"), description, chart, _("MoE models report this.")
    )


def _experts(facts: Facts, request: HttpRequest) -> HeatCard:
    """The experts of one layer over the steps."""
    by_layer = newest_loads(facts.latest)
    selected = request.GET.get("layer", "")
    layer = (
        int(selected)
        if selected.isdecimal() and int(selected) in by_layer
        else next(iter(by_layer), 0)
    )
    experts = sorted(by_layer.get(layer, {}))
    strips = [
        _strip(facts, f"{LOADS}{layer}/{expert}", _("expert %(expert)s") % {"expert": expert})
        for expert in _spread(experts)
    ]
    chart = heat(
        strips,
        format=_times,
        summary=loads_summary({layer: by_layer.get(layer, {})}),
        scale="even",
        left_out=max(0, len(experts) - ROWS),
    )
    description = _("tokens per expert and step, relative to an even share; 1 is even")
    return HeatCard(
        "experts",
        _("Experts of layer %(layer)s") % {"layer": layer},
        description,
        chart,
        _("MoE models report this."),
        list(by_layer),
        layer,
    )


MAPS: Final[dict[str, Callable[[Facts, HttpRequest], HeatCard]]] = {
    "skew": _skew,
    "gradients": _gradients,
    "weights": _weights,
    "underflow": _underflow,
    "loads": _loads,
    "experts": _experts,
}


def _strip(
    facts: Facts, series: str, name: str, *, rank: int | None = None, place: str = ""
) -> Strip:
    curve = telemetry.series(run=facts.run, name=series, rank=rank, points=_POINTS)
    return Strip(name, curve.x, curve.y, place)


def _by_layer(facts: Facts, prefix: str) -> tuple[list[Strip], int]:
    """One row per layer from embedding to head, and the number of rows left out."""
    ends = {"embedding": -1, "head": 1}
    names = sorted(
        (name.removeprefix(prefix) for name in facts.latest if name.startswith(prefix)),
        key=lambda name: (ends.get(name, 0), name),
    )
    chosen = _spread(names)
    strips = [_strip(facts, prefix + name, name.replace("_", " ")) for name in chosen]
    return strips, len(names) - len(chosen)


def _spread(items: list[Any]) -> list[Any]:
    """At most ROWS of them, spread over all."""
    return items[:: -(-len(items) // ROWS)] if items else items


def _times(value: float) -> str:
    return f"{formatting.quantity(value, 2)}×"
