"""The headline of runs that answer: how a served model keeps up, how far a file of prompts is, what
a judgement found.

Pure functions of plain numbers, as `sentences`, whose other half this is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from webui.presentation import formatting

if TYPE_CHECKING:
    from webui.presentation.run_headlines import RunFacts

TOLD: Final = frozenset({"serve", "generate", "evaluate"})
ADVICE: Final = {
    "out_of_memory": (
        "Fewer sequences at once, fewer cache blocks or quantised weights would need less."
    ),
    "numerics": "fp32 or bf16 usually helps; the logs show where it began.",
    "preempted": "Retry goes on with what is not answered yet.",
    "lost": "Its node went silent: retry begins again on another.",
}


def running(facts: RunFacts) -> str:
    if facts.kind == "serve":
        return _serving(facts)
    if facts.kind == "generate":
        done, of = facts.answered or (0, None)
        if not done:
            return "Loading its model; no line is answered yet."
        far = (
            f"Answered {done:,} of {of:,} lines"
            if of
            else f"Answered {formatting.count(done, 'line')}"
        )
        togo = ""
        if of and facts.runtime_s and 0 < done < of:
            togo = f", done in about {formatting.duration(facts.runtime_s / done * (of - done))}"
        return f"{far}{_rate(facts)}{togo}."
    judged = formatting.number(facts.summary.get("inference/answered"))
    return (
        f"Judged {formatting.count(round(judged), 'line')}{_rate(facts)}."
        if judged
        else "Loading model and data."
    )


def _serving(facts: RunFacts) -> str:
    if facts.standing == "draining":
        return "Ends what it has begun, and takes no new requests."
    if facts.standing != "serving":
        return "Loading its model; it serves in a moment."
    now, waits = (
        formatting.number(facts.summary.get(f"inference/{name}")) for name in ("running", "waiting")
    )
    first, pace = (
        formatting.number(facts.summary.get(f"inference/{name}")) for name in ("ttft_s", "tpot_s")
    )
    if first is None and not now:
        return "Serves, and waits for its first request."
    load = (
        f"{formatting.count(round(now), 'answer')} on the way" if now else "nothing to do just now"
    )
    queue = f", {round(waits):,} waiting" if waits else ""
    speed = [
        f"first token after {formatting.seconds(first)}" if first else "",
        f"{formatting.seconds(pace)} a token" if pace else "",
    ]
    said = ", then ".join(part for part in speed if part)
    return (
        f"Serves: {load}{queue}"
        + (f"; {said}" if said else "")
        + (_rate(facts) if now else "")
        + "."
    )


def finished(facts: RunFacts) -> str:
    took = f" in {formatting.duration(facts.runtime_s)}" if facts.runtime_s else ""
    if facts.kind == "generate":
        done = facts.answered[0] if facts.answered else None
        return f"Answered {formatting.count(done, 'line') if done else 'every line'}{took}{_rate(facts)}."
    if facts.kind == "evaluate":
        found = [
            f"{name.replace('_', ' ')} {formatting.quantity(value, 4)}"
            for name, value in (facts.metrics or {}).items()
        ]
        return f"Judged{took}: {formatting.listed(found[:4])}." if found else f"Judged{took}."
    return (
        f"Served{f' for {formatting.duration(facts.runtime_s)}' if facts.runtime_s else ''}, and "
        "was asked to end."
    )


def stopping(facts: RunFacts) -> str:
    if facts.kind == "serve":
        return "Ends what it has begun and leaves its devices; it takes no new requests."
    return f"It is leaving its devices; {_kept(facts)}."


def paused(facts: RunFacts) -> str:
    if facts.kind == "serve":
        return "Paused: it serves again, at another address of its node, once it is resumed."
    return f"Paused; {_kept(facts)}. Resume goes on after that."


def cancelled(facts: RunFacts, reason: str) -> str:
    if facts.kind == "serve":
        ran = (
            f"Served for {formatting.duration(facts.runtime_s)}; stopped"
            if facts.runtime_s
            else "Stopped before it served"
        )
        return f"{ran}{f': {reason[:1].lower()}{reason[1:]}' if reason else ''}."
    return (
        f"Cancelled; {_kept(facts)}."
        if facts.answered
        else f"Cancelled{f': {reason}' if reason else ''}."
    )


def _kept(facts: RunFacts) -> str:
    if facts.kind == "generate" and facts.answered:
        return f"{formatting.count(facts.answered[0], 'answer')} stay"
    return "what is done stays"


def _rate(facts: RunFacts) -> str:
    speed = formatting.number(facts.summary.get("inference/tokens_per_s"))
    return f", {formatting.quantity(speed)} tokens/s" if speed else ""
