"""Describes run events in one line each, with a mark for charts and lists.

Pure functions of event data. Does not depend on how events are stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import PurePath
from typing import Any, Final

from django.utils.translation import gettext as _
from django.utils.translation import gettext_noop, ngettext

from webui.charts import predicted_vs_measured
from webui.presentation import formatting, kernel_summary

# shown as charts and texts, so event lists leave them out
NOT_LISTED: Final = frozenset({"pipeline_timeline", "samples_written"})
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
class EventMessage:
    """One event as text; `kind` (plain, good, event or bad) selects its shape and color."""

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
        """Return a chart marker: its place on each axis, None if the event has no step."""
        step = self.step
        placed = {
            axis: step * factor if step is not None else None for axis, factor in per_step.items()
        }
        return {
            "step": step,
            "time": self.time.timestamp(),
            **placed,
            "kind": self.kind,
            "text": self.text,
        }


def event_message(event: Any, run_name: str = "") -> EventMessage:
    """Build the message of a RunEvent row."""
    data = event.data if isinstance(event.data, dict) else {}
    step = data.get("step")
    return EventMessage(
        time=event.time,
        type=event.type,
        kind=get_kind(event.type, data),
        text=describe(event.type, data, event.rank),
        step=int(step) if isinstance(step, int | float) and not isinstance(step, bool) else None,
        attempt=event.attempt,
        rank=event.rank,
        run=event.run_id,
        run_name=run_name,
    )


def get_kind(type: str, data: Mapping[str, Any]) -> str:
    """Return plain, good, event or bad."""
    if type == "state_changed":
        return {"failed": "bad", "finished": "good"}.get(str(data.get("new")), "plain")
    if type == "rank_exited":
        return "plain" if data.get("code") == 0 else "bad"
    if type in _PLAIN:
        return "plain"
    if type in _GOOD:
        return "good"
    return "bad" if type in _BAD else "event"


def shown_on_charts(message: EventMessage) -> bool:
    """Whether charts mark the event; plain ones appear in lists only."""
    return message.kind != "plain"


def describe(type: str, data: Mapping[str, Any], rank: int | None) -> str:
    """Describe an event in one line; unknown types show their first data items."""
    describer = _DESCRIBERS.get(type)
    if describer is not None:
        return str(describer(data, rank))
    items = ", ".join(f"{key} {_short(value)}" for key, value in list(data.items())[:4])
    name = type.replace("_", " ")
    return f"{name[:1].upper()}{name[1:]}{_on(rank)}" + (f": {items}" if items else "")


def _message(data: Mapping[str, Any]) -> str:
    return str(data.get("message", data.get("says")) or "")  # version 0.1 wrote `says`


def _state(data: Mapping[str, Any], rank: int | None) -> str:
    by, why, new = data.get("by"), data.get("why"), data.get("new")
    by_user = ""
    if by and by not in ("control plane", "node"):
        by_user = _(" by %(user)s") % {"user": by}
    if why == "submitted":
        return _("Run submitted%(by_user)s") % {"by_user": by_user}
    cause = f": {why}" if why and why not in (new, "cancelled", "paused", "resumed") else ""
    text = _("Attempt %(state)s") if data.get("of") == "attempt" else _("Run %(state)s")
    return f"{text % {'state': new}}{by_user}{cause}"


def _scale(data: Mapping[str, Any], rank: int | None) -> str:
    change = _("Loss scale %(old)s → %(new)s") % {
        "old": formatting.quantity(data.get("old")),
        "new": formatting.quantity(data.get("new")),
    }
    reason = _(" after %(reason)s") % {"reason": data["reason"]} if data.get("reason") else ""
    return f"{change}{reason}{_at(data)}"


def _checkpoint(data: Mapping[str, Any], rank: int | None) -> str:
    details = []
    if data.get("bytes"):
        details.append(formatting.memory(data["bytes"]))
    if data.get("seconds"):
        details.append(_("in %(time)s") % {"time": formatting.duration(data["seconds"])})
    suffix = f" ({', '.join(details)})" if details else ""
    return _("Checkpoint saved") + _at(data) + suffix


def _exited(data: Mapping[str, Any], rank: int | None) -> str:
    how = data.get("signal") or (f"code {data['code']}" if data.get("code") is not None else "")
    name = data.get("class")
    number = rank if rank is not None else "?"
    text = _("Rank %(rank)s exited") % {"rank": number}
    if how:
        text = _("Rank %(rank)s exited with %(how)s") % {"rank": number, "how": how}
    return text + (f", {name}" if name else "") + _at(data)


def _missed(data: Mapping[str, Any], rank: int | None) -> str:
    likely = data.get("likely")
    causes = formatting.listed([str(item) for item in likely]) if likely else ""
    metric = str(data.get("what") or data.get("metric") or _("a metric"))
    measured, predicted = (
        predicted_vs_measured.format_value(metric, formatting.number(data.get(key)))
        for key in ("measured", "predicted")
    )
    text = _("Prediction missed: %(metric)s %(measured)s, predicted %(predicted)s") % {
        "metric": predicted_vs_measured.title_of(metric),
        "measured": measured,
        "predicted": predicted,
    }
    return text + (_("; likely cause: %(causes)s") % {"causes": causes} if causes else "")


def _slow(data: Mapping[str, Any], rank: int | None) -> str:
    share = formatting.number(data.get("ratio"))
    causes = [
        _message(cause)
        for cause in data.get("causes") or []
        if isinstance(cause, dict) and _message(cause)
    ]
    text = _("Slower than predicted")
    if share is not None:
        text = _("Slow: %(share)s of the predicted speed") % {"share": formatting.percent(share)}
    return f"{text}. {' '.join(causes[:2])}" if causes else text


def _profile(data: Mapping[str, Any], rank: int | None) -> str:
    name = data.get("name") or _("a trace")
    size = ""
    if data.get("bytes"):
        size = _(" (%(size)s, see Artifacts)") % {"size": formatting.memory(data["bytes"])}
    return f"{_('Profile saved')}{_on(rank)}{_at(data)}: {name}{size}"


def _memory_profile(data: Mapping[str, Any], rank: int | None) -> str:
    """The peak of the fullest device, its largest categories first."""
    peaks = [peak for peak in (data.get("peak") or {}).values() if isinstance(peak, dict)]
    kinds = max(peaks, key=lambda peak: max([*peak.values(), 0]), default={})
    total = formatting.number(kinds.get("total"))
    largest = sorted(
        (kind for kind in kinds if kind != "total" and kinds[kind]), key=lambda kind: -kinds[kind]
    )[:3]
    parts = [f"{kind.replace('_', ' ')} {formatting.memory(kinds[kind])}" for kind in largest]
    if total:
        text = _("peak %(total)s") % {"total": formatting.memory(total)}
        text += f" ({', '.join(parts)})" if parts else ""
    else:
        text = ", ".join(parts)
    return f"{_('Memory profile saved')}{_on(rank)}{_at(data)}: {text}"


def _non_finite(data: Mapping[str, Any], rank: int | None) -> str:
    what = str(data.get("what") or data.get("name") or data.get("metric") or _("a value"))
    module = data.get("module")
    first = ""
    if module and str(module) not in what:
        first = _(", first in %(module)s") % {"module": module}
    # the engine's text names the rank where it began, whichever rank reports it
    on = "" if "(rank" in what else _on(rank)
    return _("Non-finite value: %(what)s") % {"what": what} + first + on + _at(data)


def _overflow(data: Mapping[str, Any], rank: int | None) -> str:
    ranks, scale = data.get("ranks") or [], data.get("loss_scale")
    text = _("Step skipped") + _at(data) + ": " + _("gradients overflowed")
    if ranks:
        listed = formatting.listed([str(each) for each in ranks[:4]])
        listed += _(" and more") if len(ranks) > 4 else ""
        text += ngettext(" on rank %(ranks)s", " on ranks %(ranks)s", len(ranks)) % {
            "ranks": listed
        }
    if scale:
        text += _(" at loss scale %(scale)s") % {"scale": formatting.quantity(scale)}
    return text


def _recompute(data: Mapping[str, Any], rank: int | None) -> str:
    """What each stage stores, the extra time, and the memory."""
    stages = [stage for stage in data.get("stages") or [] if isinstance(stage, dict)]
    parts = []
    for stage in stages[:4]:
        layers = [
            ngettext("%(count)s layer %(kind)s", "%(count)s layers %(kind)s", group["count"])
            % {
                "count": group["count"],
                "kind": _(_STORED.get(group["kind"], str(group["kind"]))),
            }
            for group in stage.get("layers") or []
        ]
        prefix = ""
        if len(stages) > 1:
            prefix = _("stage %(stage)s: ") % {"stage": stage.get("stage")}
        text = _("%(layers)s; %(memory)s stored") % {
            "layers": formatting.listed(layers),
            "memory": formatting.memory(stage.get("bytes")),
        }
        extra = formatting.number(stage.get("extra_s"))
        if extra:
            text += _(", %(time)s more per micro-batch") % {"time": formatting.seconds(extra)}
        parts.append(prefix + text)
    if len(stages) > 4:
        parts.append(_("and %(count)s more stages") % {"count": len(stages) - 4})
    return _("Recompute chosen") + (f": {'; '.join(parts)}" if parts else "")


_STORED: Final = {
    "none": gettext_noop("fully stored"),
    "some": gettext_noop("partly stored"),
    "full": gettext_noop("recomputed"),
}


def _weights(data: Mapping[str, Any], rank: int | None) -> str:
    text = _("Weights of %(name)s loaded") % {
        "name": data.get("weights") or data.get("path") or _("a model")
    }
    if data.get("seconds"):
        text += _(" in %(time)s") % {"time": formatting.duration(data["seconds"])}
    tokenizer = data.get("tokenizer")
    if tokenizer == "bytes":
        text += _("; text is read as bytes")
    elif tokenizer:
        text += _("; tokenizer: %(name)s") % {"name": _tokenizer_name(str(tokenizer))}
    differs = [str(item) for item in data.get("model_differs_in") or []]
    if differs:
        text += _("; this model differs in %(fields)s") % {"fields": formatting.listed(differs[:4])}
    return text


def _tokenizer_name(path: str) -> str:
    """File and folder of a tokenizer; a run's own is stored with its checkpoints."""
    parts = PurePath(path).parts
    if parts[-2:] == ("checkpoints", "tokenizer.json"):
        return _("the run's tokenizer.json")
    return "/".join(parts[-2:])


