"""The run page's heat maps: arrival skew by rank, fp16 underflow by layer, expert loads. Read apart
from the page.

Knows which curves make which map; reads one curve a row, so that the page itself waits for none of
them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

from django.http import HttpRequest

from orchestrator.runs import selectors as runs
from orchestrator.telemetry import selectors as telemetry
from webui.charts.heat import COLUMNS, ROWS, Heat, Mark, Strip, heat
from webui.charts.heat_summary import (
    experts_now,
    gradients_summary,
    loads_summary,
    norm,
    since_first,
    skew_summary,
    underflow_summary,
    weights_summary,
)
from webui.charts.ranks import places
from webui.presentation import event_messages, formatting
from webui.presentation.run_facts import Facts

SKEW: Final = "comm/arrival_skew_s"
GRADIENTS: Final = "grad_norm/"
WEIGHTS: Final = "weight_norm/"
UNDERFLOW: Final = "grad_underflow/"
LOADS: Final = "moe/load/"
STALLS: Final = ("straggler", "hang")
_POINTS: Final = 4 * COLUMNS  # a curve's points: buckets keep their extremes


@dataclass(frozen=True, slots=True)
class Shown:
    """A heat map with its card's words; `heat` None where nothing was told yet, which `empty` then
    says.
    """

    of: str
    title: str
    what: str
    heat: Heat | None
    empty: str
    layers: list[int] | None = None
    layer: int | None = None


def content(facts: Facts, request: HttpRequest) -> Shown | None:
    """The map named `of`, None for another name."""
    make = MAPS.get(request.GET.get("of", ""))
    return make(facts, request) if make else None


def offered(facts: Facts, names: Iterable[str]) -> list[str]:
    """Of these maps the ones this run has curves for."""
    has = {
        "skew": SKEW in facts.latest,
        "gradients": any(name.startswith(GRADIENTS) for name in facts.latest),
        "weights": any(name.startswith(WEIGHTS) for name in facts.latest),
        "underflow": any(name.startswith(UNDERFLOW) for name in facts.latest),
        "loads": any(name.startswith(LOADS) for name in facts.latest),
        "experts": any(name.startswith(LOADS) for name in facts.latest),
    }
    return [name for name in names if has[name]]


def _skew(facts: Facts, request: HttpRequest) -> Shown:
    newest = {
        rank: values[SKEW]
        for rank, values in telemetry.latest_by_rank(run=facts.run).items()
        if SKEW in values
    }
    stalls = [
        event for event in runs.events_of(run=facts.run, types=STALLS, limit=200, newest=True)
    ]
    told = {event.rank for event in stalls if event.rank is not None}
    # those that were told as slow first, then those that are late now
    chosen = sorted(sorted(newest, key=lambda rank: (rank not in told, -newest[rank], rank))[:ROWS])
    attempt = next(iter(runs.attempts_of(run=facts.run)[:1]), None)
    where = places(attempt.placement if attempt else [], facts.plan)
    strips = [
        _strip(
            facts, SKEW, f"rank {rank}", rank=rank, place=where[rank] if rank < len(where) else ""
        )
        for rank in chosen
    ]
    found = [event_messages.moment(event) for event in stalls]
    marks = [Mark(each.step, each.text, each.kind) for each in found if each.step is not None]
    drawn = heat(
        strips,
        says=formatting.seconds,
        summary=skew_summary(strips, facts.latest.get("step_time_s")),
        marks=marks,
        left_out=len(newest) - len(chosen),
    )
    what = "how long after the first rank of its stage each came to the step's first reduction"
    return Shown(
        "skew",
        "Who comes late",
        what,
        drawn,
        "A run of several ranks tells this with its first logged step.",
    )


def _gradients(facts: Facts, request: HttpRequest) -> Shown:
    strips, left_out = _by_layer(facts, GRADIENTS)
    drawn = heat(
        strips, says=norm, summary=gradients_summary(strips), scale="orders", left_out=left_out
    )
    what = "each layer's gradient norm before clipping, coloured by its order of magnitude"
    return Shown(
        "gradients",
        "Gradient norm by layer",
        what,
        drawn,
        "Training runs tell this with a logged step.",
    )


def _weights(facts: Facts, request: HttpRequest) -> Shown:
    """Against each layer's first norm: the norms themselves lie apart by the layers' sizes, and
    hardly move.
    """
    strips, left_out = _by_layer(facts, WEIGHTS)
    grown = [since_first(strip) for strip in strips]
    drawn = heat(
        grown, says=_times, summary=weights_summary(strips), scale="even", left_out=left_out
    )
    what = "each layer's weight norm over its first one; 1 is unchanged"
    return Shown(
        "weights",
        "Weight norm by layer",
        what,
        drawn,
        "Training runs tell this every tenth logged step.",
    )


def _underflow(facts: Facts, request: HttpRequest) -> Shown:
    strips, left_out = _by_layer(facts, UNDERFLOW)
    drawn = heat(
        strips, says=formatting.percent, summary=underflow_summary(strips), left_out=left_out
    )
    what = "share of each layer's gradient entries that fp16 rounds to zero"
    return Shown("underflow", "Gradients lost to underflow", what, drawn, "Runs in fp16 tell this.")


def _loads(facts: Facts, request: HttpRequest) -> Shown:
    """Layers by experts, in the newest step: one picture of the whole model, without reading a
    curve.
    """
    by_layer = experts_now(facts.latest)
    strips = [
        Strip(f"layer {layer}", sorted(row), [row[expert] for expert in sorted(row)])
        for layer, row in list(by_layer.items())[:ROWS]
    ]
    drawn = heat(
        strips,
        says=_times,
        summary=loads_summary(by_layer),
        scale="even",
        across="expert",
        columns=4 * COLUMNS,
        left_out=max(0, len(by_layer) - ROWS),
    )
    what = "each expert's share of its layer's tokens in the newest step; 1 is even"
    return Shown("loads", "Expert loads, now", what, drawn, "Models with experts tell this.")


def _experts(facts: Facts, request: HttpRequest) -> Shown:
    """The experts of one layer over the steps."""
    by_layer = experts_now(facts.latest)
    wanted = request.GET.get("layer", "")
    layer = (
        int(wanted) if wanted.isdecimal() and int(wanted) in by_layer else next(iter(by_layer), 0)
    )
    experts = sorted(by_layer.get(layer, {}))
    strips = [
        _strip(facts, f"{LOADS}{layer}/{expert}", f"expert {expert}") for expert in _spread(experts)
    ]
    drawn = heat(
        strips,
        says=_times,
        summary=loads_summary({layer: by_layer.get(layer, {})}, of_steps=True),
        scale="even",
        left_out=max(0, len(experts) - ROWS),
    )
    what = "each expert's share of the layer's tokens, step by step; 1 is even"
    return Shown(
        "experts",
        f"Experts of layer {layer}",
        what,
        drawn,
        "Models with experts tell this.",
        list(by_layer),
        layer,
    )


MAPS: Final[dict[str, Callable[[Facts, HttpRequest], Shown]]] = {
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
    found = telemetry.series(run=facts.run, name=series, rank=rank, points=_POINTS)
    return Strip(name, found.x, found.y, place)


def _by_layer(facts: Facts, prefix: str) -> tuple[list[Strip], int]:
    """A row a layer in order of depth, between embedding and head where those are told; and how
    many are left out.
    """
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
