"""Headlines of pages: the state of the fleet and of a run, in one line.

Pure functions of plain numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, pvariance
from typing import Any, Final

from django.utils.translation import gettext as _
from django.utils.translation import gettext_noop, ngettext

from webui.presentation import formatting, inference_headlines

STALE_S: Final = 30.0  # a step that takes longer than this and ten usual ones is reported
MANY_SKIPPED: Final = 20  # a scale of 2^16 settles after fewer skipped updates
ENDED: Final = frozenset({"finished", "failed", "cancelled"})


@dataclass(frozen=True, slots=True)
class RunFacts:
    """Input of a run's headline: times in seconds, `loss_curve` oldest first."""

    state: str
    kind: str = "train"
    requested: str = ""
    wait_reason: str = ""
    devices: int = 0
    attempt: int = 0
    summary: Mapping[str, Any] = field(default_factory=dict)
    exit: Mapping[str, Any] | None = None
    loss_curve: Sequence[float] = ()
    runtime_s: float | None = None
    restarted: bool = False  # the newest attempt has logged no step, an earlier one has
    last_step_s: float | None = None  # age of the last step; None if silence is normal
    predicted_mfu: float | None = None
    phase: str = ""  # of a serve run: waiting, loading, serving, draining, ended
    answered: tuple[int, int | None] | None = None  # of a generate run: done, total
    metrics: Mapping[str, float] | None = None  # of an evaluate run
    wanted: int | None = None  # lines of a produce run
    starts_in_s: tuple[float, float | None, float | None] | None = None  # middle, 80% interval
    sooner: str = ""  # what would start a waiting run now


def run_headline(facts: RunFacts) -> str:
    """Describe the state of a run in one or two sentences."""
    describe = {
        "queued": _queued,
        "starting": _starting,
        "running": _running,
        "stopping": _stopping,
        "paused": _paused,
        "finished": _finished,
        "failed": _failed,
        "cancelled": _cancelled,
    }[facts.state]
    return describe(facts)


def trend(curve: Sequence[float]) -> str:
    """Return falling, flat or rising; empty for a short curve.

    Compares the last third with the third before it, beyond the noise of both.
    """
    third = len(curve) // 3
    if third < 3:
        return ""
    last, before = curve[-third:], curve[-2 * third : -third]
    late, early = fmean(last), fmean(before)
    error = ((pvariance(last) + pvariance(before)) / third) ** 0.5
    threshold = 0.004 * abs(early) + 2.5 * error
    return (
        "falling" if late < early - threshold else "rising" if late > early + threshold else "flat"
    )


def overview(
    *,
    busy: int,
    devices: int,
    runs: int,
    waiting: int,
    waiting_devices: int,
    troubles: Sequence[str],
    failed: int = 0,
) -> str:
    """Return "3 of 4 devices busy, 1 run, none waiting, no problems.".

    `failed`: runs of the last 24 hours.
    """
    if not devices:
        return _(
            "No node has joined yet, so nothing can run. Start an agent with a join token."
        ) + _problems(troubles)
    parts = [
        ngettext("%(busy)s of %(count)s device busy", "%(busy)s of %(count)s devices busy", devices)
        % {"busy": f"{busy:,}", "count": f"{devices:,}"}
    ]
    if runs:
        parts.append(ngettext("%(count)s run", "%(count)s runs", runs) % {"count": f"{runs:,}"})
    else:
        parts.append(_("none of your runs") if busy else _("no active runs"))
    if waiting and waiting_devices:
        parts.append(
            ngettext(
                "%(waiting)s waiting for %(count)s device",
                "%(waiting)s waiting for %(count)s devices",
                waiting_devices,
            )
            % {"waiting": f"{waiting:,}", "count": f"{waiting_devices:,}"}
        )
    else:
        parts.append(_("%(count)s waiting") % {"count": f"{waiting:,}" if waiting else _("none")})
    if failed:
        text = ngettext(
            "%(count)s run failed in the last 24 hours",
            "%(count)s runs failed in the last 24 hours",
            failed,
        )
        parts.append(text % {"count": f"{failed:,}"})
    elif not troubles:
        parts.append(_("no problems"))
    return ", ".join(parts) + "." + _problems(troubles)


def health(*, troubles: Sequence[str]) -> str:
    """Describe the health of the control plane."""
    return _("All components respond.") if not troubles else _problems(troubles).strip()


def _queued(facts: RunFacts) -> str:
    text = _("Waiting")
    if facts.attempt:
        text = _("Waiting (attempt %(attempt)s ended)") % {"attempt": facts.attempt}
    reason = facts.wait_reason.rstrip(".")
    if reason.lower().startswith(("waits ", "waiting ")):
        text = f"{text} {reason.split(' ', 1)[1]}."
    else:
        text = f"{text}: {_lower(reason) or _('the next scheduling pass decides')}."
    return " ".join(part for part in (text, _expected_start(facts), facts.sooner) if part)