def _at(data: Mapping[str, Any]) -> str:
    step = data.get("step")
    return _(" at step %(step)s") % {"step": f"{step:,}"} if isinstance(step, int) else ""


def _on(rank: int | None) -> str:
    return _(" on rank %(rank)s") % {"rank": rank} if rank is not None and rank >= 0 else ""


def _short(value: Any) -> str:
    if isinstance(value, float):
        return formatting.quantity(value)
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "…"


def _with_reason(title: str) -> Any:
    def describe_with_reason(data: Mapping[str, Any], rank: int | None) -> str:
        reason = data.get("reason") or _message(data) or data.get("why")
        return f"{_(title)}{_on(rank)}{_at(data)}" + (f": {_short(reason)}" if reason else "")

    return describe_with_reason


def _forked(data: Mapping[str, Any], rank: int | None) -> str:
    if data.get("into"):
        return _("Forked%(at_step)s into run %(run)s") % {
            "at_step": _at(data),
            "run": data["into"],
        }
    return _("Forked from run %(run)s") % {"run": data.get("from")} + _at(data)


def _rewound(data: Mapping[str, Any], rank: int | None) -> str:
    text = _("Rewound to step %(step)s") % {"step": data.get("step")}
    if data.get("by"):
        text += _(" by %(user)s") % {"user": data["by"]}
    dropped = data.get("given_up") or data.get("discarded") or []
    if dropped:
        steps = formatting.listed([f"{step:,}" for step in dropped])
        text += _("; checkpoints of step %(steps)s are discarded") % {"steps": steps}
    return text


