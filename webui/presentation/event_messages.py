"""Events as sentences, with a mark for charts and lists.

Pure; knows the event types, not where they are stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import PurePath
from typing import Any, Final

from webui.charts import predicted_vs_measured
from webui.presentation import formatting, kernel_summary

# pictures and texts of their own, not sentences: no list of events tells them
DRAWN: Final = frozenset({"pipeline_timeline", "samples_written"})
_PLAIN: Final = frozenset(
    {
        "state_changed",
        "plan_resolved",
        "peak_measured",
        "recompute_chosen",
        "compiled",
        "kernels_chosen",
        "weights_loaded",
        "benchmark_began",
        "benchmark_collectives",
        "benchmark_products",
        "draining",
    }
)
_GOOD: Final = frozenset(
    {
        "checkpoint_saved",
        "checkpoint_restored",
        "profile_saved",
        "memory_profile",
        "serving",
        "generated",
        "evaluated",
        "served",
        "quantized",
    }
)
_BAD: Final = frozenset({"non_finite", "node_lost", "out_of_memory", "hang"})


@dataclass(frozen=True, slots=True)
class Moment:
    """Something that happened: `kind` plain, good, event or bad decides shape and colour."""

    time: datetime
    type: str
    kind: str
    text: str
    step: int | None = None
    attempt: int | None = None
    rank: int | None = None
    run: int | None = None
    run_name: str = ""

    def mark(self, per_step: Mapping[str, float]) -> dict[str, Any]:
        """For a chart: places on its axes, null where the event has none."""
        at = self.step
        placed = {
            axis: at * factor if at is not None else None for axis, factor in per_step.items()
        }
        return {
            "step": at,
            "time": self.time.timestamp(),
            **placed,
            "kind": self.kind,
            "text": self.text,
        }


def moment(event: Any, run_name: str = "") -> Moment:
    """From a RunEvent row."""
    data = event.data if isinstance(event.data, dict) else {}
    step = data.get("step")
    return Moment(
        time=event.time,
        type=event.type,
        kind=kind_of(event.type, data),
        text=sentence(event.type, data, event.rank),
        step=int(step) if isinstance(step, int | float) and not isinstance(step, bool) else None,
        attempt=event.attempt,
        rank=event.rank,
        run=event.run_id,
        run_name=run_name,
    )


def kind_of(type: str, data: Mapping[str, Any]) -> str:
    if type == "state_changed":
        return {"failed": "bad", "finished": "good"}.get(str(data.get("new")), "plain")
    if type == "rank_exited":
        return "plain" if data.get("code") == 0 else "bad"
    return (
        "plain"
        if type in _PLAIN
        else "good"
        if type in _GOOD
        else "bad"
        if type in _BAD
        else "event"
    )


def on_charts(moment: Moment) -> bool:
    """State moves and resolved plans stand in the list only."""
    return moment.kind != "plain"


def sentence(type: str, data: Mapping[str, Any], rank: int | None) -> str:
    """One sentence for an event; unknown types show their data in short."""
    teller = _TELLERS.get(type)
    if teller is not None:
        return str(teller(data, rank))
    told = ", ".join(f"{key} {_short(value)}" for key, value in list(data.items())[:4])
    name = type.replace("_", " ")
    return f"{name[:1].upper()}{name[1:]}{_on(rank)}" + (f": {told}" if told else "")


def _state(data: Mapping[str, Any], rank: int | None) -> str:
    what = "Attempt" if data.get("of") == "attempt" else "Run"
    by, why = data.get("by"), data.get("why")
    whom = f" by {by}" if by and by not in ("control plane", "node") else ""
    if why == "submitted":
        return f"Run submitted{whom}"
    cause = (
        f": {why}" if why and why not in (data.get("new"), "cancelled", "paused", "resumed") else ""
    )
    return f"{what} {data.get('new')}{whom}{cause}"


def _scale(data: Mapping[str, Any], rank: int | None) -> str:
    old, new = formatting.quantity(data.get("old")), formatting.quantity(data.get("new"))
    return f"Loss scale {old} → {new}{_because(data)}{_at(data)}"


def _checkpoint(data: Mapping[str, Any], rank: int | None) -> str:
    size = data.get("bytes")
    took = data.get("seconds")
    more = [formatting.memory(size)] * bool(size) + [f"in {formatting.duration(took)}"] * bool(took)
    return f"Checkpoint saved{_at(data)}" + (f" ({', '.join(more)})" if more else "")


def _exited(data: Mapping[str, Any], rank: int | None) -> str:
    how = data.get("signal") or (f"code {data['code']}" if data.get("code") is not None else "")
    name = data.get("class")
    return (
        f"Rank {rank if rank is not None else '?'} exited"
        + (f" with {how}" if how else "")
        + (f", {name}" if name else "")
        + _at(data)
    )


def _missed(data: Mapping[str, Any], rank: int | None) -> str:
    likely = data.get("likely")
    why = f"; likely {formatting.listed([str(item) for item in likely])}" if likely else ""
    metric = str(data.get("what") or data.get("metric") or "a number")
    measured, predicted = (
        predicted_vs_measured.shown(metric, formatting.number(data.get(key)))
        for key in ("measured", "predicted")
    )
    return f"Prediction missed: {metric} {measured}, predicted {predicted}{why}"


def _slow(data: Mapping[str, Any], rank: int | None) -> str:
    share = formatting.number(data.get("ratio"))
    causes = [
        str(cause["says"])
        for cause in data.get("causes") or []
        if isinstance(cause, dict) and cause.get("says")
    ]
    says = (
        f"Slow: {formatting.percent(share)} of the predicted speed"
        if share is not None
        else "Slower than predicted"
    )
    return f"{says}. {' '.join(causes[:2])}" if causes else says


def _profile(data: Mapping[str, Any], rank: int | None) -> str:
    size = (
        f" ({formatting.memory(data['bytes'])}, among the artifacts)" if data.get("bytes") else ""
    )
    return f"Profile saved{_on(rank)}{_at(data)}: {data.get('name') or 'a trace'}{size}"


def _memory_profile(data: Mapping[str, Any], rank: int | None) -> str:
    """The peak of the fullest device, its largest kinds first."""
    peaks = [found for found in (data.get("peak") or {}).values() if isinstance(found, dict)]
    kinds = max(peaks, key=lambda found: max([*found.values(), 0]), default={})
    total = formatting.number(kinds.get("total"))
    largest = sorted(
        (kind for kind in kinds if kind != "total" and kinds[kind]), key=lambda kind: -kinds[kind]
    )[:3]
    held = [f"{kind.replace('_', ' ')} {formatting.memory(kinds[kind])}" for kind in largest]
    peak = f" {formatting.memory(total)} at the peak" if total else ""
    of = " of it" if total else ""
    return f"Memory told{_on(rank)}{_at(data)}:{peak}" + (
        f",{of} {formatting.listed(held)}" if held else ""
    )


def _non_finite(data: Mapping[str, Any], rank: int | None) -> str:
    what = str(data.get("what") or data.get("name") or data.get("metric") or "a value")
    module = data.get("module")
    where = f", first in {module}" if module and str(module) not in what else ""
    # the engine's words name the rank where it began, whichever rank tells it
    return f"Not a finite number: {what}{where}{'' if '(rank' in what else _on(rank)}{_at(data)}"


def _overflow(data: Mapping[str, Any], rank: int | None) -> str:
    ranks, scale = data.get("ranks") or [], data.get("loss_scale")
    which = formatting.listed([str(each) for each in ranks[:4]]) + (
        " and more" if len(ranks) > 4 else ""
    )
    told = [f"on rank{'' if len(ranks) == 1 else 's'} {which}"]
    more = (told if ranks else []) + (
        [f"at loss scale {formatting.quantity(scale)}"] if scale else []
    )
    return f"Step skipped{_at(data)}: gradients overflowed{(' ' + ' '.join(more)) if more else ''}"


def _recompute(data: Mapping[str, Any], rank: int | None) -> str:
    """What of each stage is kept, what it costs, and what room it had."""
    stages = [stage for stage in data.get("stages") or [] if isinstance(stage, dict)]
    told = []
    for stage in stages[:4]:
        kept = [
            (
                f"{layers['count']} layer{'' if layers['count'] == 1 else 's'} "
                f"{_KEPT.get(layers['kind'], layers['kind'])}"
            )
            for layers in stage.get("layers") or []
        ]
        where = f"stage {stage.get('stage')}: " if len(stages) > 1 else ""
        extra = formatting.number(stage.get("extra_s"))
        cost = f", {formatting.seconds(extra)} more a micro-batch" if extra else ""
        told.append(
            f"{where}{formatting.listed(kept)}; {formatting.memory(stage.get('bytes'))} held{cost}"
        )
    more = f"; and {len(stages) - 4} stages more" if len(stages) > 4 else ""
    return "Recompute chosen" + (f": {'; '.join(told)}{more}" if told else "")


_KEPT: Final = {"none": "kept whole", "some": "kept in part", "full": "run again"}


def _weights(data: Mapping[str, Any], rank: int | None) -> str:
    name = data.get("weights") or data.get("path") or "a model"
    took = f" in {formatting.duration(data['seconds'])}" if data.get("seconds") else ""
    differs = [str(item) for item in data.get("model_differs_in") or []]
    but = f"; this model differs in {formatting.listed(differs[:4])}" if differs else ""
    reader = data.get("tokenizer")
    read = (
        f"; text is read {'as bytes' if reader == 'bytes' else f'by {_reader(str(reader))}'}"
        if reader
        else ""
    )
    return f"Weights of {name} loaded{took}{read}{but}"


def _reader(path: str) -> str:
    """A tokenizer by its file and folder: a run's own lies by its checkpoints."""
    parts = PurePath(path).parts
    return (
        "the run's tokenizer.json"
        if parts[-2:] == ("checkpoints", "tokenizer.json")
        else "/".join(parts[-2:])
    )


