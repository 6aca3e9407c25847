"""Verdicts of the supervisor itself: a stop on request, an unusable run directory, a limit."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from workers.launcher import rendezvous
from workers.launcher.exits.classification import RankExit, Verdict
from workers.launcher.rundir import RunDir
from workers.launcher.stopping import StopSequence


def requested(stopping: StopSequence, verdict: Verdict) -> Verdict:
    """The verdict on ranks that exited because a stop was requested."""
    reasons = {
        "cancel": ("cancelled", "Cancelled on request."),
        "kill": ("cancelled", "Killed by the control plane."),
        "pause": ("preempted", "Paused on request."),
        "preempt": ("preempted", "Preempted on request; exited after its last step."),
    }
    exit_class, reason = reasons[stopping.action or "cancel"]
    return Verdict(
        exit_class,
        stopping.reason or reason,
        step=verdict.step,
        code=verdict.code,
        time=verdict.time,
    )


def unwritable_verdict(run_dir: RunDir, error: OSError, node: str) -> Verdict:
    """The verdict if the run directory or the rendezvous failed on this node."""
    if isinstance(error, rendezvous.NoRendezvous):
        return Verdict("infrastructure", str(error), time=time.time())
    message = (
        f"Run directory {run_dir} on node {node} cannot be used: {error.strerror or error}. Check "
        "free space and permissions there."
    )
    return Verdict("infrastructure", message, time=time.time())


def limit_verdict(limit_s: float) -> Verdict:
    """The verdict on a run that reached its limit of this many seconds."""
    message = (
        f"Reached its limit of {limit_s:g} s (resources.max_seconds); allow more time, "
        "or request fewer steps."
    )
    return Verdict("user_error", message, time=time.time())


def with_server_reason(
    verdict: Verdict, ends: Sequence[RankExit], stopping: StopSequence
) -> Verdict:
    """The verdict on a server that ended well: why it stopped, and after how many requests."""
    reason = next(
        (str(end.record["reason"]) for end in ends if end.record.get("reason")), verdict.reason
    )
    return replace(verdict, reason=" ".join(filter(None, (stopping.reason, f"Rank 0 {reason}."))))
