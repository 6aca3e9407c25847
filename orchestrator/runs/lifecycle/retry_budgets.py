"""The run's next state after an attempt's exit: ended, paused, or queued with a back-off. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from workers.contracts.exit_classes import ExitClass
from workers.contracts.specs.run import Retries
from workers.contracts.wire.node_messages import RunState

PREFLIGHT = "preflight"  # cause of an exit before the user's program started
NODE_LOST = "node_lost"  # cause of an exit with a node that is lost
# cause of an exit whose job Orrery ended, because its run was cancelled or paused while it waited
RUN_STOPPED = "run_stopped"
_FIRST_WAIT_S = 1.0
_LONGEST_WAIT_S = 300.0

_CAUSES = {
    ExitClass.USER_ERROR: "an error in its own program",
    ExitClass.OUT_OF_MEMORY: "out of memory",
    ExitClass.NUMERICS: "non-finite numbers",
    ExitClass.HANG: "a hang",
    ExitClass.INFRASTRUCTURE: "an infrastructure failure",
    ExitClass.LOST: "the loss of a node",
}


@dataclass(frozen=True)
class Outcome:
    """The run's next state, its exit if it ended, the used budgets, and the back-off."""

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
    elastic: bool = False,
) -> Outcome:
    """The outcome of an exit.

    `requested` is the user's request to the run (cancel, pause or none), `attempt_requested` the
    request to the attempt. Success wins over any request, then the request decides. Preemptions,
    jobs that were stopped before the run was queued again, and failed preflight probes use no
    budget; other exits use the budget of their class. All but the first two have an exponential
    back-off. An elastic run that lost a node continues at once on the devices that are left, and
    uses no budget.
    """
    spent = dict(used)
    reason = _sentence(str(exit.get("reason") or ""))
    ending = {**exit, "class": str(exit_class)}
    if exit_class == ExitClass.OK:
        reason = reason or "All work is done."
        return Outcome(RunState.FINISHED, reason, {**ending, "reason": reason}, spent)
    if requested == "cancel":
        ending |= {"class": str(ExitClass.CANCELLED), "reason": reason or "Cancelled on request."}
        return Outcome(RunState.CANCELLED, "Cancelled on request.", ending, spent)
    if requested == "pause":
        return Outcome(RunState.PAUSED, "Paused on request.", None, spent)
    if exit.get("cause") == RUN_STOPPED:
        why = "It was queued again after its job was stopped; it continues in a new job."
        return Outcome(RunState.QUEUED, why, None, spent)
    if exit_class == ExitClass.PREEMPTED or (
        exit_class == ExitClass.CANCELLED and attempt_requested == "preempt"
    ):
        return Outcome(
            RunState.QUEUED, reason or "Preempted; it continues when devices are free.", None, spent
        )
    if exit.get("cause") == NODE_LOST and elastic:
        why = f"{reason} It continues on the devices that are left."
        return Outcome(RunState.QUEUED, why.strip(), None, spent)
    if exit_class == ExitClass.CANCELLED:
        return Outcome(RunState.CANCELLED, reason or "Ended on request.", ending, spent)
    if exit.get("cause") == PREFLIGHT:
        so_far = spent.get(PREFLIGHT, 0)
        spent[PREFLIGHT] = so_far + 1
        wait_s = min(_FIRST_WAIT_S * 2**so_far, _LONGEST_WAIT_S)
        why = (
            f"The devices failed their probe; the next attempt follows in {wait_s:.0f} s. {reason}"
        )
        return Outcome(RunState.QUEUED, why.strip(), None, spent, wait_s)
    budget, so_far = retries.budget(str(exit_class)), spent.get(str(exit_class), 0)
    cause = _CAUSES[exit_class]
    if budget is None or so_far < budget:
        spent[str(exit_class)] = so_far + 1
        wait_s = min(_FIRST_WAIT_S * 2**so_far, _LONGEST_WAIT_S)
        of = "" if budget is None else f" of {budget}"
        why = f"Ended by {cause}; retry {so_far + 1}{of} follows in {wait_s:.0f} s. {reason}"
        return Outcome(RunState.QUEUED, why.strip(), None, spent, wait_s)
    left = {0: "it is not retried", 1: "its only retry is used up"}.get(
        budget, f"its {budget} retries are used up"
    )
    why = f"Ended by {cause}; {left}."
    return Outcome(RunState.FAILED, why, {**ending, "reason": f"{reason} {why}".strip()}, spent)


def _sentence(text: str) -> str:
    text = text.strip()
    return text if not text or text[-1] in ".!?…" else f"{text}."
