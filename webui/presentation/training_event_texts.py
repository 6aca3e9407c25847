"""Descriptions of the events of training and benchmark runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from django.utils.translation import gettext as _
from django.utils.translation import gettext_noop, ngettext

from webui.presentation import formatting, kernel_summary
from webui.presentation.event_parts import Describer, at_step, message_of, on_rank, shortened


def _scale(data: Mapping[str, Any], rank: int | None) -> str:
    change = _("Loss scale %(old)s → %(new)s") % {
        "old": formatting.quantity(data.get("old")),
        "new": formatting.quantity(data.get("new")),
    }
    reason = _(" after %(reason)s") % {"reason": data["reason"]} if data.get("reason") else ""
    return f"{change}{reason}{at_step(data)}{_of_model(data)}"


def _of_model(data: Mapping[str, Any]) -> str:
    """Which model, if it is not the run's own."""
    return _(" (value model)") if data.get("model") == "value" else ""


def _checkpoint(data: Mapping[str, Any], rank: int | None) -> str:
    details = []
    if data.get("bytes"):
        details.append(formatting.memory(data["bytes"]))
    if data.get("seconds"):
        details.append(_("in %(time)s") % {"time": formatting.duration(data["seconds"])})
    suffix = f" ({', '.join(details)})" if details else ""
    return _("Checkpoint saved") + at_step(data) + suffix


def _profile(data: Mapping[str, Any], rank: int | None) -> str:
    name = data.get("name") or _("a trace")
    size = ""
    if data.get("bytes"):
        size = _(" (%(size)s, see Artifacts)") % {"size": formatting.memory(data["bytes"])}
    return f"{_('Profile saved')}{on_rank(rank)}{at_step(data)}: {name}{size}"


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
    return f"{_('Memory profile saved')}{on_rank(rank)}{at_step(data)}: {text}"


def _non_finite(data: Mapping[str, Any], rank: int | None) -> str:
    what = str(data.get("what") or data.get("name") or data.get("metric") or _("a value"))
    module = data.get("module")
    first = ""
    if module and str(module) not in what:
        first = _(", first in %(module)s") % {"module": module}
    # the engine's text names the rank where it began, whichever rank reports it
    on = "" if "(rank" in what else on_rank(rank)
    return _("Non-finite value: %(what)s") % {"what": what} + first + on + at_step(data)


def _overflow(data: Mapping[str, Any], rank: int | None) -> str:
    ranks, scale = data.get("ranks") or [], data.get("loss_scale")
    text = _("Step skipped") + at_step(data) + _of_model(data)
    text += ": " + _("gradients overflowed")
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
    chosen = _("Recompute chosen") + _of_model(data)
    return chosen + (f": {'; '.join(parts)}" if parts else "")


def _peak(data: Mapping[str, Any], rank: int | None) -> str:
    text = _("Peak of %(device)s%(on_rank)s: %(tflops)s TFLOP/s") % {
        "device": data.get("device") or _("the device"),
        "on_rank": on_rank(rank),
        "tflops": shortened(data.get("tflops")),
    }
    details = " ".join(str(data[key]) for key in ("precision", "source") if data.get(key))
    return text + (f" ({details})" if details else "")


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
    if data.get("peak") and "mfu_rule" not in data["peak"]:
        text += _("; MFU counts the input embedding table too, as version 0.1 did")
    return text


def _compiled(data: Mapping[str, Any], rank: int | None) -> str:
    count = int(data.get("segments", data.get("pieces")) or 0)  # version 0.1 wrote `pieces`
    text = ngettext(
        "Compiled %(count)s block segment in %(time)s",
        "Compiled %(count)s block segments in %(time)s",
        count,
    )
    seconds = formatting.duration(data.get("seconds") or 0)
    return text % {"count": f"{count:,}", "time": seconds} + on_rank(rank) + at_step(data)


def _benchmark(data: Mapping[str, Any], rank: int | None) -> str:
    count = len(data.get("variants") or [])
    return ngettext(
        "Benchmark of %(count)s variant started", "Benchmark of %(count)s variants started", count
    ) % {"count": count}


def _variant(data: Mapping[str, Any], rank: int | None) -> str:
    if data.get("state") != "measured":
        return _("Variant %(name)s failed: %(message)s") % {
            "name": data.get("name"),
            "message": shortened(message_of(data)),
        }
    return _("Variant %(name)s: %(time)s per step, peak %(memory)s") % {
        "name": data.get("name"),
        "time": formatting.seconds(data.get("step_time_s")),
        "memory": formatting.memory(data.get("peak_bytes")),
    }


def _collectives(data: Mapping[str, Any], rank: int | None) -> str:
    return _("Collectives measured between %(ranks)s ranks") % {"ranks": data.get("ranks")}


