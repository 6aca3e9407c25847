"""Chooses how many tokens to draft per request: the number with the highest expected throughput.

Uses measured costs and acceptance rates; makes no drafts.
"""

from __future__ import annotations

from collections.abc import Sequence

from workers.inference.request import Request
from workers.inference.speculate.costs import AcceptanceRate, PassCost

_GAIN = 1.03  # minimum expected speedup
_PLAIN_EVERY = 64  # one of this many steps has no drafts, to measure its cost
_MAX_FAILURES = 8  # steps without an expected gain before drafting pauses
_PAUSE, _MAX_PAUSE = 32, 1024  # steps; doubled after each failed trial
_TRIAL_STEPS, _TRIAL_TOKENS = 4, 2  # of a trial after a pause


class Lengths:
    """`most` tokens per request if not `adaptive`, else the result of `_best` with pauses and
    trials.
    """

    def __init__(self, most: int, *, adaptive: bool) -> None:
        self.most, self.adaptive = most, adaptive
        self.target, self.draft = PassCost(), PassCost()
        self.paused = 0  # steps left without drafts
        self._overall = AcceptanceRate(0.7, trials=5, decay=0.98)
        self._rates: dict[Request, AcceptanceRate] = {}
        self._pause, self._trial, self._failures = _PAUSE, _TRIAL_STEPS, 0
        self._steps = self._running = 0

    def choose(self, requests: Sequence[Request]) -> list[int]:
        """Tokens to draft for each request that decodes in the next step."""
        count = len(requests)
        if not self.adaptive or not count:
            return [self.most] * count
        self._steps += 1
        if self.paused:
            same = self._running / 2 < count < self._running * 2
            self.paused = self.paused - 1 if same else 0
            self._trial = 0 if self.paused else _TRIAL_STEPS
            if self.paused:
                return [0] * count
        if self._trial:
            self._trial -= 1
            return [min(_TRIAL_TOKENS, self.most)] * count
        if self._steps % _PLAIN_EVERY == 0 or not self.target.measured:
            return [0] * count
        lengths = self._best([self._rate(request).value for request in requests])
        if any(lengths):
            self._failures, self._pause = 0, _PAUSE
        else:
            self._failures += 1
            if self._failures >= _MAX_FAILURES:
                self.paused, self._failures = self._pause, 0
                self._pause = min(2 * self._pause, _MAX_PAUSE)
                self._running = count
        return lengths

    def record(self, request: Request, *, accepted: int, drafted: int) -> None:
        """Add the result of one draft."""
        self._overall.add(accepted, drafted)
        self._rate(request).add(accepted, drafted)

    def forget(self, request: Request) -> None:
        """Drop a finished request."""
        self._rates.pop(request, None)

    def _rate(self, request: Request) -> AcceptanceRate:
        prior = self._overall.value
        return self._rates.setdefault(request, AcceptanceRate(prior, trials=4, decay=0.9))

    def _best(self, rates: Sequence[float]) -> list[int]:
        """The lengths with the most expected tokens per second.

        Draft tokens are accepted one after the other, so the j-th brings rate**j tokens (arXiv
        2211.17192, equation 1). It is worth its cost while that exceeds the tokens that the same
        time would bring otherwise.
        """
        count = len(rates)
        plain = best = count / self.target.at(count)
        chosen = [0] * count
        token_s = self.target.per_token_s + self.draft.per_token_s
        for longest in range(1, self.most + 1):
            lengths = [_worthwhile_length(rate, best * token_s, longest) for rate in rates]
            passes = [sum(length > n for length in lengths) for n in range(max(lengths))]
            seconds = self.target.at(count + sum(lengths)) + sum(
                self.draft.at(size) for size in passes
            )
            tokens = sum(
                sum(rate**n for n in range(length + 1))
                for rate, length in zip(rates, lengths, strict=True)
            )
            if tokens / seconds > max(best, plain * _GAIN):
                best, chosen = tokens / seconds, lengths
        return chosen


def _worthwhile_length(rate: float, minimum: float, longest: int) -> int:
    length = 0
    while length < longest and rate ** (length + 1) > minimum:
        length += 1
    return length
