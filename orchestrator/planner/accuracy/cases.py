"""Accuracy tests against published runs: calibrating runs, held-out runs, goal of each row.

Rows of missing measurement files are omitted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from orchestrator.planner.accuracy import measures
from orchestrator.planner.accuracy.predictions import (
    memory,
    predict_held_out,
    predict_times,
    read_file,
    timed,
)
from orchestrator.planner.accuracy.splits import Split, leave_one_out, random_splits
from orchestrator.planner.calibration.fit import fit
from orchestrator.planner.calibration.measurements import Pair

SEEDS = tuple(range(8))
FILES = ("vtrain", "mosaic", "b200", "bloom", "korthikanti", "megatron2021", "torchtitan")


@dataclass(frozen=True)
class Row:
    """One line of the report.

    `reached` and `goal` are in `unit`; `upper`: the goal is an upper bound, else a lower one.
    `below` is an additional upper bound. `peer` is the best other tool and its value, `detail` the
    range over seeds or the value of each left-out part.
    """

    test: str
    case: str
    runs: int
    reached: float
    goal: float | None
    unit: str = "%"
    upper: bool = True
    peer: str = ""
    detail: str = ""
    below: float | None = None

    @property
    def passed(self) -> bool | None:
        """Whether the goal is reached; None without a goal."""
        if self.goal is None:
            return None
        if self.below is not None and self.reached > self.below:
            return False
        return self.reached <= self.goal if self.upper else self.reached >= self.goal


def rows(directory: Path, seeds: Sequence[int] = SEEDS) -> Iterator[Row]:
    """All rows whose measurement files exist in the directory."""
    runs = {
        name: read_file(directory / f"{name}.jsonl")
        for name in FILES
        if (directory / f"{name}.jsonl").exists()
    }
    for name, pairs in runs.items():
        yield _uncalibrated(name, timed(pairs))
    if "vtrain" in runs:
        yield from _vtrain(timed(runs["vtrain"]), seeds)
    if "mosaic" in runs:
        pairs = timed(runs["mosaic"])
        yield from _held_out(
            "mosaic", list(random_splits(pairs, len(pairs) // 10, seeds)), 6.0, "none"
        )
    if "torchtitan" in runs:
        yield from _five_runs(runs["torchtitan"], seeds)
    yield from _memory(runs, seeds)


def _five_runs(pairs: list[Pair], seeds: Sequence[int]) -> Iterator[Row]:
    """Times and peaks of torchtitan's held-out runs with five calibrating ones."""
    times, peaks = [], []
    for split in random_splits(pairs, 5, seeds):
        calibration = fit(split.calibrating)
        times.append(measures.mean_error(*predict_times(timed(split.held_out), calibration)))
        weighed = [pair for pair in split.held_out if "peak_bytes" in pair[1]]
        table, peak, _ = memory(weighed, calibration)
        peaks.append(measures.mean_error(table.column("reported_peak_bytes"), peak))
    for test, errors, goal in (
        ("step time, held out", times, 6.0),
        ("peak reserved memory, held out", peaks, 5.0),
    ):
        span = f"{len(errors)} seeds, {min(errors):.1f} to {max(errors):.1f}"
        mean = float(np.mean(errors))
        case = "torchtitan, 5 calibrating"
        yield Row(test, case, len(pairs) - 5, mean, goal, peer="none", detail=span)


def _uncalibrated(name: str, pairs: list[Pair]) -> Row:
    predicted, times = predict_times(pairs)
    goal = {"korthikanti": 3.0, "b200": 5.0, "torchtitan": 12.0}.get(name, 15.0)
    peer = {"korthikanti": "Calculon 3.65", "b200": "SimuMax 5.62"}.get(name, "prototype 34 to 40")
    return Row(
        "step time, no calibration",
        name,
        len(pairs),
        measures.mean_error(predicted, times),
        goal,
        peer=peer,
    )


