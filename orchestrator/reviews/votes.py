"""Votes on two models' answers: the win rate with its interval, and preference pairs.

Reads only. A tie, also of two bad answers, counts as half a win.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from django.db.models import Count, QuerySet

from orchestrator.accounts import selectors as people
from orchestrator.accounts.models import User
from orchestrator.common.errors import missing_object
from orchestrator.common.units import is_id, iso
from orchestrator.reviews.models import ComparisonTurn, ModelComparison

Z: Final = 1.959964  # 95%
_TIES: Final = ("tie", "both_bad")


@dataclass(frozen=True, slots=True)
class PairVotes:
    """Votes on two models: `wins` of the first, its win rate, and the rate's 95% interval."""

    first: str
    second: str
    wins: int
    losses: int
    ties: int
    both_bad: int
    win_rate: float | None
    low: float | None
    high: float | None


def comparisons_visible_to(*, user: User) -> QuerySet[ModelComparison]:
    """Comparisons of the user and of team members."""
    rows = ModelComparison.objects.select_related("owner")
    owners = people.visible_owners(user)
    return rows if owners is None else rows.filter(owner_id__in=owners)


def comparison_get(*, user: User, id: int | str) -> ModelComparison:
    """The comparison with this id. Raises 404."""
    row = comparisons_visible_to(user=user).filter(pk=int(id)).first() if is_id(id) else None
    if row is None:
        raise missing_object("model comparison", id)
    return row


def labels(comparison: ModelComparison) -> list[str]:
    """The names of both models: a model may be served by several runs."""
    return [
        f"{model} (run {run})"
        for model, run in zip(comparison.model_ids, comparison.runs, strict=True)
    ]


def shown_labels(turn: ComparisonTurn) -> list[str]:
    """The names of both models in the order of the turn's answers."""
    names = labels(turn.comparison)
    return [names[turn.first_model], names[1 - turn.first_model]]


def table(*, user: User, comparison: ModelComparison | None = None) -> list[PairVotes]:
    """Votes per pair of models over all visible comparisons, or of one; most votes first."""
    visible = comparisons_visible_to(user=user)
    if comparison is not None:
        visible = visible.filter(pk=comparison.pk)
    rows = (
        ComparisonTurn.objects.filter(comparison__in=visible)
        .exclude(choice="")
        .order_by()
        .values_list("comparison", "first_model", "choice")
        .annotate(Count("pk"))
    )
    names = {row.pk: labels(row) for row in visible}
    counts: dict[tuple[str, str], dict[str, int]] = {}
    for id, first_model, choice, number in rows:
        pair = tuple(sorted(names[id]))
        key = (pair[0], pair[1])
        outcome = choice
        if choice in ("a", "b"):
            shown = names[id][first_model], names[id][1 - first_model]
            winner = shown[0] if choice == "a" else shown[1]
            outcome = "wins" if winner == key[0] else "losses"
        of_pair = counts.setdefault(key, dict.fromkeys(("wins", "losses", *_TIES), 0))
        of_pair[outcome] += number
    pairs = [_pair_votes(key, of_pair) for key, of_pair in counts.items()]
    return sorted(pairs, key=lambda each: (-(each.wins + each.losses + each.ties), each.first))


def wilson(successes: float, trials: int) -> tuple[float, float]:
    """The 95% interval of a share (Wilson 1927)."""
    share, z2 = successes / trials, Z * Z
    center = (share + z2 / (2 * trials)) / (1 + z2 / trials)
    half = (
        Z / (1 + z2 / trials) * math.sqrt(share * (1 - share) / trials + z2 / (4 * trials * trials))
    )
    return max(0.0, center - half), min(1.0, center + half)


def preference_lines(comparison: ModelComparison) -> Iterator[dict[str, Any]]:
    """A preference pair for each vote for one of two different answers."""
    turns = ComparisonTurn.objects.filter(comparison=comparison, choice__in=("a", "b"))
    turns = turns.select_related("comparison")
    for turn in turns.order_by("pk").iterator():
        place = 0 if turn.choice == "a" else 1
        chosen, rejected = turn.answers[place], turn.answers[1 - place]
        if chosen == rejected or not chosen.strip() or not rejected.strip():
            continue
        shown = shown_labels(turn)
        yield {
            "prompt": turn.messages,
            "chosen": [{"role": "assistant", "content": chosen}],
            "rejected": [{"role": "assistant", "content": rejected}],
            "vote": {
                "comparison": comparison.pk,
                "turn": turn.pk,
                "by": turn.by,
                "time": iso(turn.voted) if turn.voted else None,
                "chosen_model": shown[place],
                "rejected_model": shown[1 - place],
                "sampling": comparison.sampling,
            },
        }


def _pair_votes(key: tuple[str, str], counts: dict[str, int]) -> PairVotes:
    ties = counts["tie"] + counts["both_bad"]
    trials = counts["wins"] + counts["losses"] + ties
    successes = counts["wins"] + ties / 2
    low, high = wilson(successes, trials) if trials else (None, None)
    return PairVotes(
        first=key[0],
        second=key[1],
        wins=counts["wins"],
        losses=counts["losses"],
        ties=counts["tie"],
        both_bad=counts["both_bad"],
        win_rate=successes / trials if trials else None,
        low=low,
        high=high,
    )
