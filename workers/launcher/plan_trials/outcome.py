"""What follows from results of trials: the plan to run with, or why the attempt ends. Pure."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from workers.contracts.wire.maintenance.plan_trials import (
    TrialCandidate,
    TrialResult,
    TrialsOrder,
    fastest,
)
from workers.launcher.exits.classification import Verdict

# exits of ranks that say something about the plan they tried, not about the machine
OF_PLANS: Final = frozenset({"out_of_memory", "user_error", "numerics", "hang"})
_MOST_INTERRUPTED: Final = 2
_SHORT: Final = 160  # characters of a reason in a list of reasons


@dataclass(frozen=True)
class Chosen:
    """The plan that was measured fastest, and a sentence why."""

    index: int
    plan: dict[str, Any]
    reason: str


def choose(order: TrialsOrder, results: Sequence[TrialResult], ended: str) -> Chosen | Verdict:
    """The fastest plan; a verdict with every plan's reason if all failed."""
    best = fastest(results)
    if best is None:
        return all_failed(order, results)
    plans = {each.index: each for each in order.candidates}
    timed = [each for each in results if each.step_time_s is not None and each.state != "failed"]
    reason = (
        f"Plan {best.index + 1} is the fastest of {len(timed)} measured plans: "
        f"{_time(best.step_time_s or 0.0)} per step, predicted "
        f"{_time(plans[best.index].step_time_s)}; {ended or 'the trials ended'}."
    )
    return Chosen(best.index, plans[best.index].plan, reason)


def all_failed(order: TrialsOrder, results: Sequence[TrialResult]) -> Verdict:
    """The verdict if no plan could be measured: the class of the plan that was predicted best."""
    failed = sorted((each for each in results if each.state == "failed"), key=lambda r: r.index)
    classes = [each.exit_class or "user_error" for each in failed]
    exit_class = classes[0] if classes else "infrastructure"
    reasons = "; ".join(f"plan {each.index + 1}: {_short(each.message)}" for each in failed)
    message = f"None of {len(order.candidates)} plans could be tried. {reasons}"
    return Verdict(exit_class, message, time=time.time(), cause="plan_trials")


def failure_of(
    candidate: TrialCandidate, verdict: Verdict, *, seconds: float, before: TrialResult | None
) -> TrialResult:
    """The result of a plan during whose trial the ranks ended with this verdict."""
    return TrialResult(
        index=candidate.index,
        state="failed",
        steps=before.steps if before else 0,
        visits=(before.visits if before else 0) + 1,
        seconds=seconds + (before.seconds if before else 0.0),
        exit_class=verdict.exit_class,
        message=verdict.reason[:1000],
    )


def blames_plan(verdict: Verdict, *, nodes: int) -> bool:
    """Whether an exit during a trial disqualifies the plan; otherwise the machine failed.

    A rank that a signal ended crashed in the plan's code. With several nodes this node may only
    see that it lost the others.
    """
    crashed = verdict.signal is not None and verdict.signal != "SIGTERM"
    return nodes > 1 or verdict.exit_class in OF_PLANS or crashed


def as_failure(verdict: Verdict) -> Verdict:
    """The verdict with a class that describes the plan: a crash is not the fault of the machine."""
    crashed = verdict.exit_class == "infrastructure" and verdict.signal is not None
    return replace(verdict, exit_class="user_error") if crashed else verdict


def interrupted_twice(order: TrialsOrder) -> Iterable[TrialResult]:
    """Failed results of plans during whose trials two attempts ended."""
    known = {each.index for each in order.results if each.state == "failed"}
    counts: Mapping[int, int] = order.interrupted
    for candidate in order.candidates:
        if counts.get(candidate.index, 0) >= _MOST_INTERRUPTED and candidate.index not in known:
            yield TrialResult(
                index=candidate.index,
                state="failed",
                exit_class="infrastructure",
                message=f"{counts[candidate.index]} attempts ended while this plan was tried.",
            )


def _short(text: str) -> str:
    text = text.strip().rstrip(".")
    return text if len(text) <= _SHORT else f"{text[: _SHORT - 1]}…"


def _time(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"