def _peak(data: Mapping[str, Any], rank: int | None) -> str:
    text = _("Peak of %(device)s%(on_rank)s: %(tflops)s TFLOP/s") % {
        "device": data.get("device") or _("the device"),
        "on_rank": _on(rank),
        "tflops": _short(data.get("tflops")),
    }
    details = " ".join(str(data[key]) for key in ("precision", "source") if data.get(key))
    return text + (f" ({details})" if details else "")


def _hang(data: Mapping[str, Any], rank: int | None) -> str:
    text = _("No progress")
    if data.get("quiet_s"):
        text = _("No progress for %(time)s") % {"time": formatting.duration(data["quiet_s"])}
    return text + (f": {_message(data)}" if _message(data) else _on(rank))


def _straggler(data: Mapping[str, Any], rank: int | None) -> str:
    text = _("Slow rank") + (f" {rank}" if rank is not None else "")
    if data.get("node"):
        place = _("stage %(stage)s") % {"stage": data.get("stage", 0)}
        text += f" ({data['node']}, {place})"
    return text + _at(data) + (f": {_message(data)}" if _message(data) else "")


def _node(data: Mapping[str, Any], rank: int | None) -> str:
    return _("Node %(node)s lost: no heartbeat") % {"node": data.get("node") or "?"}


