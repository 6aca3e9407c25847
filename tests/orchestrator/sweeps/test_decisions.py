"""Promotions, replacements and points: pure."""

from __future__ import annotations

import math
import random

from orchestrator.sweeps.bayesian import Observed, importance, tpe_point
from orchestrator.sweeps.decisions import (
    Measured,
    better_first,
    last_resort,
    promotable,
    replacements,
)
from orchestrator.sweeps.definition import Parameter
from orchestrator.sweeps.space import grid_point, grid_values, perturbed, random_point


def test_values_that_are_not_numbers_come_last() -> None:
    values = {1: 2.0, 2: math.nan, 3: 1.0, 4: -math.inf}
    assert better_first(values, minimize=True) == [3, 1, 2, 4]
    assert better_first(values, minimize=False) == [1, 3, 2, 4]


def test_the_best_third_of_a_rung_is_promoted_highest_rung_first() -> None:
    trials = [Measured(n, [float(n)], waits=True) for n in range(1, 6)]
    assert promotable(trials[:2], factor=3, rungs=2, minimize=True) is None, "two are too few"
    assert promotable(trials, factor=3, rungs=2, minimize=True) == 1
    assert promotable(trials, factor=3, rungs=2, minimize=False) == 5
    continued = [Measured(1, [1.0], waits=False), *trials[1:]]
    assert promotable(continued, factor=3, rungs=2, minimize=True) is None
    higher = [Measured(10 + n, [9.0, float(n)], waits=True) for n in range(3)]
    assert promotable([*trials, *higher], factor=3, rungs=2, minimize=True) == 10
    bad = [Measured(n, [math.nan], waits=True) for n in range(3)]
    assert promotable(bad, factor=3, rungs=1, minimize=True) is None
    assert last_resort([*trials, *higher], minimize=True) == 10
    assert last_resort(bad, minimize=True) is None


def test_the_worst_quarter_continues_from_the_best_quarter() -> None:
    values = {number: float(number) for number in range(1, 9)}
    draw = random.Random(1)
    replaced = replacements(values, quantile=0.25, minimize=True, draw=draw)
    assert set(replaced) == {7, 8} and set(replaced.values()) <= {1, 2}
    assert set(replacements(values, quantile=0.25, minimize=False, draw=draw)) == {1, 2}
    nans = {**values, 3: math.nan}
    assert 3 in replacements(nans, quantile=0.1, minimize=True, draw=draw)
    assert not replacements({1: math.nan, 2: math.nan}, quantile=0.5, minimize=True, draw=draw)
    assert not replacements({1: 1.0}, quantile=0.5, minimize=True, draw=draw)


def test_points_of_a_space() -> None:
    log = Parameter(min=1e-4, max=1, scale="log", points=5)
    layers = Parameter(min=1, max=9, integer=True, points=3)
    choice = Parameter(values=["adamw", "sgd"])
    assert grid_values(log) == [0.0001, 0.001, 0.01, 0.1, 1.0]
    assert grid_values(layers) == [1, 5, 9]
    space = {"a": log, "b": layers, "c": choice}
    points = [grid_point(space, index) for index in range(30)]
    assert len({tuple(point.values()) for point in points}) == 30
    assert points[0] == {"a": 0.0001, "b": 1, "c": "adamw"} and points[1]["c"] == "sgd"
    drawn = random_point(space, seed=1, number=7)
    assert drawn == random_point(space, seed=1, number=7) != random_point(space, seed=2, number=7)
    assert 1e-4 <= drawn["a"] <= 1 and isinstance(drawn["b"], int)
    for seed in range(20):
        moved = perturbed(space, drawn, factors=[0.8, 1.25], draw=random.Random(seed))
        assert 1e-4 <= moved["a"] <= 1 and 1 <= moved["b"] <= 9 and moved["c"] in choice.values


def test_optuna_proposes_points_near_good_ones_and_ranks_parameters() -> None:
    space = {"lr": Parameter(min=1e-4, max=1, scale="log"), "seed": Parameter(values=[1, 2, 3])}
    points = [random_point(space, seed=0, number=number) for number in range(30)]
    trials = [Observed(point, abs(math.log10(point["lr"]) + 2)) for point in points]
    trials += [Observed(points[0], None), Observed(points[1], None, failed=True)]
    proposed = [
        tpe_point(space, trials, minimize=True, seed=0, number=number)["lr"] for number in range(8)
    ]
    near = sorted(abs(math.log10(lr) + 2) for lr in proposed)
    assert near[4] < 0.7, "random points are 1 away on average"
    shares = importance(space, trials, minimize=True)
    assert next(iter(shares)) == "lr" and sum(shares.values()) > 0.99
    assert importance(space, trials[:3], minimize=True) == {}
