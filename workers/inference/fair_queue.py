"""When a request counts as having come, so that clients share a full engine evenly however many
requests each sends.

Start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996) over requests' expected work. Knows
numbers alone.
"""

from __future__ import annotations

_FIRST_TOKENS = 64.0  # of an answer, as long as none has ended
_NEWEST = 0.05  # weight of the newest answer
_REMEMBERED = 10_000  # rows


class Turns:
    """`came` gives a request's place in time, in steps of the engine: now for a client that has
    nothing waiting, and
    for each further one of its row later by the work of the one before, as if the client had sent
    them no faster than
    an engine of its own would answer. A row is of one client and priority. Places never change: the
    order is total.

    `seats` sequences run at a time and `step_tokens` are computed in a step.
    """

    def __init__(self, *, seats: int, step_tokens: int) -> None:
        self._seats, self._step_tokens = seats, step_tokens
        self._answer_tokens = _FIRST_TOKENS
        self._next: dict[tuple[str, int], float] = {}

    def came(
        self,
        client: str,
        *,
        priority: int,
        now: int,
        waits: bool,
        prompt: int,
        most: int,
        sequences: int,
        latest: float,
    ) -> float:
        """`waits` says whether the row has a request in the queue: one that has none is owed
        nothing and owes nothing.
        `most` bounds the answer's tokens, `latest` how much later than now a request may be placed.
        """
        row = client, priority
        place = max(float(now), self._next.get(row, 0.0)) if waits else float(now)
        place = min(place, now + latest)
        answer = min(self._answer_tokens, most) * sequences
        if len(self._next) >= _REMEMBERED:
            self._next = {key: at for key, at in self._next.items() if at > now}
        self._next[row] = place + prompt / self._step_tokens + answer / self._seats
        return place

    def ended(self, tokens: int) -> None:
        """An answer had so many."""
        self._answer_tokens += _NEWEST * (tokens - self._answer_tokens)
