"""Blind votes of people between the answers of an evaluate run before and after training.

Which answer is shown as `a` follows from a keyed hash of run, example and person, so it needs no
state and cannot be predicted. Does not depend on the judge of a run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from django.db import IntegrityError, transaction
from django.db.models import Count
from django.utils.crypto import salted_hmac

from orchestrator.accounts import services as accounts
from orchestrator.accounts.models import User
from orchestrator.accounts.roles import Role
from orchestrator.common.errors import conflict, invalid
from orchestrator.reviews.models import AnswerVote
from orchestrator.reviews.votes import wilson
from orchestrator.runs.models import Run
from orchestrator.runs.outputs.evaluation_results import AnswerPair, answer_pairs, evaluated
from workers.contracts.wire.serving_reports import Wins

CHOICES = ("a", "b", "tie")


@dataclass(frozen=True, slots=True)
class BlindPair:
    """An example's answers as shown to one person; `example` counts from 0."""

    example: int
    prompt: str | None
    a: str
    b: str


@dataclass(frozen=True, slots=True)
class VoteState:
    """What people chose so far (`wins` of the answers after training; None without votes).

    `pairs` have two different answers; `next` is the viewer's next one, `open_ids` are the ids of
    all examples that the viewer may still vote on: a page that shows their answers by model ends
    the blindness. `is_available` is false if the run has no baseline or its files are on
    another machine.
    """

    is_available: bool
    wins: Wins | None
    voters: int
    pairs: int
    next: BlindPair | None
    open_ids: tuple[Any, ...] = ()


def vote_state(*, run: Run, user: User) -> VoteState:
    """Votes on the run's answers and the pair that `user` sees next."""
    pairs = _pairs(run)
    rows = AnswerVote.objects.filter(run=run)
    voted = set(rows.filter(by=user.username).values_list("example", flat=True))
    waiting = [pair for pair in pairs or () if pair.example not in voted]
    # each person begins elsewhere, so that few votes of many people reach many examples
    following = min(waiting, key=lambda pair: _digest(run, pair, user, "order"), default=None)
    return VoteState(
        is_available=pairs is not None,
        wins=_wins(run),
        voters=rows.values("by").distinct().count(),
        pairs=len(pairs or ()),
        next=None if following is None else _blind(run, following, user),
        open_ids=tuple(pair.id for pair in waiting),
    )


def vote(*, run: Run, by: User, example: int, choice: str) -> AnswerVote:
    """Store a person's vote on an example, once. Raises 403 for viewers, 409, 422."""
    accounts.require_role(by, Role.SUBMITTER, "vote")
    if choice not in CHOICES:
        raise invalid("choice", f"{choice!r} is not a vote", f"Use one of {', '.join(CHOICES)}.")
    pair = next((each for each in _pairs(run) or () if each.example == example), None)
    if pair is None:
        message = f"run {run.pk} has no two different answers to example {example}"
        raise invalid("example", message, "Use an example of `next`.")
    outcome = "tie" if choice == "tie" else "loss"
    if choice != "tie" and (choice == "a") == _after_first(run, pair, by):
        outcome = "win"
    try:
        with transaction.atomic():
            return AnswerVote.objects.create(
                run=run, example=example, by=by.username, outcome=outcome
            )
    except IntegrityError:
        raise conflict("You voted on this example.", type="already-voted") from None


def _pairs(run: Run) -> Sequence[AnswerPair] | None:
    results = evaluated(run=run)
    return None if results is None else answer_pairs(run=run, evaluation=results)


def _wins(run: Run) -> Wins | None:
    rows = AnswerVote.objects.filter(run=run).order_by().values_list("outcome")
    counts = dict(rows.annotate(Count("pk")))
    wins, losses, ties = (counts.get(name, 0) for name in ("win", "loss", "tie"))
    trials = wins + losses + ties
    if not trials:
        return None
    low, high = wilson(wins + ties / 2, trials)
    return Wins(
        wins=wins, losses=losses, ties=ties, rate=(wins + ties / 2) / trials, low=low, high=high
    )


def _blind(run: Run, pair: AnswerPair, user: User) -> BlindPair:
    texts = (
        (pair.after, pair.before) if _after_first(run, pair, user) else (pair.before, pair.after)
    )
    return BlindPair(pair.example, pair.prompt, *texts)


def _after_first(run: Run, pair: AnswerPair, user: User) -> bool:
    return int(_digest(run, pair, user, "side")[:2], 16) % 2 == 0


def _digest(run: Run, pair: AnswerPair, user: User, purpose: str) -> str:
    text = f"{run.pk}/{pair.example}/{user.username}"
    return salted_hmac(f"orrery.answer-votes.{purpose}", text).hexdigest()
