"""What an attempt's exit means for its run: over, paused, or once more, and when. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from workers.contracts.specs.run import Retries
from workers.contracts.wire.node_messages import ExitClass, RunState

_FIRST_WAIT_S = 1.0
_LONGEST_WAIT_S = 300.0

_WORDS = {
    ExitClass.USER_ERROR: "an error of its own program",
    ExitClass.OUT_OF_MEMORY: "out of memory",
    ExitClass.NUMERICS: "numbers that are not finite",
    ExitClass.HANG: "a hang",
    ExitClass.INFRASTRUCTURE: "a fault of the infrastructure",
    ExitClass.LOST: "the loss of a node",
}


@dataclass(frozen=True)
class Outcome:
    """The run's next state, its exit where that is an end, the budgets used by now, and the pause
    before a new try.
    """

    state: RunState
    why: str
    exit: dict[str, Any] | None = None
    budgets_used: dict[str, int] = field(default_factory=dict)
    wait_s: float = 0.0


def outcome(
    *,
    exit_class: ExitClass,
    exit: Mapping[str, Any],
    requested: str,
    attempt_requested: str,
    retries: Retries,
    used: Mapping[str, int],
) -> Outcome:
    """`requested` is what a person asked of the run (cancel, pause or nothing), `attempt_requested`
    of the attempt.

    Success wins over any request. Then the request decides; an exit that the scheduler asked for
    never counts; other
    exits use up their class's budget, each try of a class waiting twice as long as the one before.
    """
    spent = dict(used)
    reason = _sentence(str(exit.get("reason") or ""))
    told = {**exit, "class": str(exit_class)}
    if exit_class == ExitClass.OK:
        reason = reason or "All work is done."
        return Outcome(RunState.FINISHED, reason, {**told, "reason": reason}, spent)
    if requested == "cancel":
        told |= {"class": str(ExitClass.CANCELLED), "reason": reason or "Cancelled on request."}
        return Outcome(RunState.CANCELLED, "Cancelled on request.", told, spent)
    if requested == "pause":
        return Outcome(RunState.PAUSED, "Paused on request.", None, spent)
    if exit_class == ExitClass.PREEMPTED or (
        exit_class == ExitClass.CANCELLED and attempt_requested == "preempt"
    ):
        return Outcome(
            RunState.QUEUED, reason or "Preempted; it goes on when devices are free.", None, spent
        )
    if exit_class == ExitClass.CANCELLED:
        return Outcome(RunState.CANCELLED, reason or "Ended on request.", told, spent)
    budget, so_far = retries.budget(str(exit_class)), spent.get(str(exit_class), 0)
    cause = _WORDS[exit_class]
    if budget is None or so_far < budget:
        spent[str(exit_class)] = so_far + 1
        wait_s = min(_FIRST_WAIT_S * 2**so_far, _LONGEST_WAIT_S)
        of = "" if budget is None else f" of {budget}"
        why = f"Ended by {cause}; retry {so_far + 1}{of} follows in {wait_s:.0f} s. {reason}"
        return Outcome(RunState.QUEUED, why.strip(), None, spent, wait_s)
    left = "it is not retried" if budget == 0 else f"its {budget} retries are used up"
    why = f"Ended by {cause}; {left}."
    return Outcome(RunState.FAILED, why, {**told, "reason": f"{reason} {why}".strip()}, spent)


def _sentence(text: str) -> str:
    text = text.strip()
    return text if not text or text[-1] in ".!?…" else f"{text}."
