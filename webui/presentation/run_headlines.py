"""The first line of a page, in words: is the fleet well, how is this run.

Pure functions of plain numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, pvariance
from typing import Any, Final

from webui.presentation import formatting
from webui.presentation import inference_headlines as answering

STALE_S: Final = 30.0  # a step that takes longer than this and ten usual ones is told
ENDED: Final = frozenset({"finished", "failed", "cancelled"})


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What the headline is made of.

    Times in seconds, `loss_curve` a short curve of the loss, oldest first.
    """

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
    last_point_s: float | None = None  # age of the newest point
    predicted_mfu: float | None = None
    standing: str = ""  # of a serve run: waiting, loading, serving, draining, ended
    answered: tuple[int, int | None] | None = None  # of a generate run: lines, of so many
    metrics: Mapping[str, float] | None = None  # of an evaluate run


def run_headline(facts: RunFacts) -> str:
    """How the run is doing, in one sentence or two."""
    teller = {
        "queued": _queued,
        "starting": _starting,
        "running": _running,
        "stopping": _stopping,
        "paused": _paused,
        "finished": _finished,
        "failed": _failed,
        "cancelled": _cancelled,
    }[facts.state]
    return teller(facts)


def trend(curve: Sequence[float]) -> str:
    """falling, flat or rising: the last third against the third before, beyond noise; empty for a
    short curve.
    """
    third = len(curve) // 3
    if third < 3:
        return ""
    last, before = curve[-third:], curve[-2 * third : -third]
    late, early = fmean(last), fmean(before)
    error = ((pvariance(last) + pvariance(before)) / third) ** 0.5
    least = 0.004 * abs(early) + 2.5 * error
    return "falling" if late < early - least else "rising" if late > early + least else "flat"


def overview(
    *,
    busy: int,
    devices: int,
    runs: int,
    waiting: int,
    waiting_devices: int,
    troubles: Sequence[str],
) -> str:
    """ "3 of 4 devices busy, 1 run, nothing waits, nothing wrong." """
    if not devices:
        return (
            "No node has joined yet, so nothing can run. Start an agent with a join token."
            + _wrong(troubles, " ")
        )
    waits = "nothing waits"
    if waiting:
        waits = f"{waiting:,} {'waits' if waiting == 1 else 'wait'}" + (
            f" for {formatting.count(waiting_devices, 'device')}" if waiting_devices else ""
        )
    parts = [
        f"{busy:,} of {formatting.count(devices, 'device')} busy",
        formatting.count(runs, "run") if runs else "no runs of yours" if busy else "no runs",
        waits,
        "nothing wrong" if not troubles else "",
    ]
    return ", ".join(part for part in parts if part) + "." + _wrong(troubles, " ")


def health(*, troubles: Sequence[str]) -> str:
    return (
        "Everything answers."
        if not troubles
        else " ".join(_sentence(trouble) for trouble in troubles)
    )


def _queued(facts: RunFacts) -> str:
    again = f" (attempt {facts.attempt} ended)" if facts.attempt else ""
    reason = facts.wait_reason.rstrip(".")
    if reason.lower().startswith("waits "):
        return f"Waits{again} {reason[6:]}."
    return f"Waits{again}: {_lower(reason) or 'the scheduler has not looked at it yet'}."


def _starting(facts: RunFacts) -> str:
    return f"Starting on {formatting.count(facts.devices, 'device')}" + (
        f", attempt {facts.attempt}." if facts.attempt > 1 else "."
    )


def _running(facts: RunFacts) -> str:
    if facts.kind in answering.TOLD:
        return answering.running(facts)
    if facts.summary.get("step") is None:
        return "Running; no step has been logged yet."
    parts = [_progress(facts)] if facts.kind == "benchmark" else _now(facts)
    eta = formatting.number(facts.summary.get("eta_s"))
    if eta is not None and eta > 0:
        parts.append(f"done in about {formatting.duration(eta)}")
    said = formatting.listed([part for part in parts if part])
    return _capital(said) + "." + _stale(facts)


def _now(facts: RunFacts) -> list[str]:
    return [_progress(facts), _loss(facts), _speed(facts), _mfu(facts)]


def _stopping(facts: RunFacts) -> str:
    if facts.kind in answering.TOLD:
        return answering.stopping(facts)
    why = {
        "pause": "It saves a checkpoint and leaves its devices",
        "cancel": "It was cancelled and is leaving its devices",
    }
    return (
        f"{why.get(facts.requested, 'It is leaving its devices')}; it was at "
        f"{_progress(facts) or 'its start'}."
    )


def _paused(facts: RunFacts) -> str:
    if facts.kind in answering.TOLD:
        return answering.paused(facts)
    return (
        f"Paused at {_progress(facts) or 'its start'}. Resume goes on from the newest checkpoint."
    )


