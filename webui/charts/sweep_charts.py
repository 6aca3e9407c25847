"""Drawings of a sweep: parallel coordinates and the best value so far. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from orchestrator.sweeps.definition import Parameter
from webui.presentation import formatting

AXIS_GAP: Final = 150.0
HEIGHT: Final = 260.0
TOP, LEFT = 34.0, 70.0
SHADES: Final = 5  # classes of lines by the rank of their value, 0 is best
_TICKS = 5
BEST_WIDTH, BEST_HEIGHT = 640.0, 180.0


@dataclass(frozen=True, slots=True)
class Tick:
    """A label at a place of an axis."""

    y: float
    label: str


@dataclass(frozen=True, slots=True)
class Axis:
    """A vertical axis with its title."""

    x: float
    title: str
    path: str
    ticks: tuple[Tick, ...]


@dataclass(frozen=True, slots=True)
class Curve:
    """A trial as a line over all axes; `shade` is -1 without a value."""

    number: int
    points: str
    shade: int
    title: str


@dataclass(frozen=True, slots=True)
class Parallel:
    """Parallel coordinates; `curves` end with the best, which is drawn on top."""

    width: float
    height: float
    axes: tuple[Axis, ...]
    curves: tuple[Curve, ...]


def parallel_coordinates(
    parameters: Mapping[str, Parameter], trials: Sequence[Any], *, metric: str, minimize: bool
) -> Parallel | None:
    """One axis per parameter and one for the metric; None before the first trial.

    `trials` have `number`, `parameters`, `value` and `state`.
    """
    if not trials:
        return None
    values = sorted((t.value for t in trials if t.value is not None), reverse=not minimize)
    axes = [
        _axis(at, path, parameter, [trial.parameters.get(path) for trial in trials])
        for at, (path, parameter) in enumerate(parameters.items())
    ]
    shown = Parameter(min=min(values), max=max(values)) if values else None
    if shown is not None and shown.min == shown.max:
        shown = Parameter(values=[shown.min])
    last = LEFT + AXIS_GAP * len(parameters)
    axes.append(Axis(last, metric, metric, _ticks(shown) if shown is not None else ()))
    curves = []
    for trial in trials:
        places = [
            (axis.x, place(parameter, trial.parameters.get(axis.path)))
            for axis, parameter in zip(axes, parameters.values(), strict=False)
        ]
        shade = -1
        if trial.value is not None and shown is not None:
            places.append((last, place(shown, trial.value)))
            shade = values.index(trial.value) * SHADES // len(values)
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        curves.append(Curve(trial.number, points, shade, _title(trial, metric)))
    # the best last; trials without value first
    curves.sort(key=lambda curve: -curve.shade if curve.shade >= 0 else -SHADES)
    return Parallel(last + LEFT, HEIGHT + TOP + 20, tuple(axes), tuple(curves))


def place(parameter: Parameter, value: Any) -> float:
    """The y coordinate of a value; larger values are higher."""
    if parameter.values is not None:
        last = max(len(parameter.values) - 1, 1)
        part = parameter.values.index(value) / last if value in parameter.values else 0.0
        part = 0.5 if len(parameter.values) == 1 else part
    else:
        assert parameter.min is not None and parameter.max is not None
        low, high, at = parameter.min, parameter.max, float(value)
        if parameter.scale == "log":
            low, high, at = math.log(low), math.log(high), math.log(at)
        part = min(max((at - low) / (high - low), 0.0), 1.0)
    return TOP + HEIGHT * (1 - part)


def _axis(at: int, path: str, parameter: Parameter, used: Sequence[Any]) -> Axis:
    return Axis(LEFT + AXIS_GAP * at, path.rpartition(".")[2], path, _ticks(parameter))


def _ticks(parameter: Parameter) -> tuple[Tick, ...]:
    if parameter.values is not None:
        step = max(1, math.ceil(len(parameter.values) / 8))
        return tuple(Tick(place(parameter, v), _label(v)) for v in parameter.values[::step])
    assert parameter.min is not None and parameter.max is not None
    low, high = parameter.min, parameter.max
    if parameter.scale == "log":
        powers = range(math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9) + 1)
        ticks = [10.0**power for power in powers]
        ticks = ticks if len(ticks) >= 2 else [low, math.sqrt(low * high), high]
    else:
        ticks = [low + (high - low) * part / (_TICKS - 1) for part in range(_TICKS)]
    return tuple(Tick(place(parameter, tick), _label(tick)) for tick in ticks)


def _label(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)[:14]
    return f"{value:.3g}"


def _title(trial: Any, metric: str) -> str:
    value = formatting.quantity(trial.value, 4) if trial.value is not None else trial.state
    return f"{trial.number}: {metric} {value}"


@dataclass(frozen=True, slots=True)
class BestSoFar:
    """Values as dots by trial number, and the best so far as a stepped line."""

    dots: tuple[tuple[float, float, str], ...]
    line: str
    ticks: tuple[Tick, ...]
    first: int
    last: int


def best_so_far(trials: Sequence[Any], *, minimize: bool) -> BestSoFar | None:
    """The picture of all trials with a value, by number; None without any."""
    done = [trial for trial in trials if trial.value is not None]
    if not done:
        return None
    numbers: list[int] = [trial.number for trial in done]
    values: list[float] = [trial.value for trial in done]
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    across = max(numbers[-1] - numbers[0], 1)

    def x(number: int) -> float:
        return 60 + (BEST_WIDTH - 80) * (number - numbers[0]) / across

    def y(value: float) -> float:
        return 14 + (BEST_HEIGHT - 44) * (high - value) / span

    best, steps = done[0].value, [f"{x(numbers[0]):.1f},{y(done[0].value):.1f}"]
    for trial in done[1:]:
        steps.append(f"{x(trial.number):.1f},{y(best):.1f}")
        best = min(best, trial.value) if minimize else max(best, trial.value)
        steps.append(f"{x(trial.number):.1f},{y(best):.1f}")
    marks = sorted({low, low + span / 2, high})
    return BestSoFar(
        dots=tuple(
            (round(x(t.number), 1), round(y(t.value), 1), f"{t.number}: {t.value:.4g}")
            for t in done
        ),
        line=" ".join(steps),
        ticks=tuple(Tick(round(y(mark), 1), f"{mark:.4g}") for mark in marks),
        first=numbers[0],
        last=numbers[-1],
    )