def _at(data: Mapping[str, Any]) -> str:
    step = data.get("step")
    return f" at step {step:,}" if isinstance(step, int) else ""


def _on(rank: int | None) -> str:
    return f" on rank {rank}" if rank is not None and rank >= 0 else ""


def _because(data: Mapping[str, Any]) -> str:
    return f" after {data['reason']}" if data.get("reason") else ""


def _short(value: Any) -> str:
    if isinstance(value, float):
        return formatting.quantity(value)
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "…"


def _plainly(what: str) -> Any:
    def tell(data: Mapping[str, Any], rank: int | None) -> str:
        reason = data.get("reason") or data.get("says") or data.get("why")
        return f"{what}{_on(rank)}{_at(data)}" + (f": {_short(reason)}" if reason else "")

    return tell


def _forked(data: Mapping[str, Any], rank: int | None) -> str:
    if data.get("into"):
        return f"Forked{_at(data)} into run {data['into']}"
    return f"Forked from run {data.get('from')}{_at(data)}"


def _rewound(data: Mapping[str, Any], rank: int | None) -> str:
    lost = data.get("given_up") or []
    gone = (
        f"; checkpoints of step {formatting.listed([f'{step:,}' for step in lost])} are given up"
        if lost
        else ""
    )
    by = f" by {data['by']}" if data.get("by") else ""
    return f"Rewound to step {data.get('step')}{by}{gone}"