def _expected_start(facts: RunFacts) -> str:
    if facts.starts_in_s is None:
        return ""
    start, low, high = facts.starts_in_s
    if start < 1 and low is None:
        return _("Starts soon.")
    time = formatting.remaining(max(0.0, start))
    if low is None or high is None:
        return _("Starts within %(time)s.") % {"time": time}
    values = {
        "time": time,
        "low": formatting.remaining(max(0.0, low)),
        "high": formatting.remaining(max(0.0, high)),
    }
    return _("Estimated start in %(time)s (80%% likely between %(low)s and %(high)s).") % values


def _starting(facts: RunFacts) -> str:
    text = ngettext(
        "Starting on %(count)s device", "Starting on %(count)s devices", facts.devices
    ) % {"count": f"{facts.devices:,}"}
    if facts.attempt > 1:
        text += _(", attempt %(attempt)s") % {"attempt": facts.attempt}
    return text + "."


def _running(facts: RunFacts) -> str:
    if facts.kind in inference_headlines.KINDS:
        return inference_headlines.running(facts)
    if facts.kind == "produce":
        return inference_headlines.producing(facts)
    trying = facts.summary.get("trying")
    if isinstance(trying, Mapping):
        return _trying(trying)
    if facts.summary.get("step") is None:
        return _("Running; no step logged yet.")
    if facts.restarted:
        text = _("Running again, attempt %(attempt)s; no new step yet. Last: %(progress)s.")
        return text % {"attempt": facts.attempt, "progress": _progress(facts)}
    parts = [_progress(facts)]
    if facts.kind != "benchmark":
        parts += [_loss(facts), _skipped(facts), _speed(facts), _mfu(facts)]
    eta = formatting.number(facts.summary.get("eta_s"))
    if eta is not None and eta > 0:
        parts.append(_("done in %(time)s") % {"time": formatting.estimate(eta)})
    return _capital(", ".join(part for part in parts if part)) + "." + _stale(facts)


def _trying(trying: Mapping[str, Any]) -> str:
    values = {"number": trying.get("number"), "count": trying.get("count")}
    if trying.get("again"):
        return _("Trying plan %(number)s of %(count)s again, before the first step.") % values
    return _("Trying plan %(number)s of %(count)s, before the first step.") % values


def _stopping(facts: RunFacts) -> str:
    if facts.kind in inference_headlines.KINDS:
        return inference_headlines.stopping(facts)
    text = {
        "pause": _("Pausing: it saves a checkpoint and releases its devices"),
        "cancel": _("Cancelling: it releases its devices"),
    }.get(facts.requested, _("Stopping: it releases its devices"))
    progress = _progress(facts)
    return text + (_("; last: %(progress)s.") % {"progress": progress} if progress else ".")


def _paused(facts: RunFacts) -> str:
    if facts.kind in inference_headlines.KINDS:
        return inference_headlines.paused(facts)
    progress = _progress(facts)
    text = _("Paused before its first step.")
    if progress:
        text = _("Paused at %(progress)s.") % {"progress": progress}
    return text + " " + _("Resume continues from the newest checkpoint.")


def _finished(facts: RunFacts) -> str:
    if facts.kind in inference_headlines.KINDS:
        return inference_headlines.finished(facts)
    if facts.kind == "produce":
        return inference_headlines.produced(facts)
    step = int(facts.summary.get("step") or 0)
    took = ""
    if facts.runtime_s:
        took = _(" in %(time)s") % {"time": formatting.duration(facts.runtime_s)}
    steps = ngettext("%(count)s step", "%(count)s steps", step) % {"count": f"{step:,}"}
    if facts.kind == "benchmark":  # its newest numbers are those of one variant
        text = _("Benchmark finished%(took)s") % {"took": took}
        return text + (_(": %(steps)s in total.") % {"steps": steps} if step else ".")
    text = (_("Finished %(steps)s") % {"steps": steps} if step else _("Finished")) + took
    parts = [
        part
        for part in (
            _loss(facts, trending=False),
            _validation(facts),
            _skipped(facts),
            _speed(facts, typical=True),
            _mfu(facts),
        )
        if part
    ]
    return text + (f": {', '.join(parts)}." if parts else ".")


def _failed(facts: RunFacts) -> str:
    details = facts.exit or {}
    inference = facts.kind in inference_headlines.KINDS
    # step numbers of an inference engine mean nothing to users
    step = None if inference else details.get("step") or facts.summary.get("step")
    text = _("Failed")
    if isinstance(step, int):
        text += _(" at step %(step)s") % {"step": f"{step:,}"}
    if details.get("rank") is not None:
        text += _(" on rank %(rank)s") % {"rank": details["rank"]}
    reason = str(details.get("reason") or _("no reason was reported")).rstrip(".")
    reason = reason.removeprefix(f"Rank {details.get('rank')}: ")  # already part of the sentence
    if facts.kind == "external":  # Orrery did not start it: it cannot be retried or cloned
        known = details.get("reason")
        reason = reason if known else _("its program reported no reason")
        return f"{text}: {reason}." + ("" if known else " " + _("See its logs."))
    advice = {**_ADVICE, **inference_headlines.ADVICE} if inference else _ADVICE
    default = gettext_noop("See the logs, then retry.")
    return f"{text}: {reason}. {_(advice.get(str(details.get('class')), default))}"