def _plan(data: Mapping[str, Any], rank: int | None) -> str:
    plan = data.get("plan")
    if not isinstance(plan, dict):
        return _("Plan resolved")
    text = _("Plan resolved: %(plan)s") % {"plan": formatting.describe_plan(plan)}
    size, setup = formatting.number(data.get("parameters")), formatting.number(data.get("setup_s"))
    if size:
        text += _("; %(count)s parameters") % {"count": formatting.quantity(size)}
    if setup:
        text += _("; set up in %(time)s") % {"time": formatting.duration(setup)}
    return text


def _compiled(data: Mapping[str, Any], rank: int | None) -> str:
    count = int(data.get("segments", data.get("pieces")) or 0)  # version 0.1 wrote `pieces`
    text = ngettext(
        "Compiled %(count)s block segment in %(time)s",
        "Compiled %(count)s block segments in %(time)s",
        count,
    )
    seconds = formatting.duration(data.get("seconds") or 0)
    return text % {"count": f"{count:,}", "time": seconds} + _on(rank) + _at(data)


def _benchmark(data: Mapping[str, Any], rank: int | None) -> str:
    count = len(data.get("variants") or [])
    return ngettext(
        "Benchmark of %(count)s variant started", "Benchmark of %(count)s variants started", count
    ) % {"count": count}


def _variant(data: Mapping[str, Any], rank: int | None) -> str:
    if data.get("state") != "measured":
        return _("Variant %(name)s failed: %(message)s") % {
            "name": data.get("name"),
            "message": _short(_message(data)),
        }
    return _("Variant %(name)s: %(time)s per step, peak %(memory)s") % {
        "name": data.get("name"),
        "time": formatting.seconds(data.get("step_time_s")),
        "memory": formatting.memory(data.get("peak_bytes")),
    }


def _collectives(data: Mapping[str, Any], rank: int | None) -> str:
    return _("Collectives measured between %(ranks)s ranks") % {"ranks": data.get("ranks")}


def _serving(data: Mapping[str, Any], rank: int | None) -> str:
    text = _("Serving %(model)s: context %(context)s tokens") % {
        "model": data.get("model") or _("the model"),
        "context": formatting.quantity(data.get("context")),
    }
    blocks = data.get("blocks")
    if isinstance(blocks, int):
        text += ngettext(", %(count)s KV cache block", ", %(count)s KV cache blocks", blocks) % {
            "count": f"{blocks:,}"
        }
    return text


def _draining(data: Mapping[str, Any], rank: int | None) -> str:
    running = data.get("running")
    text = _("Draining: no new requests")
    if isinstance(running, int) and running:
        text += ngettext(
            "; %(count)s request may still finish", "; %(count)s requests may still finish", running
        ) % {"count": f"{running:,}"}
    return text


