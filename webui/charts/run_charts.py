"""Selects the charts of a run page by its metric names. Pure functions."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Final

from django.utils.translation import gettext
from django.utils.translation import gettext_noop as _

from webui.charts import reinforcement_panels
from webui.charts.panel import Line, Panel
from webui.charts.produce_panels import PRODUCE, PRODUCE_SPEED, PRODUCED
from webui.charts.serving_panels import (
    ACCEPTANCE,
    BLOCKS,
    COMPLETED,
    FIRST_TOKEN,
    HOST_TIME,
    PREEMPTED,
    REQUESTS,
    SCORE_TIME,
    SCORES,
    SERVED,
    SHARES,
    SPECULATION,
    SWAPPED,
    TIME_PER_TOKEN,
    TOKENS,
)
from webui.charts.training_panels import (
    ALLOCATOR,
    ANSWER_LOGPS,
    AUXILIARY,
    BUBBLE,
    CALIBRATION,
    DIVERGENCE,
    GRAD_NORM,
    LEARNING_RATE,
    LOSS,
    LOSS_SCALE,
    MACHINE_CPU,
    MACHINE_MEMORY,
    MEMORY,
    MEMORY_TITLES,
    MFU,
    NETWORK,
    OFFLOADED,
    ON_POLICY,
    PERPLEXITY,
    POWER,
    PREFERENCE_ACCURACY,
    PREFERENCE_MARGIN,
    REWARD_ACCURACY,
    REWARD_MARGIN,
    SENT,
    SKIPPED_UPDATES,
    STEP_SPLIT,
    STEP_TIME,
    TEMPERATURE,
    TFLOPS,
    THROUGHPUT,
    TRAINED_TOKENS,
    UTILIZATION,
    VIOLATION,
)
from workers.contracts.catalog.metrics import loss_unit, metric_unit

EMPTY: Final[Mapping[str, Any]] = MappingProxyType({})
MOST_PANELS: Final = 18  # charts of custom metrics per page

SUMMARY: Final = (
    LOSS,
    PREFERENCE_MARGIN,
    PREFERENCE_ACCURACY,
    ANSWER_LOGPS,
    REWARD_MARGIN,
    REWARD_ACCURACY,
    CALIBRATION,
    DIVERGENCE,
    ON_POLICY,
    *reinforcement_panels.PANELS,
    THROUGHPUT,
    MFU,
    GRAD_NORM,
    LEARNING_RATE,
    STEP_TIME,
    MEMORY,
    LOSS_SCALE,
    PERPLEXITY,
    TRAINED_TOKENS,
    SERVED,
    FIRST_TOKEN,
    TIME_PER_TOKEN,
    SCORES,
    SCORE_TIME,
    REQUESTS,
    BLOCKS,
    HOST_TIME,
    SHARES,
    TOKENS,
    SPECULATION,
    ACCEPTANCE,
    PREEMPTED,
    SWAPPED,
    COMPLETED,
    *PRODUCE,
)
# before the first point, by kind or "score"
ANSWERING: Final = {
    "serve": (SERVED, FIRST_TOKEN, TIME_PER_TOKEN, REQUESTS, BLOCKS),
    "score": (SCORES, SCORE_TIME, REQUESTS, BLOCKS),  # a serve run of a reward model
    "generate": (SERVED, REQUESTS, BLOCKS),
    "evaluate": (SERVED, COMPLETED),
    "produce": (PRODUCED, PRODUCE_SPEED),
}
# before the first point
TRAINING: Final = (LOSS, THROUGHPUT, MFU, GRAD_NORM, LEARNING_RATE, STEP_TIME, MEMORY)
PERFORMANCE: Final = (STEP_SPLIT, STEP_TIME, THROUGHPUT, MFU, TFLOPS, SENT, BUBBLE)
NUMERICS: Final = (LOSS_SCALE, SKIPPED_UPDATES, GRAD_NORM, VIOLATION, AUXILIARY)
SYSTEM: Final = (UTILIZATION, POWER, TEMPERATURE, MACHINE_CPU, MACHINE_MEMORY, NETWORK)
_HUES: Final = ("loss", "loss-2", "throughput", "time-2", "mfu", "grad", "event", "other-series")
_PER_DEVICE: Final = (
    ("utilization", _("Utilization of each device"), "fraction"),
    ("memory_bytes", _("Memory of each device"), "bytes"),
)
KNOWN: Final = frozenset(
    line.name
    for panel in (*SUMMARY, *PERFORMANCE, *NUMERICS, *SYSTEM, ALLOCATOR, OFFLOADED)
    for line in panel.series
) | {
    "comm/arrival_skew_s",
    "memory/capacity_bytes",
    "produce/candidates",
    *reinforcement_panels.SHOWN,
}
# metric families drawn together: multi-line charts, stacks and heat maps
FAMILIES: Final = (
    "loss/",
    "memory/",
    "time/",
    "comm/",
    "grad_norm/",
    "weight_norm/",
    "grad_underflow/",
    "moe/load/",
    "reward/bin_",
    "val_reward/bin_",
    "device/",
    "system/",
    "produce/filtered/",
)
QUIET: Final = FAMILIES[1:-1]  # families that other tabs draw
# known metrics that other tabs draw
ELSEWHERE: Final = KNOWN - {line.name for panel in SUMMARY for line in panel.series}


def summary(
    names: Collection[str], kind: str, spec: Mapping[str, Any] = EMPTY, search: str = ""
) -> list[Panel]:
    """Return the summary's charts: known metrics in fixed order, then custom metrics.

    The unit of losses is that of the spec's objective. `search` selects custom metrics.
    """
    if not names:
        return [_with_unit(panel, spec) for panel in ANSWERING.get(kind, TRAINING)]
    # memory of an inference engine is constant; its stack would only fill the page
    chosen = [
        _with_unit(panel, spec)
        for panel in _having(SUMMARY, names)
        if kind not in ANSWERING or panel.id != "memory"
    ]
    if reinforcement_panels.is_policy(names):
        components = set(reinforcement_panels.component_names(names))
        charts = reinforcement_panels.rewards(names)
        return charts + chosen + custom((each for each in names if each not in components), search)
    if sources := _family(names, "loss/"):
        chosen.insert(1, Panel("loss_sources", _("Loss by source"), loss_unit(spec), sources))
    if filters := _family(names, "produce/filtered/"):
        chosen.insert(1, Panel("filtered", _("Rejected by filter"), "answers", filters, zero=True))
    return chosen + custom(names, search)


def _with_unit(panel: Panel, spec: Mapping[str, Any]) -> Panel:
    if panel.id != "loss":
        return panel
    train = spec.get("train")
    distills = isinstance(train, Mapping) and train.get("objective") == "distill"
    title = _("Divergence from the teacher") if distills else panel.title
    return replace(panel, unit=loss_unit(spec), title=title)


def _family(names: Iterable[str], prefix: str) -> tuple[Line, ...]:
    """A line for each name with this prefix, for at most 16 of them, spread over all."""
    members = sorted(name for name in names if name.startswith(prefix))
    members = members[:: -(-len(members) // 16)] if members else members
    return tuple(
        Line(name, name.removeprefix(prefix), _HUES[i % len(_HUES)])
        for i, name in enumerate(members)
    )


def custom(names: Iterable[str], search: str = "") -> list[Panel]:
    """Return one chart per custom metric whose name contains `search`, at most `MOST_PANELS`."""
    unknown = _custom_names(names, search)
    return [
        Panel(
            f"custom-{i}",
            name,
            metric_unit(name),
            (Line(name, name.rsplit("/", 1)[-1], "other-series"),),
        )
        for i, name in enumerate(unknown[:MOST_PANELS])
    ]


def performance(names: Collection[str]) -> list[Panel]:
    """Return performance charts; the step time breakdown comes first if it is reported."""
    if "time/forward_s" in names:
        return _having(PERFORMANCE, set(names) - {"data_time_s"})  # part of the breakdown
    shown = [panel for panel in _having(PERFORMANCE, names) if panel.id != "step_split"]
    return [_wide(panel) for panel in shown] or [_wide(STEP_TIME), THROUGHPUT]


def numerics(names: Collection[str]) -> list[Panel]:
    """Return charts of loss scale, gradients and expert balance; the first of 1 or 4 is wide."""
    shown = _having(NUMERICS, names)
    return [replace(panel, wide=len(shown) in (1, 4) and panel is shown[0]) for panel in shown]


def _wide(panel: Panel) -> Panel:
    return replace(panel, wide=True) if panel.id == "step_time" else panel


def memory(names: Collection[str], rank: int | None) -> list[Panel]:
    """Return memory charts of one rank; None selects the lowest reporting rank."""
    charts = (replace(MEMORY, wide=True), replace(ALLOCATOR, wide=True), OFFLOADED)
    shown = _having(charts, names) or [replace(MEMORY, wide=True)]
    return [replace(panel, rank=rank) for panel in shown]


def memory_title(part: str) -> str:
    """Return the readable name of a memory category."""
    return gettext(MEMORY_TITLES[part])


def system(names: Collection[str]) -> list[Panel]:
    """Return charts of devices and their machine; a line per device if there are several."""
    return _having(SYSTEM, names) + [
        Panel(f"each_{name}", title, unit, lines, zero=True)
        for name, title, unit in _PER_DEVICE
        if (lines := _per_device(names, name))
    ]


def _per_device(names: Iterable[str], metric: str) -> tuple[Line, ...]:
    """A line for `device/INDEX/metric` of each of at most 16 devices."""
    indices = sorted(
        int(parts[1])
        for name in names
        if len(parts := name.split("/")) == 3
        and (parts[0], parts[2]) == ("device", metric)
        and parts[1].isdecimal()
    )
    return tuple(
        Line(f"device/{index}/{metric}", str(index), _HUES[place % len(_HUES)])
        for place, index in enumerate(indices[:16])
    )


@dataclass(frozen=True, slots=True)
class CustomSearch:
    """A search in a run's custom metrics: how many there are, match and have charts."""

    text: str
    total: int
    matching: int
    shown: int


def custom_search(names: Collection[str], search: str = "") -> CustomSearch | None:
    """Return the search; None if all custom metrics have charts without one."""
    total = len(_custom_names(names, ""))
    matching = len(_custom_names(names, search))
    if total <= MOST_PANELS and not search:
        return None
    return CustomSearch(search, total, matching, min(matching, MOST_PANELS))


def _custom_names(names: Iterable[str], search: str) -> list[str]:
    text = search.casefold()
    return sorted(
        name
        for name in names
        if name not in KNOWN and not name.startswith(FAMILIES) and text in name.casefold()
    )


def _having(panels: Iterable[Panel], names: Collection[str]) -> list[Panel]:
    """Panels with at least one of the metrics, without their other series.

    The loss chart always keeps validation, which may start later.
    """
    shown = []
    for panel in panels:
        lines = tuple(
            line
            for line in panel.series
            if line.name in names or (panel.id == "loss" and line.name == "val_loss")
        )
        if any(line.name in names for line in lines):
            shown.append(replace(panel, series=lines))
    return shown