def _peak(data: Mapping[str, Any], rank: int | None) -> str:
    how = " ".join(str(data[key]) for key in ("precision", "source") if data.get(key))
    return (
        f"Peak of {data.get('device', 'the device')}{_on(rank)}: {_short(data.get('tflops'))} "
        "TFLOP/s"
    ) + f" ({how})" * bool(how)


def _hang(data: Mapping[str, Any], rank: int | None) -> str:
    quiet = f" for {formatting.duration(data['quiet_s'])}" if data.get("quiet_s") else ""
    says = f": {data['says']}" if data.get("says") else _on(rank)
    return f"No progress{quiet}{says}"


def _straggler(data: Mapping[str, Any], rank: int | None) -> str:
    where = f" ({data['node']}, stage {data.get('stage', 0)})" if data.get("node") else ""
    says = f": {data['says']}" if data.get("says") else ""
    return f"Slow rank{f' {rank}' if rank is not None else ''}{where}{_at(data)}{says}"


def _node(data: Mapping[str, Any], rank: int | None) -> str:
    return f"Node {data.get('node', '')} lost: no heartbeat".replace("  ", " ")


def _plan(data: Mapping[str, Any], rank: int | None) -> str:
    plan = data.get("plan")
    if not isinstance(plan, dict):
        return "Plan resolved"
    size, setup = formatting.number(data.get("parameters")), formatting.number(data.get("setup_s"))
    more = [f"{formatting.quantity(size)} parameters"] if size else []
    more += [f"set up in {formatting.duration(setup)}"] if setup else []
    return f"Plan resolved: {formatting.plan_sentence(plan)}" + (
        f"; {formatting.listed(more)}" if more else ""
    )


def _compiled(data: Mapping[str, Any], rank: int | None) -> str:
    pieces, seconds = (
        formatting.count(data.get("pieces") or 0, "piece"),
        formatting.duration(data.get("seconds") or 0),
    )
    return f"Compiled {pieces} of the blocks in {seconds}{_on(rank)}{_at(data)}"


def _benchmark(data: Mapping[str, Any], rank: int | None) -> str:
    return f"Benchmark of {formatting.count(len(data.get('variants') or []), 'variant')} began"


