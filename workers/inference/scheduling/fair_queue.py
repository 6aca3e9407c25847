"""Arrival times that share a full engine evenly among clients, however many requests each sends.

Start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996) over the requests' expected work.
"""

from __future__ import annotations

_FIRST_TOKENS = 64.0  # assumed output length until a request has finished
_NEWEST = 0.05  # weight of the newest output length
_MAX_FLOWS = 10_000


class FairQueue:
    """Virtual arrival times in engine steps, per flow (client and priority).

    A flow with nothing waiting arrives now; each further request arrives later by the expected
    work of the one before, as if the flow had an engine of its own. Times never change, so the
    order is total. `max_sequences` run at a time, `step_tokens` are computed per step.
    """

    def __init__(self, *, max_sequences: int, step_tokens: int) -> None:
        self._max_sequences, self._step_tokens = max_sequences, step_tokens
        self._output_tokens = _FIRST_TOKENS
        self._next: dict[tuple[str, int], float] = {}

    def arrival_time(
        self,
        client: str,
        *,
        priority: int,
        now: int,
        is_waiting: bool,
        prompt_tokens: int,
        max_new_tokens: int,
        sequences: int,
        max_delay: float,
    ) -> float:
        """`is_waiting` says whether the flow has a request in the queue already.

        A flow without one has neither credit nor debt. `max_delay` bounds the time after `now`.
        """
        flow = client, priority
        arrival = max(float(now), self._next.get(flow, 0.0)) if is_waiting else float(now)
        arrival = min(arrival, now + max_delay)
        output = min(self._output_tokens, max_new_tokens) * sequences
        if len(self._next) >= _MAX_FLOWS:
            self._next = {key: time for key, time in self._next.items() if time > now}
        self._next[flow] = (
            arrival + prompt_tokens / self._step_tokens + output / self._max_sequences
        )
        return arrival

    def record_output(self, tokens: int) -> None:
        """Record the length of a finished answer."""
        self._output_tokens += _NEWEST * (tokens - self._output_tokens)
