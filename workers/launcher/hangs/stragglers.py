"""Straggler detection: which rank the others wait for, by arrival times at collectives. Pure.

Compares clocks, so it applies to ranks of one node. Does not detect stalls.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

LOOKS = 4  # looks per verdict; one per pulse, every two seconds
LATE_SHARE = 0.25  # share of the time that the others wait for one rank
# times the share of the second latest: with oversubscribed cores every rank is late at times
_MORE_THAN_NEXT = 3.0
_MIN_WAIT_NS = 2_000_000  # shorter waits come from the OS scheduler
Arrival = tuple[str, int, int]


@dataclass(frozen=True, slots=True)
class StragglerResult:
    """The others waited `share` of the time for `rank`, which arrived `mean_s` after the one
    before.
    """

    rank: int
    share: float
    mean_s: float


@dataclass(slots=True)
class StragglerDetector:
    """Call `look()` at each pulse; reports a rank once, and again after it was on time."""

    _shares: deque[dict[int, tuple[float, float]]] = field(
        default_factory=lambda: deque(maxlen=LOOKS)
    )
    _reported: int | None = None

    def look(self, arrivals: Mapping[int, Sequence[Arrival]]) -> StragglerResult | None:
        """The straggler, if it is new. `arrivals` are `(group, number, ns)` by rank."""
        shares = waiting_shares(arrivals)
        if shares is None:
            return None
        self._shares.append(shares)
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
                self._reported = None
            return None
        if self._reported == worst:
            return None
        self._reported = worst
        seconds = [look[worst][1] for look in self._shares if worst in look]
        return StragglerResult(worst, mean[worst], sum(seconds) / len(seconds))


def waiting_shares(
    arrivals: Mapping[int, Sequence[Arrival]],
) -> dict[int, tuple[float, float]] | None:
    """`{rank: (share of the time that the others waited for it, mean seconds of its delay)}`.

    Uses collectives that all members arrived at; None if ranks have too few in common.
    """
    members: dict[str, set[int]] = defaultdict(set)
    arrived: dict[tuple[str, int], dict[int, int]] = defaultdict(dict)
    for rank, entries in arrivals.items():
        for group, number, ns in entries:
            members[group].add(rank)
            arrived[group, number][rank] = ns
    spans: dict[int, list[tuple[int, int]]] = defaultdict(list)
    begin, end = None, None
    for (group, _), times in arrived.items():
        if len(times) < 2 or set(times) != members[group]:
            continue
        (last_ns, last), (before_ns, _) = sorted(
            ((ns, rank) for rank, ns in times.items()), reverse=True
        )[:2]
        begin = before_ns if begin is None else min(begin, before_ns)
        end = last_ns if end is None else max(end, last_ns)
        if last_ns - before_ns > _MIN_WAIT_NS:
            spans[last].append((before_ns, last_ns))
    if begin is None or end is None or end <= begin:
        return None
    return {
        rank: (_union(waits) / (end - begin), sum(b - a for a, b in waits) / len(waits) / 1e9)
        for rank, waits in spans.items()
    }


def _union(spans: Iterable[tuple[int, int]]) -> int:
    """Nanoseconds covered by overlapping spans: buckets of one backward pass are late together."""
    total, reached = 0, 0
    for begin, end in sorted(spans):
        total += max(0, end - max(begin, reached))
        reached = max(reached, end)
    return total
