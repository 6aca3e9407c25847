"""Selects the charts of a run page by its metric names. Pure functions.

Titles and labels are marked here and translated by `Panel.to_dict`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from django.utils.translation import gettext
from django.utils.translation import gettext_noop as _

from workers.contracts.catalog.metrics import metric_unit

MEMORY_PARTS: Final = (
    "params",
    "grads",
    "optimizer",
    "activations",
    "kv_cache",
    "buffers",
    "other",
)
_MEMORY_TITLES: Final = {
    "params": _("parameters"),
    "grads": _("gradients"),
    "optimizer": _("optimizer states"),
    "activations": _("activations"),
    "kv_cache": _("KV cache"),
    "buffers": _("buffers"),
    "other": _("other"),
}
MOST_PANELS: Final = 18  # charts of custom metrics per page


@dataclass(frozen=True, slots=True)
class Line:
    """One series of a chart; `hue` names a colour of tokens.css, `dash` is Plotly's."""

    name: str
    label: str
    hue: str
    dash: str = ""


@dataclass(frozen=True, slots=True)
class Level:
    """A predicted value: a dashed line across the chart."""

    label: str
    hue: str
    value: float


@dataclass(frozen=True, slots=True)
class Panel:
    """A chart: `kind` is lines or stack; `zero`: y includes 0; `log`: starts logarithmic.

    `empty` is the text shown without data.
    """

    id: str
    title: str
    unit: str
    series: tuple[Line, ...]
    kind: str = "lines"
    zero: bool = False
    log: bool = False
    wide: bool = False
    rank: int | None = None
    empty: str = _("No data yet: points appear here as the run logs them.")
    levels: tuple[Level, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the chart as the page's script reads it, translated."""
        panel = replace(
            self,
            title=gettext(self.title),
            empty=gettext(self.empty),
            series=tuple(replace(line, label=gettext(line.label)) for line in self.series),
        )
        return asdict(panel)


LOSS = Panel(
    "loss",
    _("Loss"),
    "nats/token",
    (Line("loss", _("training"), "loss"), Line("val_loss", _("validation"), "loss-2", "dash")),
    wide=True,
)
THROUGHPUT = Panel(
    "throughput",
    _("Throughput"),
    "tokens/s",
    (Line("tokens_per_s", _("tokens/s"), "throughput"),),
    zero=True,
)
MFU = Panel(
    "mfu",
    _("Model FLOPs utilization"),
    "fraction",
    (Line("mfu", _("MFU"), "mfu"), Line("hfu", _("HFU"), "hfu", "dot")),
    zero=True,
)
GRAD_NORM = Panel(
    "grad_norm",
    _("Gradient norm"),
    "",
    (Line("grad_norm", _("before clipping"), "grad"),),
    zero=True,
)
LEARNING_RATE = Panel(
    "lr", _("Learning rate"), "", (Line("lr", _("learning rate"), "lr"),), zero=True
)
STEP_SPLIT = Panel(
    "step_split",
    _("Step time breakdown"),
    "s",
    (
        Line("time/data_s", _("data"), "split-data"),
        Line("time/forward_s", _("forward"), "split-forward"),
        Line("time/backward_s", _("backward"), "split-backward"),
        Line("comm/exposed_s", _("exposed communication"), "split-exposed"),
        Line("time/optimizer_s", _("optimizer"), "split-optimizer"),
        Line("time/other_s", _("other"), "split-other"),
    ),
    kind="stack",
    zero=True,
    wide=True,
)
SENT = Panel(
    "sent",
    _("Communication volume"),
    "bytes",
    (
        Line("comm/bytes", _("total"), "other-series", "dot"),
        Line("comm/all_reduce_bytes", _("all-reduce"), "loss"),
        Line("comm/all_gather_bytes", _("all-gather"), "throughput"),
        Line("comm/reduce_scatter_bytes", _("reduce-scatter"), "grad"),
        Line("comm/all_to_all_bytes", _("all-to-all"), "loss-2"),
        Line("comm/broadcast_bytes", _("broadcast"), "mfu"),
        Line("comm/send_bytes", _("send"), "time-2"),
    ),
    zero=True,
)
STEP_TIME = Panel(
    "step_time",
    _("Step time"),
    "s",
    (
        Line("step_time_s", _("full step"), "time"),
        Line("data_time_s", _("data loading"), "time-2"),
        Line("comm/exposed_s", _("exposed communication"), "fail"),
    ),
    zero=True,
)
MEMORY = Panel(
    "memory",
    _("Memory by category"),
    "bytes",
    tuple(
        Line(f"memory/{part}_bytes", _MEMORY_TITLES[part], f"mem-{part}") for part in MEMORY_PARTS
    ),
    kind="stack",
    zero=True,
)
ALLOCATOR = Panel(
    "allocator",
    _("Allocator"),
    "bytes",
    (
        Line("memory/allocated_bytes", _("allocated"), "mem-params"),
        Line("memory/reserved_bytes", _("reserved"), "mem-grads"),
    ),
    zero=True,
)
OFFLOADED = Panel(
    "offloaded",
    _("Offloaded memory"),
    "bytes",
    (Line("memory/offloaded_bytes", _("offloaded"), "mem-offloaded"),),
    zero=True,
)
TFLOPS = Panel(
    "tflops",
    _("Model TFLOP/s per device"),
    "TFLOP/s",
    (Line("tflops_per_device", _("per device"), "mfu"),),
    zero=True,
)
BUBBLE = Panel(
    "bubble",
    _("Pipeline bubble"),
    "fraction",
    (Line("pipeline/bubble_fraction", _("bubble"), "time-2"),),
    zero=True,
)
LOSS_SCALE = Panel(
    "loss_scale", _("Loss scale"), "", (Line("loss_scale", _("loss scale"), "event"),), log=True
)
VIOLATION = Panel(
    "max_violation",
    _("Expert load imbalance"),
    "",
    (Line("moe/max_violation", _("max load / mean load - 1"), "event"),),
    zero=True,
)
AUXILIARY = Panel(
    "aux_loss",
    _("Auxiliary loss"),
    "",
    (Line("moe/aux_loss", _("sum over layers"), "loss-2"),),
    zero=True,
)
PERPLEXITY = Panel(
    "val_perplexity",
    _("Validation perplexity"),
    "",
    (Line("val_perplexity", _("validation"), "loss-2"),),
)
UTILIZATION = Panel(
    "utilization",
    _("Device utilization"),
    "fraction",
    (Line("device/utilization", _("utilization"), "throughput"),),
    zero=True,
)
POWER = Panel("power", _("Power"), "W", (Line("device/power_w", _("power"), "event"),), zero=True)
TEMPERATURE = Panel(
    "temperature", _("Temperature"), "°C", (Line("device/temperature_c", _("temperature"), "fail"),)
)
FIRST_TOKEN = Panel(
    "ttft",
    _("Time to first token"),
    "s",
    (Line("inference/ttft_s", _("time to first token"), "time"),),
    zero=True,
)
TIME_PER_TOKEN = Panel(
    "tpot",
    _("Time per output token"),
    "s",
    (Line("inference/tpot_s", _("per token"), "time-2"),),
    zero=True,
)
SERVED = Panel(
    "served",
    _("Generated tokens"),
    "tokens/s",
    (Line("inference/tokens_per_s", _("tokens/s"), "throughput"),),
    zero=True,
)
REQUESTS = Panel(
    "requests",
    _("Requests"),
    "requests",
    (
        Line("inference/running", _("running"), "throughput"),
        Line("inference/waiting", _("waiting"), "event"),
    ),
    zero=True,
)
BLOCKS = Panel(
    "blocks",
    _("KV cache blocks used"),
    "blocks",
    (Line("inference/kv_blocks_used", _("blocks"), "mem-kv_cache"),),
    zero=True,
)

SHARES = Panel(
    "shares",
    _("Prefix cache hits and prefill share"),
    "fraction",
    (
        Line("inference/prefix_hit_rate", _("prefix cache hit rate"), "mfu"),
        Line("inference/prefill_share", _("prefill share of tokens"), "split-forward", "dash"),
    ),
    zero=True,
)
TOKENS = Panel(
    "tokens",
    _("Prompt and output tokens"),
    "tokens",
    (
        Line("inference/prompt_tokens", _("prompt"), "split-forward"),
        Line("inference/shared_tokens", _("cached prompt"), "mfu", "dash"),
        Line("inference/new_tokens", _("output"), "throughput"),
    ),
    zero=True,
)
PREEMPTED = Panel(
    "preempted",
    _("Preempted requests"),
    "requests",
    (Line("inference/preemptions", _("requests"), "event"),),
    zero=True,
)
SWAPPED = Panel(
    "swapped",
    _("Swapped KV cache blocks"),
    "blocks",
    (Line("inference/swaps", _("blocks"), "time-2"),),
    zero=True,
)
SPECULATION = Panel(
    "speculation",
    _("Tokens per step with speculation"),
    "tokens",
    (Line("inference/accepted_per_step", _("tokens per step"), "throughput"),),
    zero=True,
)
ACCEPTANCE = Panel(
    "acceptance",
    _("Draft tokens accepted"),
    "fraction",
    (Line("inference/acceptance", _("accepted"), "mfu"),),
    zero=True,
)
COMPLETED = Panel(
    "answered",
    _("Completed examples"),
    "answers",
    (Line("inference/answered", _("examples"), "throughput"),),
    zero=True,
)

SUMMARY: Final = (
    LOSS,
    THROUGHPUT,
    MFU,
    GRAD_NORM,
    LEARNING_RATE,
    STEP_TIME,
    MEMORY,
    LOSS_SCALE,
    PERPLEXITY,
    SERVED,
    FIRST_TOKEN,
    TIME_PER_TOKEN,
    REQUESTS,
    BLOCKS,
    SHARES,
    TOKENS,
    SPECULATION,
    ACCEPTANCE,
    PREEMPTED,
    SWAPPED,
    COMPLETED,
)
# before the first point, by kind
ANSWERING: Final = {
    "serve": (SERVED, FIRST_TOKEN, TIME_PER_TOKEN, REQUESTS, BLOCKS),
    "generate": (SERVED, REQUESTS, BLOCKS),
    "evaluate": (SERVED, COMPLETED),
}
# before the first point
TRAINING: Final = (LOSS, THROUGHPUT, MFU, GRAD_NORM, LEARNING_RATE, STEP_TIME, MEMORY)
PERFORMANCE: Final = (STEP_SPLIT, STEP_TIME, THROUGHPUT, MFU, TFLOPS, SENT, BUBBLE)
NUMERICS: Final = (LOSS_SCALE, GRAD_NORM, VIOLATION, AUXILIARY)
SYSTEM: Final = (UTILIZATION, POWER, TEMPERATURE)
KNOWN: Final = frozenset(
    line.name
    for panel in (*SUMMARY, *PERFORMANCE, *NUMERICS, *SYSTEM, ALLOCATOR, OFFLOADED)
    for line in panel.series
) | {"comm/arrival_skew_s", "memory/capacity_bytes"}
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
)
QUIET: Final = FAMILIES[1:]  # families that other tabs draw
# known metrics that other tabs draw
ELSEWHERE: Final = KNOWN - {line.name for panel in SUMMARY for line in panel.series}


