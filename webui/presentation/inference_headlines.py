"""Headlines of inference runs, serve, generate and evaluate, and of produce runs.

Pure functions of plain numbers; `run_headlines` calls them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from django.utils.translation import gettext as _
from django.utils.translation import gettext_noop, ngettext

from webui.presentation import formatting

if TYPE_CHECKING:
    from webui.presentation.run_headlines import RunFacts

KINDS: Final = frozenset({"serve", "generate", "evaluate"})
ADVICE: Final = {
    "out_of_memory": gettext_noop(
        "Use fewer concurrent sequences, fewer cache blocks or quantized weights."
    ),
    "numerics": gettext_noop("Use fp32 or bf16; the logs show where it began."),
    "preempted": gettext_noop("Retry continues with the prompts that have no answer yet."),
    "lost": gettext_noop("The node stopped responding: retry starts again on another node."),
}


def running(facts: RunFacts) -> str:
    """Describe the progress of a running inference run."""
    if facts.kind == "serve":
        return _serving(facts)
    if facts.kind == "generate":
        return _generating(facts)
    evaluated = round(formatting.number(facts.summary.get("inference/answered")) or 0)
    if not evaluated:
        return _("Loading model and data.")
    text = ngettext("Evaluated %(count)s example", "Evaluated %(count)s examples", evaluated)
    return text % {"count": f"{evaluated:,}"} + _rate(facts) + "."


def _generating(facts: RunFacts) -> str:
    done, total = facts.answered or (0, None)
    if not done:
        return _("Loading the model; no answer yet.")
    if not total:
        return _answers(done) + _rate(facts) + "."
    text = _("Generated %(done)s of %(total)s answers") % {
        "done": f"{done:,}",
        "total": f"{total:,}",
    }
    text += _rate(facts)
    if facts.runtime_s and 0 < done < total:
        left = formatting.estimate(facts.runtime_s / done * (total - done))
        text += _(", done in %(time)s") % {"time": left}
    return text + "."


def _serving(facts: RunFacts) -> str:
    if facts.phase == "draining":
        return _("Draining: running requests finish, new requests are refused.")
    if facts.phase != "serving":
        return _("Loading the model; it will serve in a moment.")
    active, waiting = (
        formatting.number(facts.summary.get(f"inference/{name}")) for name in ("running", "waiting")
    )
    first, per_token = (
        formatting.number(facts.summary.get(f"inference/{name}")) for name in ("ttft_s", "tpot_s")
    )
    score = formatting.number(facts.summary.get("inference/score_s"))
    if first is None and score is None and not active:
        return _("Serving; no request yet.")
    count = round(active or 0)
    load = _("Serving: idle")
    if count:
        load = ngettext(
            "Serving: %(count)s request running", "Serving: %(count)s requests running", count
        ) % {"count": f"{count:,}"}
    if waiting:
        load += _(", %(count)s waiting") % {"count": f"{round(waiting):,}"}
    latency = []
    if first:
        latency.append(_("time to first token %(time)s") % {"time": formatting.seconds(first)})
    if per_token:
        latency.append(_("%(time)s per token") % {"time": formatting.seconds(per_token)})
    if score:
        latency.append(_("%(time)s per score") % {"time": formatting.seconds(score)})
    text = load + (f"; {', '.join(latency)}" if latency else "")
    return text + (_rate(facts) if active else "") + "."


def finished(facts: RunFacts) -> str:
    """Describe the result of a finished inference run."""
    time = _(" in %(time)s") % {"time": formatting.duration(facts.runtime_s)}
    time = time if facts.runtime_s else ""
    if facts.kind == "generate":
        done = facts.answered[0] if facts.answered else None
        return (_answers(done) if done else _("Generated all answers")) + time + _rate(facts) + "."
    if facts.kind == "evaluate":
        metrics = [
            f"{name.replace('_', ' ')} {formatting.quantity(value, 4)}"
            for name, value in (facts.metrics or {}).items()
        ]
        text = _("Evaluated") + time
        return f"{text}: {formatting.listed(metrics[:4])}." if metrics else f"{text}."
    if not facts.runtime_s:
        return _("Stopped on request.")
    return _("Served for %(time)s, then stopped on request.") % {
        "time": formatting.duration(facts.runtime_s)
    }


def stopping(facts: RunFacts) -> str:
    """Describe an inference run that releases its devices."""
    if facts.kind == "serve":
        return _("Stopping: running requests finish, new requests are refused.")
    return _("Stopping; %(results)s.") % {"results": _saved(facts)}


def paused(facts: RunFacts) -> str:
    """Describe a paused inference run."""
    if facts.kind == "serve":
        return _("Paused. Resume starts the server again; its address on the node may change.")
    return _("Paused; %(results)s. Resume continues from there.") % {"results": _saved(facts)}


def cancelled(facts: RunFacts, reason: str) -> str:
    """Describe a cancelled inference run."""
    if facts.kind == "serve":
        text = _("Stopped before it served")
        if facts.runtime_s:
            time = formatting.duration(facts.runtime_s)
            text = _("Served for %(time)s; stopped") % {"time": time}
        return f"{text}{f': {reason[:1].lower()}{reason[1:]}' if reason else ''}."
    if facts.answered:
        return _("Cancelled; %(results)s.") % {"results": _saved(facts)}
    return _("Cancelled") + (f": {reason}." if reason else ".")


def _answers(count: int) -> str:
    text = ngettext("Generated %(count)s answer", "Generated %(count)s answers", count)
    return text % {"count": f"{count:,}"}


def _saved(facts: RunFacts) -> str:
    if facts.kind == "generate" and facts.answered:
        count = facts.answered[0]
        text = ngettext("%(count)s answer is saved", "%(count)s answers are saved", count)
        return text % {"count": f"{count:,}"}
    return _("completed results are saved")


def _rate(facts: RunFacts) -> str:
    speed = formatting.number(facts.summary.get("inference/tokens_per_s"))
    if speed:
        return _(", %(count)s tokens/s") % {"count": formatting.quantity(speed)}
    scores = formatting.number(facts.summary.get("inference/scores_per_s"))
    return _(", %(count)s scores/s") % {"count": formatting.quantity(scores)} if scores else ""


def producing(facts: RunFacts) -> str:
    """Describe the progress of a running produce run."""
    if facts.summary.get("produce/candidates") is None:
        return _("Waiting for the server's first answers.")
    text = _produced_lines(facts)
    speed = formatting.number(facts.summary.get("produce/lines_per_s"))
    if speed:
        text += _(", %(speed)s lines/s") % {"speed": formatting.quantity(speed)}
    accepted = _accepted(facts)
    if facts.runtime_s and facts.wanted and 0 < accepted < facts.wanted:
        left = facts.runtime_s / accepted * (facts.wanted - accepted)
        text += _(", done in %(time)s") % {"time": formatting.estimate(left)}
    return text + "."


def produced(facts: RunFacts) -> str:
    """Describe what a finished produce run has made."""
    text = _produced_lines(facts)
    if facts.runtime_s:
        text += _(" in %(time)s") % {"time": formatting.duration(facts.runtime_s)}
    return text + "."


def _produced_lines(facts: RunFacts) -> str:
    accepted = _accepted(facts)
    rejected = round(formatting.number(facts.summary.get("produce/rejected")) or 0)
    text = ngettext("%(count)s line accepted", "%(count)s lines accepted", accepted) % {
        "count": f"{accepted:,}"
    }
    if facts.wanted and accepted != facts.wanted:
        text = _("%(count)s of %(wanted)s lines accepted") % {
            "count": f"{accepted:,}",
            "wanted": f"{facts.wanted:,}",
        }
    return text + _(", %(count)s rejected") % {"count": f"{rejected:,}"}


def _accepted(facts: RunFacts) -> int:
    return round(formatting.number(facts.summary.get("produce/accepted")) or 0)