def _variant(data: Mapping[str, Any], rank: int | None) -> str:
    if data.get("state") != "measured":
        return f"Variant {data.get('name')} failed: {_short(data.get('says'))}"
    seconds, peak = (
        formatting.seconds(data.get("step_time_s")),
        formatting.memory(data.get("peak_bytes")),
    )
    return f"Variant {data.get('name')}: {seconds} a step, peak {peak}"


def _serving(data: Mapping[str, Any], rank: int | None) -> str:
    room = (
        f", {formatting.count(data['blocks'], 'cache block')}"
        if isinstance(data.get("blocks"), int)
        else ""
    )
    return (
        f"Serves {data.get('model') or 'its model'}: context "
        f"{formatting.quantity(data.get('context'))} tokens{room}"
    )


def _draining(data: Mapping[str, Any], rank: int | None) -> str:
    running = data.get("running")
    left = (
        f"; {formatting.count(running, 'answer')} may still end"
        if isinstance(running, int) and running
        else ""
    )
    return f"Takes no new requests{left}"


def _served(data: Mapping[str, Any], rank: int | None) -> str:
    first = formatting.number((data.get("ttft_s") or {}).get("p50"))
    pace = formatting.number((data.get("tpot_s") or {}).get("p50"))
    told = [
        f"first token after {formatting.seconds(first)}" if first else "",
        f"{formatting.seconds(pace)} a token" if pace else "",
    ]
    half = formatting.listed([part for part in told if part])
    new = (
        f", {formatting.quantity(data['new_tokens'])} new tokens" if data.get("new_tokens") else ""
    )
    return f"Served {formatting.count(int(data.get('requests') or 0), 'request')}{new}" + (
        f"; half within: {half}" if half else ""
    )


def _generated(data: Mapping[str, Any], rank: int | None) -> str:
    found = data.get("found")
    before = (
        f", {found:,} of them by an earlier attempt" if isinstance(found, int) and found else ""
    )
    return f"Answered {formatting.count(int(data.get('answers') or 0), 'line')}{before}"


def _evaluated(data: Mapping[str, Any], rank: int | None) -> str:
    given = data.get("metrics")
    metrics: Mapping[str, Any] = given if isinstance(given, Mapping) else {}
    told = [
        f"{name.replace('_', ' ')} {formatting.quantity(value, 4)}"
        for name, value in list(metrics.items())[:4]
    ]
    return f"Judged {formatting.count(int(data.get('lines') or 0), 'line')}" + (
        f": {formatting.listed(told)}" if told else ""
    )


def _quantized(data: Mapping[str, Any], rank: int | None) -> str:
    kind = data.get("quantize") or data.get("kind") or data.get("method") or "smaller"
    before, after = (formatting.number(data.get(key)) for key in ("bytes_before", "bytes_after"))
    size = (
        f": {formatting.memory(before)} to {formatting.memory(after)}" if before and after else ""
    )
    ppl = [formatting.number(data.get(key)) for key in ("perplexity_before", "perplexity_after")]
    worse = (
        f", perplexity {formatting.quantity(ppl[0], 4)} to {formatting.quantity(ppl[1], 4)}"
        if ppl[0] and ppl[1]
        else ""
    )
    return f"Weights made {kind}{size}{worse}"


_TELLERS: Final[dict[str, Any]] = {
    "serving": _serving,
    "draining": _draining,
    "served": _served,
    "generated": _generated,
    "evaluated": _evaluated,
    "quantized": _quantized,
    "benchmark_began": _benchmark,
    "benchmark_result": _variant,
    "benchmark_collectives": lambda data, rank: (
        f"Collectives measured between {data.get('ranks')} ranks"
    ),
    "benchmark_products": lambda data, rank: "Matrix products measured",
    "state_changed": _state,
    "loss_scale_changed": _scale,
    "overflow_skipped_step": _overflow,
    "non_finite": _non_finite,
    "checkpoint_saved": _checkpoint,
    "checkpoint_restored": _plainly("Continued from a checkpoint"),
    "rank_exited": _exited,
    "node_lost": _node,
    "out_of_memory": _plainly("Out of memory"),
    "straggler": _straggler,
    "hang": _hang,
    "forked": _forked,
    "rewound": _rewound,
    "preempted": _plainly("Preempted"),
    "plan_resolved": _plan,
    "recompute_chosen": _recompute,
    "compiled": _compiled,
    "kernels_chosen": lambda data, rank: kernel_summary.sentence(data),
    "weights_loaded": _weights,
    "peak_measured": _peak,
    "prediction_missed": _missed,
    "slow": _slow,
    "profile_saved": _profile,
    "memory_profile": _memory_profile,
}