def _data(data: Mapping[str, Any], rank: int | None) -> str:
    """Samples, trained tokens and packing of all sources; what was cut or left out."""
    sources = [each for each in (data.get("sources") or {}).values() if isinstance(each, dict)]

    def total(name: str) -> int:
        return int(sum(formatting.number(each.get(name)) or 0 for each in sources))

    tokens, rows = total("tokens"), total("rows")
    text = _(
        "Data: %(samples)s samples in %(rows)s rows, %(trained)s of %(tokens)s tokens trained"
    ) % {
        "samples": formatting.quantity(total("samples")),
        "rows": formatting.quantity(rows),
        "trained": formatting.quantity(total("trained_tokens")),
        "tokens": formatting.quantity(tokens),
    }
    seq_len = formatting.number(data.get("seq_len"))
    if rows and seq_len:
        text += _(", rows %(share)s full") % {
            "share": formatting.percent(min(1.0, tokens / (rows * seq_len)))
        }
    for name, words in (("truncated", _("truncated")), ("dropped", _("too long and left out"))):
        if total(name):
            text += f"; {formatting.quantity(total(name))} {words}"
    return text


_STORED: Final = {
    "none": gettext_noop("fully stored"),
    "some": gettext_noop("partly stored"),
    "full": gettext_noop("recomputed"),
}


# by the warning's kind; numbers are means over ten iterations
_WARNINGS: Final = {
    "entropy_collapse": gettext_noop(
        "The policy collapses: its entropy is %(now)s nats per token, below a tenth of the "
        "%(before)s at the start"
    ),
    "length_growth": gettext_noop(
        "Answers grow: %(now)s tokens on average, at least twice the %(before)s at the start; "
        "%(cut_share)s end without a stop token"
    ),
    "equal_groups": gettext_noop(
        "Little is learned: in %(now_share)s of the groups, nine of ten or more, all rewards are "
        "equal"
    ),
    "mismatch_drift": gettext_noop(
        "Sampler and trainer disagree: a divergence of %(kl)s nats per token (limit 0.01), and "
        "%(outside_share)s of the tokens have a ratio beyond 0.5 and 2 (limit 0.05)"
    ),
    "skipped_updates": gettext_noop(
        "Nothing is learned: gradients overflowed in %(now)s steps in a row, and the loss scale is "
        "now %(scale)s; a smaller plan.loss_scale.initial or bf16 avoids it"
    ),
    "value_unexplained": gettext_noop(
        "The value model predicts returns worse than a constant: it explains %(now)s of their "
        "variance (below 0)"
    ),
    "reward_hacking": gettext_noop(
        "Signs of reward hacking: the reward rose from %(before)s to %(now)s, more than its "
        "spread at the start, while the divergence is %(kl)s nats per token (above 1)"
    ),
    "reward_hacking_component": gettext_noop(
        "Signs of reward hacking: the reward rose from %(before)s to %(now)s, more than its "
        "spread at the start, while %(reward)s fell from %(was)s to %(is)s (by a fifth or more)"
    ),
}


def _warning(data: Mapping[str, Any], rank: int | None) -> str:
    kind = str(data.get("kind"))
    if kind == "reward_hacking" and data.get("reward"):
        kind = "reward_hacking_component"
    sentence = _WARNINGS.get(kind)
    if sentence is None:
        return _("Warning about learning: %(kind)s") % {"kind": kind} + at_step(data)
    values: dict[str, str] = {"reward": str(data.get("reward", ""))}
    for name in ("before", "now", "cut", "kl", "outside", "was", "is", "scale"):
        number = formatting.number(data.get(name))
        values[name] = "?" if number is None else f"{number:.3g}"
        values[f"{name}_share"] = "?" if number is None else formatting.percent(number)
    return _(sentence) % values + at_step(data) + _of_model(data)


# event type → description of its data on a rank
DESCRIBERS: Final[dict[str, Describer]] = {
    "benchmark_began": _benchmark,
    "benchmark_result": _variant,
    "benchmark_collectives": _collectives,
    "benchmark_products": lambda data, rank: _("Matrix products measured"),
    "loss_scale_changed": _scale,
    "overflow_skipped_step": _overflow,
    "non_finite": _non_finite,
    "checkpoint_saved": _checkpoint,
    "plan_resolved": _plan,
    "data_statistics": _data,
    "recompute_chosen": _recompute,
    "learning_warning": _warning,
    "compiled": _compiled,
    "kernels_chosen": lambda data, rank: kernel_summary.summarize(data),
    "peak_measured": _peak,
    "profile_saved": _profile,
    "memory_profile": _memory_profile,
}