def summary(names: Collection[str], kind: str) -> list[Panel]:
    """Return the summary's charts: known metrics in fixed order, then custom metrics."""
    if not names:
        return list(ANSWERING.get(kind, TRAINING))
    # memory of an inference engine is constant; its stack would only fill the page
    chosen = [
        panel for panel in _having(SUMMARY, names) if kind not in ANSWERING or panel.id != "memory"
    ]
    if sources := _family(names, "loss/"):
        chosen.insert(1, Panel("loss_sources", _("Loss by source"), "nats/token", sources))
    return chosen + custom(names)


def _family(names: Iterable[str], prefix: str) -> tuple[Line, ...]:
    """A line for each name with this prefix, for at most 16 of them, spread over all."""
    members = sorted(name for name in names if name.startswith(prefix))
    members = members[:: -(-len(members) // 16)] if members else members
    hues = ("loss", "loss-2", "throughput", "time-2", "mfu", "grad", "event", "other-series")
    return tuple(
        Line(name, name.removeprefix(prefix), hues[i % len(hues)]) for i, name in enumerate(members)
    )


def custom(names: Iterable[str]) -> list[Panel]:
    """Return one chart per custom metric, at most `MOST_PANELS`."""
    unknown = sorted(name for name in names if name not in KNOWN and not name.startswith(FAMILIES))
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
    return gettext(_MEMORY_TITLES[part])


def system(names: Collection[str]) -> list[Panel]:
    """Return charts of device metrics."""
    return _having(SYSTEM, names)


def unshown(names: Iterable[str]) -> int:
    """Return how many custom metrics have no chart."""
    return max(
        0,
        len([name for name in names if name not in KNOWN and not name.startswith(FAMILIES)])
        - MOST_PANELS,
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
