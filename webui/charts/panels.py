"""Which charts a run's page shows, by the names of its metrics. Pure; knows no data and no page."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from workers.contracts.catalog.metrics import unit_of

MEMORY_PARTS: Final = (
    "params",
    "grads",
    "optimizer",
    "activations",
    "kv_cache",
    "buffers",
    "other",
)
MOST_PANELS: Final = 18  # charts of metrics that Orrery does not know, on one page


@dataclass(frozen=True, slots=True)
class Line:
    """One series of a chart; `hue` names a colour of tokens.css, `dash` is Plotly's."""

    name: str
    label: str
    hue: str
    dash: str = ""


@dataclass(frozen=True, slots=True)
class Level:
    """What was predicted: a dashed line across the chart."""

    label: str
    hue: str
    value: float


@dataclass(frozen=True, slots=True)
class Panel:
    """A chart: `kind` lines or stack; `zero`: the y axis starts there; `log`: it begins
    logarithmic; `empty`: what to
    say without data."""

    id: str
    title: str
    unit: str
    series: tuple[Line, ...]
    kind: str = "lines"
    zero: bool = False
    log: bool = False
    wide: bool = False
    rank: int | None = None
    empty: str = "No points yet: they appear here as the run logs them."
    levels: tuple[Level, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


LOSS = Panel(
    "loss",
    "Loss",
    "nats/token",
    (Line("loss", "training", "loss"), Line("val_loss", "validation", "loss-2", "dash")),
    wide=True,
)
THROUGHPUT = Panel(
    "throughput",
    "Throughput",
    "tokens/s",
    (Line("tokens_per_s", "tokens/s", "throughput"),),
    zero=True,
)
MFU = Panel(
    "mfu",
    "Model FLOPs utilisation",
    "fraction",
    (Line("mfu", "MFU", "mfu"), Line("hfu", "HFU", "hfu", "dot")),
    zero=True,
)
GRAD_NORM = Panel(
    "grad_norm", "Gradient norm", "", (Line("grad_norm", "before clipping", "grad"),), zero=True
)
LEARNING_RATE = Panel("lr", "Learning rate", "", (Line("lr", "learning rate", "lr"),), zero=True)
STEP_SPLIT = Panel(
    "step_split",
    "Where a step's time goes",
    "s",
    (
        Line("time/data_s", "data", "split-data"),
        Line("time/forward_s", "forward", "split-forward"),
        Line("time/backward_s", "backward", "split-backward"),
        Line("comm/exposed_s", "exposed communication", "split-exposed"),
        Line("time/optimizer_s", "optimizer", "split-optimizer"),
        Line("time/other_s", "other", "split-other"),
    ),
    kind="stack",
    zero=True,
    wide=True,
)
SENT = Panel(
    "sent",
    "Bytes handed to collectives",
    "bytes",
    (
        Line("comm/bytes", "all", "other-series", "dot"),
        Line("comm/all_reduce_bytes", "all-reduce", "loss"),
        Line("comm/all_gather_bytes", "all-gather", "throughput"),
        Line("comm/reduce_scatter_bytes", "reduce-scatter", "grad"),
        Line("comm/all_to_all_bytes", "all-to-all", "loss-2"),
        Line("comm/broadcast_bytes", "broadcast", "mfu"),
        Line("comm/send_bytes", "send", "time-2"),
    ),
    zero=True,
)
STEP_TIME = Panel(
    "step_time",
    "Step time",
    "s",
    (
        Line("step_time_s", "whole step", "time"),
        Line("data_time_s", "waiting for data", "time-2"),
        Line("comm/exposed_s", "exposed communication", "fail"),
    ),
    zero=True,
)
MEMORY = Panel(
    "memory",
    "Memory held",
    "bytes",
    tuple(
        Line(f"memory/{part}_bytes", part.replace("kv_cache", "KV cache"), f"mem-{part}")
        for part in MEMORY_PARTS
    ),
    kind="stack",
    zero=True,
)
ALLOCATOR = Panel(
    "allocator",
    "Allocated and reserved",
    "bytes",
    (
        Line("memory/allocated_bytes", "allocated", "mem-params"),
        Line("memory/reserved_bytes", "reserved", "mem-grads"),
    ),
    zero=True,
)
OFFLOADED = Panel(
    "offloaded",
    "Offloaded, outside the device",
    "bytes",
    (Line("memory/offloaded_bytes", "offloaded", "mem-offloaded"),),
    zero=True,
)
TFLOPS = Panel(
    "tflops",
    "Model TFLOP/s per device",
    "TFLOP/s",
    (Line("tflops_per_device", "per device", "mfu"),),
    zero=True,
)
BUBBLE = Panel(
    "bubble",
    "Pipeline bubble",
    "fraction",
    (Line("pipeline/bubble_fraction", "bubble", "time-2"),),
    zero=True,
)
LOSS_SCALE = Panel(
    "loss_scale", "Loss scale", "", (Line("loss_scale", "loss scale", "event"),), log=True
)
VIOLATION = Panel(
    "max_violation",
    "Largest expert load above even",
    "",
    (Line("moe/max_violation", "largest load over the mean, minus 1", "event"),),
    zero=True,
)
AUXILIARY = Panel(
    "aux_loss",
    "Auxiliary loss",
    "",
    (Line("moe/aux_loss", "summed over layers", "loss-2"),),
    zero=True,
)
PERPLEXITY = Panel(
    "val_perplexity", "Validation perplexity", "", (Line("val_perplexity", "validation", "loss-2"),)
)
UTILISATION = Panel(
    "utilisation",
    "Device utilisation",
    "fraction",
    (Line("device/utilization", "busy", "throughput"),),
    zero=True,
)
POWER = Panel("power", "Power", "W", (Line("device/power_w", "power", "event"),), zero=True)
TEMPERATURE = Panel(
    "temperature", "Temperature", "°C", (Line("device/temperature_c", "temperature", "fail"),)
)
FIRST_TOKEN = Panel(
    "ttft",
    "Time to first token",
    "s",
    (Line("inference/ttft_s", "first token", "time"),),
    zero=True,
)
PACE = Panel(
    "tpot", "Time per token", "s", (Line("inference/tpot_s", "per token", "time-2"),), zero=True
)
SERVED = Panel(
    "served",
    "Tokens generated",
    "tokens/s",
    (Line("inference/tokens_per_s", "tokens/s", "throughput"),),
    zero=True,
)
REQUESTS = Panel(
    "requests",
    "Requests",
    "requests",
    (
        Line("inference/running", "running", "throughput"),
        Line("inference/waiting", "waiting", "event"),
    ),
    zero=True,
)
BLOCKS = Panel(
    "blocks",
    "KV blocks used",
    "blocks",
    (Line("inference/kv_blocks_used", "blocks", "mem-kv_cache"),),
    zero=True,
)

SHARES = Panel(
    "shares",
    "Prompts found in the cache, and the work that was prompts",
    "fraction",
    (
        Line("inference/prefix_hit_rate", "prompt tokens found", "mfu"),
        Line("inference/prefill_share", "prefill of all tokens", "split-forward", "dash"),
    ),
    zero=True,
)
READ = Panel(
    "read",
    "Tokens read and written",
    "tokens",
    (
        Line("inference/prompt_tokens", "prompt", "split-forward"),
        Line("inference/shared_tokens", "of it shared", "mfu", "dash"),
        Line("inference/new_tokens", "new", "throughput"),
    ),
    zero=True,
)
PUT_BACK = Panel(
    "put_back",
    "Put back to make room",
    "requests",
    (Line("inference/preemptions", "requests", "event"),),
    zero=True,
)
SWAPPED = Panel(
    "swapped", "Blocks swapped", "blocks", (Line("inference/swaps", "blocks", "time-2"),), zero=True
)
SPECULATION = Panel(
    "speculation",
    "Tokens a step by speculation",
    "tokens",
    (Line("inference/accepted_per_step", "tokens a step", "throughput"),),
    zero=True,
)
ACCEPTANCE = Panel(
    "acceptance",
    "Draft tokens accepted",
    "fraction",
    (Line("inference/acceptance", "accepted", "mfu"),),
    zero=True,
)
JUDGED = Panel(
    "answered",
    "Lines done",
    "answers",
    (Line("inference/answered", "lines", "throughput"),),
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
    PACE,
    REQUESTS,
    BLOCKS,
    SHARES,
    READ,
    SPECULATION,
    ACCEPTANCE,
    PUT_BACK,
    SWAPPED,
    JUDGED,
)
# before the first point, by kind
ANSWERING: Final = {
    "serve": (SERVED, FIRST_TOKEN, PACE, REQUESTS, BLOCKS),
    "generate": (SERVED, REQUESTS, BLOCKS),
    "evaluate": (SERVED, JUDGED),
}
# before the first point
TRAINING: Final = (LOSS, THROUGHPUT, MFU, GRAD_NORM, LEARNING_RATE, STEP_TIME, MEMORY)
PERFORMANCE: Final = (STEP_SPLIT, STEP_TIME, THROUGHPUT, MFU, TFLOPS, SENT, BUBBLE)
NUMERICS: Final = (LOSS_SCALE, GRAD_NORM, VIOLATION, AUXILIARY)
SYSTEM: Final = (UTILISATION, POWER, TEMPERATURE)
KNOWN: Final = frozenset(
    line.name
    for panel in (*SUMMARY, *PERFORMANCE, *NUMERICS, *SYSTEM, ALLOCATOR, OFFLOADED)
    for line in panel.series
) | {"comm/arrival_skew_s", "memory/capacity_bytes"}
# of many curves, drawn together: charts of many lines, stacks and heat maps
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
QUIET: Final = FAMILIES[1:]  # those of them that other tabs draw
# of the known ones, those that other tabs draw
ELSEWHERE: Final = KNOWN - {line.name for panel in SUMMARY for line in panel.series}


def summary(names: Collection[str], kind: str) -> list[Panel]:
    """The summary's charts: known metrics in a steady order, then by source, then those of the
    program's own.
    """
    if not names:
        return list(ANSWERING.get(kind, TRAINING))
    # an engine's memory is counted once, and a stack of constants would lead the page
    chosen = [
        panel for panel in _having(SUMMARY, names) if kind not in ANSWERING or panel.id != "memory"
    ]
    if sources := _family(names, "loss/"):
        chosen.insert(1, Panel("loss_sources", "Loss by source", "nats/token", sources))
    return chosen + own(names)


def _family(names: Iterable[str], prefix: str) -> tuple[Line, ...]:
    """A line for each name with this prefix, for at most 16 of them, spread over all."""
    found = sorted(name for name in names if name.startswith(prefix))
    found = found[:: -(-len(found) // 16)] if found else found
    hues = ("loss", "loss-2", "throughput", "time-2", "mfu", "grad", "event", "other-series")
    return tuple(
        Line(name, name.removeprefix(prefix), hues[i % len(hues)]) for i, name in enumerate(found)
    )


def own(names: Iterable[str]) -> list[Panel]:
    """One chart for each metric that only the program knows, at most `MOST_PANELS`."""
    unknown = sorted(name for name in names if name not in KNOWN and not name.startswith(FAMILIES))
    return [
        Panel(
            f"own-{i}", name, unit_of(name), (Line(name, name.rsplit("/", 1)[-1], "other-series"),)
        )
        for i, name in enumerate(unknown[:MOST_PANELS])
    ]


def performance(names: Collection[str]) -> list[Panel]:
    """The split leads once it is told, else the step's time does."""
    if "time/forward_s" in names:
        return _having(PERFORMANCE, set(names) - {"data_time_s"})  # the split has it
    found = [panel for panel in _having(PERFORMANCE, names) if panel.id != "step_split"]
    return [_wide(panel) for panel in found] or [_wide(STEP_TIME), THROUGHPUT]


def numerics(names: Collection[str]) -> list[Panel]:
    """Loss scale, gradients and the experts' balance; one that stands alone or before three takes
    the width.
    """
    found = _having(NUMERICS, names)
    return [replace(panel, wide=len(found) in (1, 4) and panel is found[0]) for panel in found]


def _wide(panel: Panel) -> Panel:
    return replace(panel, wide=True) if panel.id == "step_time" else panel


def memory(names: Collection[str], rank: int | None) -> list[Panel]:
    """Stack and allocator of one rank; None is the lowest that tells."""
    wanted = (replace(MEMORY, wide=True), replace(ALLOCATOR, wide=True), OFFLOADED)
    found = _having(wanted, names) or [replace(MEMORY, wide=True)]
    return [replace(panel, rank=rank) for panel in found]


def system(names: Collection[str]) -> list[Panel]:
    return _having(SYSTEM, names)


def unshown(names: Iterable[str]) -> int:
    """How many of the program's own metrics have no chart."""
    return max(
        0,
        len([name for name in names if name not in KNOWN and not name.startswith(FAMILIES)])
        - MOST_PANELS,
    )


def _having(panels: Iterable[Panel], names: Collection[str]) -> list[Panel]:
    """Those with at least one series among the names, and of each the series that are; validation
    may still come.
    """
    found = []
    for panel in panels:
        lines = tuple(
            line
            for line in panel.series
            if line.name in names or (panel.id == "loss" and line.name == "val_loss")
        )
        if any(line.name in names for line in lines):
            found.append(replace(panel, series=lines))
    return found
