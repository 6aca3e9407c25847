"""The best runs of an experiment, each by its objective's own metric. Does not read databases."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from django.utils.translation import gettext as _
from django.utils.translation import gettext_noop

Curves = Mapping[int, Sequence[float]]
_TITLES: Final = {
    "val_loss": gettext_noop("validation loss"),
    "loss": gettext_noop("loss"),
    "reward/mean": gettext_noop("reward"),
    "dpo/accuracy": gettext_noop("positive margins"),
    "val_reward/accuracy": gettext_noop("pairs ranked as labeled in validation"),
    "reward/accuracy": gettext_noop("pairs ranked as labeled"),
}
_HIGHEST: Final = frozenset(_TITLES) - {"val_loss", "loss"}
# runs are compared within a group only: its metrics, the preferred one first
_GROUPS: Final = {
    "policy": ("reward/mean",),
    "reward": ("val_reward/accuracy", "reward/accuracy"),
    "dpo": ("val_loss", "dpo/accuracy"),
    "distill": ("val_loss", "loss"),
    "text": ("val_loss", "loss"),
}


@dataclass(frozen=True)
class Best:
    """The best run of a group, and the value of its metric."""

    run: Any
    metric: str
    value: float

    @property
    def title(self) -> str:
        """Readable name of the metric."""
        return metric_title(self.metric)


def metric_title(metric: str) -> str:
    """Return the readable name of a metric that runs are ranked by."""
    return _(_TITLES[metric])


def group_of(run: Any) -> str:
    """The group of runs that a run is compared with."""
    objective = str((run.spec.get("train") or {}).get("objective"))
    if objective in ("grpo", "ppo"):
        return "policy"
    return objective if objective in _GROUPS else "text"


def best_values(
    runs: Iterable[Any], curves: Callable[[list[int], str], Curves]
) -> dict[int, tuple[str, float]]:
    """`{run: (metric, best value)}`; `curves` reads a metric of runs by their ids."""
    groups: dict[str, list[int]] = {}
    for run in runs:
        groups.setdefault(group_of(run), []).append(run.pk)
    wanted: dict[str, list[int]] = {}
    for group, ids in groups.items():
        for metric in _GROUPS[group]:
            wanted.setdefault(metric, []).extend(ids)
    read = {metric: curves(ids, metric) for metric, ids in wanted.items()}
    best: dict[int, tuple[str, float]] = {}
    for group, ids in groups.items():
        for metric in reversed(_GROUPS[group]):
            for id in ids:
                finite = [value for value in read[metric].get(id, ()) if math.isfinite(value)]
                if finite:
                    best[id] = (metric, (max if metric in _HIGHEST else min)(finite))
    return best


def best_runs(runs: Sequence[Any], values: Mapping[int, tuple[str, float]]) -> list[Best]:
    """The best run of each group, in the order of the groups' first runs.

    Of a group's runs those with the preferred metric are compared, if there are any.
    """
    groups: dict[str, list[Best]] = {}
    for run in runs:
        if run.pk in values:
            groups.setdefault(group_of(run), []).append(Best(run, *values[run.pk]))
    return [_best_of(group, entries) for group, entries in groups.items()]


def _best_of(group: str, entries: list[Best]) -> Best:
    metric = next(name for name in _GROUPS[group] if any(each.metric == name for each in entries))
    compared = [each for each in entries if each.metric == metric]
    return (max if metric in _HIGHEST else min)(compared, key=lambda each: each.value)