def _cancelled(facts: RunFacts) -> str:
    reason = str((facts.exit or {}).get("reason") or "").rstrip(".")
    if facts.kind in inference_headlines.KINDS:
        return inference_headlines.cancelled(facts, reason)
    progress = _progress(facts)
    text = _("Cancelled")
    if reason.lower().startswith("cancelled "):  # by whom, or on request
        text, reason = f"{text} {reason[len('cancelled ') :]}", ""
    if progress:
        text = _("%(cancelled)s at %(progress)s") % {"cancelled": text, "progress": progress}
    return text + (f": {_lower(reason)}." if reason else ".")


_ADVICE: Final = {
    "user_error": gettext_noop("Fix the cause, then clone or retry."),
    "out_of_memory": gettext_noop(
        "Use a smaller micro-batch, more recomputation or a higher ZeRO stage."
    ),
    "numerics": gettext_noop(
        "Lower the learning rate or use bf16; the events show the first bad step."
    ),
    "hang": gettext_noop("See the last lines of the slowest rank, then retry."),
    "infrastructure": gettext_noop("The machine failed, not the program. Retry the run."),
    "preempted": gettext_noop("Retry continues from the newest checkpoint."),
    "lost": gettext_noop(
        "The node stopped responding: retry continues from the newest checkpoint."
    ),
}


def _progress(facts: RunFacts) -> str:
    step, steps = facts.summary.get("step"), facts.summary.get("steps")
    if step is None:
        return ""
    text = _("step %(step)s") % {"step": f"{step:,}"}
    if steps:
        text = _("step %(step)s of %(steps)s") % {"step": f"{step:,}", "steps": f"{steps:,}"}
    return text + (_(" over all variants") if facts.kind == "benchmark" else "")


def _loss(facts: RunFacts, trending: bool = True) -> str:
    if "loss" not in facts.summary:
        return ""
    loss = formatting.number(facts.summary["loss"])
    if loss is None:
        return _("the loss is not finite")
    direction = trend(facts.loss_curve) if trending else ""
    text = _("loss %(value)s") % {"value": f"{loss:.3f}"}
    return text + (f" ({_(_TRENDS[direction])})" if direction else "")


def _skipped(facts: RunFacts) -> str:
    """Report skipped updates if they are more than a loss scale needs to settle."""
    skipped = int(formatting.number(facts.summary.get("skipped_updates")) or 0)
    step = int(facts.summary.get("step") or 0)
    if skipped < MANY_SKIPPED and (not step or skipped < step):
        return ""
    return _("%(count)s of %(steps)s updates skipped by overflow") % {
        "count": f"{skipped:,}",
        "steps": f"{step:,}",
    }


_TRENDS: Final = {
    "falling": gettext_noop("falling"),
    "flat": gettext_noop("flat"),
    "rising": gettext_noop("rising"),
}


def _validation(facts: RunFacts) -> str:
    loss = formatting.number(facts.summary.get("val_loss"))
    return _("validation loss %(value)s") % {"value": f"{loss:.3f}"} if loss is not None else ""


def _speed(facts: RunFacts, typical: bool = False) -> str:
    speed = formatting.number(facts.summary.get("tokens_per_s"))
    text = _("median %(count)s tokens/s") if typical else _("%(count)s tokens/s")
    return text % {"count": formatting.quantity(speed)} if speed else ""


def _mfu(facts: RunFacts) -> str:
    mfu = formatting.number(facts.summary.get("mfu"))
    if mfu is None:
        return ""
    text = _("MFU %(value)s") % {"value": formatting.percent(mfu)}
    predicted = formatting.number(facts.predicted_mfu)
    if predicted:
        text += _(" (%(value)s predicted)") % {"value": formatting.percent(predicted)}
    return text


def _stale(facts: RunFacts) -> str:
    age = facts.last_step_s
    speed, step_time = (
        formatting.number(facts.summary.get("tokens_per_s")),
        formatting.number(facts.summary.get("step_time_s")),
    )
    usual = step_time or (STALE_S / 10 if speed else 0)
    if age is None or age < max(STALE_S, 10 * usual):
        return ""
    return " " + _("No step for %(time)s: the run may hang.") % {"time": formatting.duration(age)}


def _problems(troubles: Sequence[str]) -> str:
    return "".join(f" {_capital(trouble).rstrip('.')}." for trouble in troubles)


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _lower(text: str) -> str:
    """Lower the first letter, unless the first word is a name or an abbreviation."""
    head = text.split(" ", 1)[0]
    return text[:1].lower() + text[1:] if head[1:].islower() or len(head) == 1 else text