def _finished(facts: RunFacts) -> str:
    if facts.kind in answering.TOLD:
        return answering.finished(facts)
    done = (
        formatting.count(int(facts.summary.get("step") or 0), "step")
        if facts.summary.get("step")
        else "its work"
    )
    took = f" in {formatting.duration(facts.runtime_s)}" if facts.runtime_s else ""
    if facts.kind == "benchmark":  # its newest numbers are those of one variant
        return f"Measured its variants{took}: {done} in all."
    parts = [
        part
        for part in (_loss(facts, trending=False), _validation(facts), _speed(facts), _mfu(facts))
        if part
    ]
    return f"Finished {done}{took}" + (f": {formatting.listed(parts)}." if parts else ".")


def _failed(facts: RunFacts) -> str:
    ending = facts.exit or {}
    where = ending.get("step") or facts.summary.get("step")
    if facts.kind in answering.TOLD:  # steps of an engine say nothing to anybody
        where = None
    rank = f" on rank {ending['rank']}" if ending.get("rank") is not None else ""
    reason = str(ending.get("reason") or "no reason was told").rstrip(".")
    said = f"Failed{f' at step {where:,}' if isinstance(where, int) else ''}{rank}: {reason}."
    advice = {**_ADVICE, **answering.ADVICE} if facts.kind in answering.TOLD else _ADVICE
    return f"{said} {advice.get(str(ending.get('class')), 'Look at the logs, then retry.')}"


def _cancelled(facts: RunFacts) -> str:
    reason = str((facts.exit or {}).get("reason") or "").rstrip(".")
    if facts.kind in answering.TOLD:
        return answering.cancelled(facts, reason)
    at = _progress(facts)
    return f"Cancelled{f' at {at}' if at else ''}" + (f": {_lower(reason)}." if reason else ".")


_ADVICE: Final = {
    "user_error": "Correct the cause, then clone or retry.",
    "out_of_memory": (
        "A smaller micro-batch, more recomputation or a higher ZeRO stage would need less."
    ),
    "numerics": "A lower learning rate or bf16 usually helps; the events show the first bad step.",
    "hang": "Look at the slowest rank's last lines, then retry.",
    "infrastructure": "The machine, not the program, failed: retry.",
    "preempted": "Retry goes on from the newest checkpoint.",
    "lost": "Its node went silent: retry goes on from the newest checkpoint.",
}


def _progress(facts: RunFacts) -> str:
    step, steps = facts.summary.get("step"), facts.summary.get("steps")
    if step is None:
        return ""
    of = " of all its variants" if facts.kind == "benchmark" else ""
    if not steps:
        return f"step {step:,}{of}"
    return f"step {step:,} of {steps:,}{of}"


def _loss(facts: RunFacts, trending: bool = True) -> str:
    if "loss" not in facts.summary:
        return ""
    loss = formatting.number(facts.summary["loss"])
    if loss is None:
        return "the loss is no longer a finite number"
    going = trend(facts.loss_curve) if trending else ""
    return f"loss {loss:.3f}" + (f" and {going}" if going else "")


def _validation(facts: RunFacts) -> str:
    loss = formatting.number(facts.summary.get("val_loss"))
    return f"validation {loss:.3f}" if loss is not None else ""


def _speed(facts: RunFacts) -> str:
    speed = formatting.number(facts.summary.get("tokens_per_s"))
    return f"{formatting.quantity(speed)} tokens/s" if speed else ""


def _mfu(facts: RunFacts) -> str:
    mfu = formatting.number(facts.summary.get("mfu"))
    if mfu is None:
        return ""
    predicted = formatting.number(facts.predicted_mfu)
    return f"MFU {formatting.percent(mfu)}" + (
        f" ({formatting.percent(predicted)} predicted)" if predicted else ""
    )


def _stale(facts: RunFacts) -> str:
    age = facts.last_point_s
    speed, step_time = (
        formatting.number(facts.summary.get("tokens_per_s")),
        formatting.number(facts.summary.get("step_time_s")),
    )
    usual = step_time or (STALE_S / 10 if speed else 0)
    if age is None or age < max(STALE_S, 10 * usual):
        return ""
    return f" No step for {formatting.duration(age)}: it may hang."


def _wrong(troubles: Sequence[str], before: str) -> str:
    return before + " ".join(_sentence(trouble) for trouble in troubles) if troubles else ""


def _sentence(text: str) -> str:
    return _capital(text).rstrip(".") + "."


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _lower(text: str) -> str:
    """The first letter small, unless the word is a name or a shortening."""
    head = text.split(" ", 1)[0]
    return text[:1].lower() + text[1:] if head[1:].islower() or len(head) == 1 else text
