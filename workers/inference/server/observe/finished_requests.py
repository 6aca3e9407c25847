"""All requests of a server that ended so far, as far as a summary needs them; other replicas'
beside its own.

Counts; knows no engine and no files.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable

from workers.contracts.wire.serving_reports import ReplicaStats, RequestStats, Summary

_REMEMBERED = 100_000  # latencies that percentiles are of: the newest
_LAST = 32  # requests that a summary lists


class Ended:
    """`add` each of this replica's; `merge` what another told of its own, once there is nothing
    more to add.
    """

    def __init__(self) -> None:
        self._finishes: Counter[str] = Counter()
        self._prompt = self._shared = self._new = 0
        self._ttft_s: deque[float] = deque(maxlen=_REMEMBERED)
        self._tpot_s: deque[float] = deque(maxlen=_REMEMBERED)
        self._last: deque[RequestStats] = deque(maxlen=_LAST)

    @property
    def count(self) -> int:
        return sum(self._finishes.values())

    def add(self, request: RequestStats) -> None:
        self._finishes[request.finish or "aborted"] += 1
        self._prompt += request.prompt_tokens
        self._shared += request.shared_tokens
        self._new += request.new_tokens
        self._last.append(request)
        first, last = request.first_token_s, request.ended_s
        if first is not None:
            self._ttft_s.append(first - request.added_s)
            if last is not None and request.new_tokens > 1:
                self._tpot_s.append((last - first) / (request.new_tokens - 1))

    def tally(self, *, rank: int, seconds: float) -> ReplicaStats:
        """For the first of several replicas, `seconds` after this one's start."""
        return ReplicaStats(
            rank=rank,
            seconds=seconds,
            finishes=dict(self._finishes),
            prompt_tokens=self._prompt,
            new_tokens=self._new,
            shared_tokens=self._shared,
            ttft_s=list(self._ttft_s),
            tpot_s=list(self._tpot_s),
            last=list(self._last),
        )

    def merge(self, told: ReplicaStats, *, seconds: float) -> None:
        """Its times by the clock of this replica, whose start was `seconds` before it was told."""
        self._finishes.update(told.finishes)
        self._prompt += told.prompt_tokens
        self._shared += told.shared_tokens
        self._new += told.new_tokens
        self._ttft_s.extend(told.ttft_s)
        self._tpot_s.extend(told.tpot_s)
        everybodys = [
            *self._last,
            *(later(each, by_s=seconds - told.seconds) for each in told.last),
        ]
        self._last = deque(sorted(everybodys, key=lambda each: each.ended_s or 0.0), maxlen=_LAST)

    def summary(self, *, seconds: float) -> Summary:
        return Summary(
            requests=self.count,
            prompt_tokens=self._prompt,
            new_tokens=self._new,
            shared_tokens=self._shared,
            seconds=seconds,
            ttft_s=percentiles(self._ttft_s),
            tpot_s=percentiles(self._tpot_s),
            finishes=dict(self._finishes),
            last=list(self._last),
        )


def later(request: RequestStats, *, by_s: float) -> RequestStats:
    """By a clock that began so much earlier; never before its start."""
    times = {
        name: getattr(request, name)
        for name in ("added_s", "admitted_s", "first_token_s", "ended_s")
    }
    moved = {name: max(0.0, at_s + by_s) for name, at_s in times.items() if at_s is not None}
    return request.model_copy(update=moved)


def percentiles(seconds: Iterable[float]) -> dict[str, float] | None:
    """The least value that so many of a hundred do not exceed; None of nothing."""
    ordered = sorted(seconds)
    if not ordered:
        return None
    return {f"p{share}": ordered[-(-share * len(ordered) // 100) - 1] for share in (50, 90, 99)}
