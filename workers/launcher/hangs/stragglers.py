"""Which rank the others wait for all the time, from when each came to their common collectives.
Pure.

Clocks are compared, so this is for ranks of one node. A rank that stands altogether is `watch`'s.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

LOOKS = 4  # looks that a verdict rests on; one each pulse, every two seconds
LATE_SHARE = 0.25  # of the time, that the others spend waiting for one rank
# times the share of the second latest: oversubscribed cores make everybody late at times
_MORE_THAN_NEXT = 3.0
_LEAST_NS = 2_000_000  # shorter waits are a scheduler's
Arrival = tuple[str, int, int]


@dataclass(frozen=True, slots=True)
class Latest:
    """`share` of the time the others waited for `rank`; it came `mean_s` after the one before."""

    rank: int
    share: float
    mean_s: float


@dataclass(slots=True)
class Lateness:
    """`look()` at each pulse of all ranks of a node; answers a rank once, and again after it was in
    time meanwhile.
    """

    _shares: deque[dict[int, tuple[float, float]]] = field(
        default_factory=lambda: deque(maxlen=LOOKS)
    )
    _told: int | None = None

    def look(self, arrivals: Mapping[int, Sequence[Arrival]]) -> Latest | None:
        found = waits(arrivals)
        if found is None:
            return None
        self._shares.append(found)
        if len(self._shares) < LOOKS:
            return None
        ranks = {rank for look in self._shares for rank in look}
        mean = {
            rank: sum(look.get(rank, (0.0, 0.0))[0] for look in self._shares) / LOOKS
            for rank in ranks
        }
        by_share = sorted(mean, key=lambda rank: -mean[rank])
        worst = by_share[0]
        next_share = mean[by_share[1]] if len(by_share) > 1 else 0.0
        always = sum(look.get(worst, (0.0, 0.0))[0] > LATE_SHARE / 2 for look in self._shares)
        late = (
            mean[worst] > LATE_SHARE
            and mean[worst] > _MORE_THAN_NEXT * next_share
            and always >= LOOKS - 1
        )
        if not late:
            if mean[worst] < LATE_SHARE / 2:
                self._told = None
            return None
        if self._told == worst:
            return None
        self._told = worst
        seconds = [look[worst][1] for look in self._shares if worst in look]
        return Latest(worst, mean[worst], sum(seconds) / len(seconds))


def waits(arrivals: Mapping[int, Sequence[Arrival]]) -> dict[int, tuple[float, float]] | None:
    """`{rank: (share of the time that the others waited for it, mean seconds it came after them)}`.

    From collectives that all members seen here came to; None where ranks have too few in common to
    tell.
    """
    members: dict[str, set[int]] = defaultdict(set)
    came: dict[tuple[str, int], dict[int, int]] = defaultdict(dict)
    for rank, some in arrivals.items():
        for group, number, ns in some:
            members[group].add(rank)
            came[group, number][rank] = ns
    spans: dict[int, list[tuple[int, int]]] = defaultdict(list)
    begin, end = None, None
    for (group, _), times in came.items():
        if len(times) < 2 or set(times) != members[group]:
            continue
        (last_ns, last), (before_ns, _) = sorted(
            ((ns, rank) for rank, ns in times.items()), reverse=True
        )[:2]
        begin = before_ns if begin is None else min(begin, before_ns)
        end = last_ns if end is None else max(end, last_ns)
        if last_ns - before_ns > _LEAST_NS:
            spans[last].append((before_ns, last_ns))
    if begin is None or end is None or end <= begin:
        return None
    return {
        rank: (_union(some) / (end - begin), sum(b - a for a, b in some) / len(some) / 1e9)
        for rank, some in spans.items()
    }


def _union(spans: Iterable[tuple[int, int]]) -> int:
    """Nanoseconds covered: buckets of one backward pass are late one upon the other."""
    total, reached = 0, 0
    for begin, end in sorted(spans):
        total += max(0, end - max(begin, reached))
        reached = max(reached, end)
    return total
