"""Totals over all finished requests of a server, for the summary at its end.

Can merge the totals of other replicas.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable

from workers.contracts.wire.serving_reports import ReplicaStats, RequestStats, Summary

_MAX_LATENCIES = 100_000  # the newest, for percentiles
_LAST = 32  # requests that a summary lists


class FinishedRequests:
    """`add` each finished request of this replica, then `merge` those of others."""

    def __init__(self) -> None:
        self._finishes: Counter[str] = Counter()
        self._prompt = self._cached = self._output = 0  # tokens
        self._ttft_s: deque[float] = deque(maxlen=_MAX_LATENCIES)
        self._tpot_s: deque[float] = deque(maxlen=_MAX_LATENCIES)
        self._last: deque[RequestStats] = deque(maxlen=_LAST)

    @property
    def count(self) -> int:
        """Finished requests."""
        return sum(self._finishes.values())

    def add(self, request: RequestStats) -> None:
        """Count a finished request."""
        self._finishes[request.finish or "aborted"] += 1
        self._prompt += request.prompt_tokens
        self._cached += request.shared_tokens
        self._output += request.new_tokens
        self._last.append(request)
        first, last = request.first_token_s, request.ended_s
        if first is not None:
            self._ttft_s.append(first - request.added_s)
            if last is not None and request.new_tokens > 1:
                self._tpot_s.append((last - first) / (request.new_tokens - 1))

    def replica_stats(self, *, rank: int, seconds: float) -> ReplicaStats:
        """The totals for the first replica, `seconds` after this one's start."""
        return ReplicaStats(
            rank=rank,
            seconds=seconds,
            finishes=dict(self._finishes),
            prompt_tokens=self._prompt,
            new_tokens=self._output,
            shared_tokens=self._cached,
            ttft_s=list(self._ttft_s),
            tpot_s=list(self._tpot_s),
            last=list(self._last),
        )

    def merge(self, stats: ReplicaStats, *, seconds: float) -> None:
        """Add another replica's totals, received `seconds` after this replica's start."""
        self._finishes.update(stats.finishes)
        self._prompt += stats.prompt_tokens
        self._cached += stats.shared_tokens
        self._output += stats.new_tokens
        self._ttft_s.extend(stats.ttft_s)
        self._tpot_s.extend(stats.tpot_s)
        theirs = (shift_times(request, by_s=seconds - stats.seconds) for request in stats.last)
        newest = sorted([*self._last, *theirs], key=lambda request: request.ended_s or 0.0)
        self._last = deque(newest, maxlen=_LAST)

    def summary(self, *, seconds: float) -> Summary:
        """The data of the event `served`."""
        return Summary(
            requests=self.count,
            prompt_tokens=self._prompt,
            new_tokens=self._output,
            shared_tokens=self._cached,
            seconds=seconds,
            ttft_s=percentiles(self._ttft_s),
            tpot_s=percentiles(self._tpot_s),
            finishes=dict(self._finishes),
            last=list(self._last),
        )


def shift_times(request: RequestStats, *, by_s: float) -> RequestStats:
    """The same request by a clock that started `by_s` earlier; times are at least 0."""
    times = {
        name: getattr(request, name)
        for name in ("added_s", "admitted_s", "first_token_s", "ended_s")
    }
    shifted = {
        name: max(0.0, time_s + by_s) for name, time_s in times.items() if time_s is not None
    }
    return request.model_copy(update=shifted)


def percentiles(seconds: Iterable[float]) -> dict[str, float] | None:
    """p50, p90 and p99 by nearest rank; None without values."""
    ordered = sorted(seconds)
    if not ordered:
        return None
    return {f"p{share}": ordered[-(-share * len(ordered) // 100) - 1] for share in (50, 90, 99)}