def _served(data: Mapping[str, Any], rank: int | None) -> str:
    count = int(data.get("requests") or 0)
    text = ngettext("Served %(count)s request", "Served %(count)s requests", count) % {
        "count": f"{count:,}"
    }
    tokens = data.get("output_tokens", data.get("new_tokens"))  # version 0.1 wrote `new_tokens`
    if tokens:
        text += _(", %(count)s output tokens") % {"count": formatting.quantity(tokens)}
    first = formatting.number((data.get("ttft_s") or {}).get("p50"))
    per_token = formatting.number((data.get("tpot_s") or {}).get("p50"))
    medians = []
    if first:
        medians.append(_("time to first token %(time)s") % {"time": formatting.seconds(first)})
    if per_token:
        medians.append(_("%(time)s per token") % {"time": formatting.seconds(per_token)})
    if medians:
        text += _("; median %(latencies)s") % {"latencies": formatting.listed(medians)}
    return text


def _generated(data: Mapping[str, Any], rank: int | None) -> str:
    count = int(data.get("answers") or 0)
    text = ngettext("Generated %(count)s answer", "Generated %(count)s answers", count) % {
        "count": f"{count:,}"
    }
    earlier = data.get("existing", data.get("found"))  # version 0.1 wrote `found`
    if isinstance(earlier, int) and earlier:
        text += _(", %(count)s of them in an earlier attempt") % {"count": f"{earlier:,}"}
    return text


def _evaluated(data: Mapping[str, Any], rank: int | None) -> str:
    values = data.get("metrics")
    metrics: Mapping[str, Any] = values if isinstance(values, Mapping) else {}
    parts = [
        f"{name.replace('_', ' ')} {formatting.quantity(value, 4)}"
        for name, value in list(metrics.items())[:4]
    ]
    count = int(data.get("lines") or 0)
    text = ngettext("Evaluated %(count)s example", "Evaluated %(count)s examples", count)
    return text % {"count": f"{count:,}"} + (f": {formatting.listed(parts)}" if parts else "")


def _quantized(data: Mapping[str, Any], rank: int | None) -> str:
    kind = data.get("quantize") or data.get("kind") or data.get("method")
    text = _("Weights quantized")
    if kind:
        text = _("Weights quantized to %(kind)s") % {"kind": kind}
    before, after = (formatting.number(data.get(key)) for key in ("bytes_before", "bytes_after"))
    if before and after:
        text += f": {formatting.memory(before)} → {formatting.memory(after)}"
    ppl = [formatting.number(data.get(key)) for key in ("perplexity_before", "perplexity_after")]
    if ppl[0] and ppl[1]:
        text += _(", perplexity %(before)s → %(after)s") % {
            "before": formatting.quantity(ppl[0], 4),
            "after": formatting.quantity(ppl[1], 4),
        }
    return text


_DESCRIBERS: Final[dict[str, Any]] = {
    "serving": _serving,
    "draining": _draining,
    "served": _served,
    "generated": _generated,
    "evaluated": _evaluated,
    "quantized": _quantized,
    "benchmark_began": _benchmark,
    "benchmark_result": _variant,
    "benchmark_collectives": _collectives,
    "benchmark_products": lambda data, rank: _("Matrix products measured"),
    "state_changed": _state,
    "loss_scale_changed": _scale,
    "overflow_skipped_step": _overflow,
    "non_finite": _non_finite,
    "checkpoint_saved": _checkpoint,
    "checkpoint_restored": _with_reason(gettext_noop("Resumed from a checkpoint")),
    "rank_exited": _exited,
    "node_lost": _node,
    "out_of_memory": _with_reason(gettext_noop("Out of memory")),
    "straggler": _straggler,
    "hang": _hang,
    "forked": _forked,
    "rewound": _rewound,
    "preempted": _with_reason(gettext_noop("Preempted")),
    "plan_resolved": _plan,
    "recompute_chosen": _recompute,
    "compiled": _compiled,
    "kernels_chosen": lambda data, rank: kernel_summary.summarize(data),
    "weights_loaded": _weights,
    "peak_measured": _peak,
    "prediction_missed": _missed,
    "slow": _slow,
    "profile_saved": _profile,
    "memory_profile": _memory_profile,
}