def _vtrain(pairs: list[Pair], seeds: Sequence[int]) -> Iterator[Row]:
    single = [pair for pair in pairs if pair[0].cluster.nodes == 1]
    multi = [pair for pair in pairs if pair[0].cluster.nodes > 1]
    one_node = list(random_splits(single, 30, seeds))
    yield from _held_out("vtrain, one node, 30 calibrating", one_node, 5.0, "vTrain 8.37")
    many_nodes = list(random_splits(multi, len(multi) // 2, seeds))
    yield from _held_out("vtrain, many nodes, half calibrating", many_nodes, 5.0, "vTrain 14.73")
    yield _left_out(
        "hidden width", pairs, lambda pair: pair[0].model.hidden, 12.0, "prototype 11 to 31"
    )
    yield _left_out(
        "node count", multi, lambda pair: pair[0].cluster.nodes, 7.0, "prototype 4 to 7"
    )
    yield _left_out("model size", multi, lambda pair: pair[0].model.name, 10.0, "prototype 6 to 23")
    yield from _ranking("vtrain, one node", one_node)
    yield from _ranking("vtrain, many nodes", many_nodes)


def _held_out(case: str, splits: Sequence[Split], goal: float, peer: str) -> Iterator[Row]:
    errors, covered, widths = [], [], []
    for split in splits:
        prediction = predict_held_out(split.calibrating, split.held_out)
        errors.append(measures.mean_error(prediction.predicted, prediction.measured))
        covered.append(measures.coverage(prediction.low, prediction.high, prediction.measured))
        widths.append(measures.median_width(prediction.low, prediction.high, prediction.predicted))
    runs, seeds = len(splits[0].held_out), f"{len(splits)} seeds"
    span = f"{seeds}, {min(errors):.1f} to {max(errors):.1f}"
    yield Row(
        "step time, held out", case, runs, float(np.mean(errors)), goal, peer=peer, detail=span
    )
    share = float(np.mean(covered))
    span = f"{seeds}, {min(covered):.0f} to {max(covered):.0f}"
    yield Row(
        "coverage of 80% intervals",
        case,
        runs,
        share,
        75.0,
        upper=False,
        peer="none",
        detail=span,
        below=85.0,
    )
    yield Row(
        "median width of 80% intervals",
        case,
        runs,
        float(np.mean(widths)),
        30.0,
        peer="none",
        detail=seeds,
    )


def _left_out(
    what: str, pairs: list[Pair], key: Callable[[Pair], int | str], goal: float, peer: str
) -> Row:
    details, errors = [], []
    for split in leave_one_out(pairs, key):
        errors.append(measures.mean_error(*predict_times(split.held_out, fit(split.calibrating))))
        details.append(f"{split.name}: {errors[-1]:.1f}")
    return Row(
        f"step time, one {what} left out",
        "vtrain",
        len(pairs),
        float(np.mean(errors)),
        goal,
        peer=peer,
        detail="; ".join(details),
    )


def _ranking(case: str, splits: Sequence[Split]) -> Iterator[Row]:
    """Ranking errors; regret is over plans of one model and batch on one cluster, all runs."""
    lost, ranks = [], []
    for split in splits:
        pairs = [*split.calibrating, *split.held_out]
        calibration = fit(split.calibrating)
        predicted, times = predict_times(pairs, calibration)
        groups = [(r.model.name, r.cluster.devices, r.plan.global_batch_size) for r, _ in pairs]
        lost.append(measures.regret(predicted, times, groups).mean())
        ranks.append(measures.spearman(*predict_times(split.held_out, calibration)))
    runs = len(splits[0].calibrating) + len(splits[0].held_out)
    span = f"{len(splits)} seeds, {min(lost):.1f} to {max(lost):.1f}"
    yield Row(
        "regret of the top plan", case, runs, float(np.mean(lost)), 2.0, peer="none", detail=span
    )
    yield Row(
        "Spearman",
        case,
        len(splits[0].held_out),
        float(np.mean(ranks)),
        0.99,
        "",
        False,
        "none",
        f"{len(splits)} seeds, {min(ranks):.4f} to {max(ranks):.4f}",
    )


def _memory(runs: dict[str, list[Pair]], seeds: Sequence[int]) -> Iterator[Row]:
    if "b200" in runs:
        table, peak, _ = memory(runs["b200"])
        yield Row(
            "peak memory, no calibration",
            "b200",
            len(peak),
            measures.mean_error(table.column("reported_peak_bytes"), peak),
            2.0,
            peer="SimuMax 0.46",
        )
    if "torchtitan" in runs:
        weighed = [pair for pair in runs["torchtitan"] if "peak_bytes" in pair[1]]
        table, peak, _ = memory(weighed)
        yield Row(
            "peak reserved memory, no calibration",
            "torchtitan",
            len(peak),
            measures.mean_error(table.column("reported_peak_bytes"), peak),
            10.0,
            peer="none",
        )
    if "bloom" in runs:
        errors = []
        for split in random_splits(runs["bloom"], 15, seeds):
            table, peak, _ = memory(split.held_out, fit(split.calibrating))
            known = np.isfinite(peak)
            errors.append(
                measures.mean_error(table.column("reported_peak_bytes")[known], peak[known])
            )
        yield Row(
            "peak memory, held out",
            "bloom, 15 calibrating",
            len(runs["bloom"]) - 15,
            float(np.mean(errors)),
            4.0,
            peer="none",
            detail=f"{len(seeds)} seeds, {min(errors):.1f} to {max(errors):.1f}",
        )
    finished = [pair for name in ("b200", "bloom") for pair in runs.get(name, [])]
    if finished:
        table, _, failed = memory(finished)
        counts = measures.fit_errors(table.column("fits").astype(bool), failed)
        yield Row(
            'false "fits"',
            "b200, bloom, no calibration",
            counts.out_of_memory,
            counts.false_fits,
            0,
            "runs",
            peer="none",
        )
        yield Row(
            "false refusals",
            "b200, bloom, no calibration",
            counts.ran,
            100 * counts.false_refusals / max(counts.ran, 1),
            5.0,
            peer="none",
        )
