"""Points of the parameter space: grid, random, perturbed. Pure and repeatable from a seed."""

from __future__ import annotations

import math
import random
from typing import Any

from orchestrator.sweeps.definition import Parameter

Point = dict[str, Any]


def grid_point(parameters: dict[str, Parameter], index: int) -> Point:
    """The point with this index; the last parameter changes fastest."""
    point: Point = {}
    for path, parameter in reversed(parameters.items()):
        choices = grid_values(parameter)
        index, at = divmod(index, len(choices))
        point[path] = choices[at]
    return {path: point[path] for path in parameters}


def grid_values(parameter: Parameter) -> list[Any]:
    """The listed values, or `points` values of the range with equal distances on its scale."""
    if parameter.values is not None:
        return list(parameter.values)
    count = parameter.points or 2
    values = [_at(parameter, part / (count - 1)) for part in range(count)]
    return list(dict.fromkeys(values))


def random_point(parameters: dict[str, Parameter], *, seed: int, number: int) -> Point:
    """A point drawn for this trial number: the same for the same seed."""
    draw = random.Random(f"{seed}:{number}")
    return {
        path: draw.choice(parameter.values)
        if parameter.values is not None
        else _at(parameter, draw.random())
        for path, parameter in parameters.items()
    }


def perturbed(
    parameters: dict[str, Parameter], point: Point, *, factors: list[float], draw: random.Random
) -> Point:
    """Each number times a random factor within its range; of a list, a neighbor of the value.

    Jaderberg et al., "Population Based Training of Neural Networks" (2017), explore by perturbing.
    """
    moved: Point = {}
    for path, parameter in parameters.items():
        value = point[path]
        if parameter.values is not None:
            at = parameter.values.index(value) + draw.choice((-1, 0, 1))
            moved[path] = parameter.values[min(max(at, 0), len(parameter.values) - 1)]
            continue
        assert parameter.min is not None and parameter.max is not None
        scaled = min(max(float(value) * draw.choice(factors), parameter.min), parameter.max)
        moved[path] = round(scaled) if parameter.integer else scaled
    return moved


def _at(parameter: Parameter, part: float) -> float | int:
    """The value at a part (0 to 1) of the range, on its scale."""
    low, high = parameter.min, parameter.max
    assert low is not None and high is not None
    if parameter.scale == "log":
        value = math.exp(math.log(low) + part * (math.log(high) - math.log(low)))
    else:
        value = low + part * (high - low)
    value = float(f"{min(max(value, low), high):.12g}")
    return round(value) if parameter.integer else value
