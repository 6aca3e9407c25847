"""Predictions of each published source from all other sources only: leave-one-source-out.

The source's runs leave every fit: effects of common limits, device generation, framework and pair,
the best published MFU, and the spread of the intervals. Nothing else that a prediction uses was
fitted to runs; parameters start at the general defaults.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from orchestrator.planner.accuracy import measures
from orchestrator.planner.accuracy.predictions import Floats, Predicted, read_file, timed
from orchestrator.planner.calibration.hierarchy import fit_effects
from orchestrator.planner.calibration.measurements import Pair, step_times
from orchestrator.planner.model.inputs import table_of
from orchestrator.planner.model.kriging import NO_CORRECTION
from orchestrator.planner.model.parameters import PARAMETERS, UNMEASURED_NORM
from orchestrator.planner.model.priors import Effects, best_mfu_of, peer_key
from orchestrator.planner.model.terms import Table
from orchestrator.planner.model.time.intervals import Z80
from orchestrator.planner.search.open_settings import OPEN, settle

# what a source's own text does not state; its files hold a guess
NOT_STATED = {"megatron2021": OPEN}
SOURCES = ("vtrain", "mosaic", "b200", "bloom", "korthikanti", "megatron2021", "torchtitan")


@dataclass(frozen=True)
class LeftOut:
    """One source predicted from the others."""

    source: str
    runs: int
    fitted: str
    error: float
    bias: float
    coverage: float
    width: float


def read_sources(directory: Path) -> dict[str, list[Pair]]:
    """The timed runs of each source whose file exists; open settings get the best legal choice."""
    sources = {}
    for name in SOURCES:
        path = directory / f"{name}.jsonl"
        if path.exists():
            open_ = NOT_STATED.get(name, ())
            sources[name] = [
                (settle(request, open_) if open_ else request, measured)
                for request, measured in timed(read_file(path))
            ]
    return sources


def leave_sources_out(sources: Mapping[str, Sequence[Pair]]) -> list[LeftOut]:
    """Predicts each source from the others.

    An interval's spread comes from predictions of the other sources, each without the tested source
    and without itself.
    """
    errors: dict[tuple[str, str], Floats] = {}
    names = list(sources)
    for index, first in enumerate(names):
        for second in names[index + 1 :]:
            effects, peers = _fit(sources, (first, second))
            for tested, other in ((first, second), (second, first)):
                predicted = _predict(sources[tested], effects, peers)
                errors[tested, other] = np.log(predicted.predicted / predicted.measured)
    results = []
    for name in names:
        effects, peers = _fit(sources, (name,))
        spread = error_spread([errors[other, name] for other in names if other != name])
        result = _predict(sources[name], effects, peers, spread)
        log = np.log(result.predicted / result.measured)
        results.append(
            LeftOut(
                name,
                len(log),
                ", ".join(other for other in names if other != name),
                measures.mean_error(result.predicted, result.measured),
                float(100 * (np.exp(log.mean()) - 1)),
                measures.coverage(result.low, result.high, result.measured),
                measures.median_width(result.low, result.high, result.predicted),
            )
        )
    return results


@dataclass(frozen=True)
class Errors:
    """Log errors of each source predicted from all others, and their common spread."""

    by_source: dict[str, Floats]
    spread: float


def left_out_errors(sources: Mapping[str, Sequence[Pair]]) -> Errors:
    """The errors that the intervals of unmeasured pairs use."""
    errors = {}
    for name, pairs in sources.items():
        result = _predict(pairs, *_fit(sources, (name,)))
        errors[name] = np.log(result.predicted / result.measured)
    return Errors(errors, error_spread(list(errors.values())))


def error_spread(errors: Sequence[Floats]) -> float:
    """The log spread whose 80% interval holds 80% of the errors; sources weigh the same."""
    values = np.concatenate([np.abs(each) for each in errors])
    weights = np.concatenate([np.full(each.size, 1 / each.size) for each in errors])
    order = values.argsort()
    share = np.cumsum(weights[order]) / weights.sum()
    return float(values[order][np.searchsorted(share, 0.8)] / Z80)


def best_mfu(sources: Mapping[str, Sequence[Pair]]) -> dict[str, float]:
    """The best measured MFU (6N + 12Lhs) of each device and precision."""
    best: dict[str, float] = {}
    for pairs in sources.values():
        requests = [request for request, _ in pairs]
        table = _table(pairs, {})
        rate = table.column("peer_flops") / table.column("devices") / step_times(pairs, table)
        for request, value in zip(requests, rate / table.column("peak_flops"), strict=True):
            key = peer_key(request.entry, request.plan.precision)
            best[key] = max(best.get(key, 0.0), float(value))
    return best


def _fit(
    sources: Mapping[str, Sequence[Pair]], without: tuple[str, ...]
) -> tuple[Effects, dict[str, float]]:
    rest = {name: pairs for name, pairs in sources.items() if name not in without}
    return fit_effects(rest), best_mfu(rest)


def _predict(
    pairs: Sequence[Pair], effects: Effects, peers: Mapping[str, float], spread: float = 0.0
) -> Predicted:
    values = [effects.values(request.framework.name, request.entry) for request, _ in pairs]
    names = [name for name in PARAMETERS if name in values[0]]
    columns: dict[str, Any] = {
        name: np.clip([row[name] for row in values], PARAMETERS[name].low, PARAMETERS[name].high)
        for name in names
    }
    columns["peer_norm"] = np.asarray(UNMEASURED_NORM)
    columns["best_peer_mfu"] = np.array(
        [best_mfu_of(peers, request.entry, request.plan.precision) for request, _ in pairs]
    )
    table = _table(pairs, columns)
    time = table.column("step_time_s")
    factor = np.exp(Z80 * np.hypot(spread, [request.open_spread for request, _ in pairs]))
    return Predicted(time, time / factor, time * factor, step_times(pairs, table))


def _table(pairs: Sequence[Pair], columns: Mapping[str, Any]) -> Table:
    start = {name: np.asarray(each.default) for name, each in PARAMETERS.items()}
    return table_of([request for request, _ in pairs], {**NO_CORRECTION, **start, **columns})
