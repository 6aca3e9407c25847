"""How many tokens to draft for each request: as many as bring the most tokens a second, none where
they do not pay.

Knows costs and odds; makes no drafts.
"""

from __future__ import annotations

from collections.abc import Sequence

from workers.inference.request import Request
from workers.inference.speculate.costs import Costs, Odds

_GAIN = 1.03  # drafting has to promise so much more than not drafting
_PLAIN_EVERY = 64  # steps without drafts, so that their cost stays known while drafts pay
_DOUBTS = 8  # steps that promise nothing, after which drafting rests
_REST, _LONGEST_REST = 32, 1024  # steps; doubled each time that drafting is tried again in vain
_TRIES, _TRY = 4, 2  # steps and drafted tokens of such a try


class Lengths:
    """`most` tokens for each where it is not `adaptive`; else what `_best` finds, and at times a
    try or a rest.
    """

    def __init__(self, most: int, *, adaptive: bool) -> None:
        self.most, self.adaptive = most, adaptive
        self.target, self.draft = Costs(), Costs()
        self.resting = 0  # steps
        self._all = Odds(0.7, trials=5, forget=0.98)
        self._of: dict[Request, Odds] = {}
        self._rest, self._trying, self._doubts, self._steps, self._running = _REST, _TRIES, 0, 0, 0

    def of(self, requests: Sequence[Request]) -> list[int]:
        """Tokens to draft for each of the requests that decode in the next step."""
        count = len(requests)
        if not self.adaptive or not count:
            return [self.most] * count
        self._steps += 1
        if self.resting:
            same = self._running / 2 < count < self._running * 2
            self.resting = self.resting - 1 if same else 0
            self._trying = 0 if self.resting else _TRIES
            if self.resting:
                return [0] * count
        if self._trying:
            self._trying -= 1
            return [min(_TRY, self.most)] * count
        if self._steps % _PLAIN_EVERY == 0 or not self.target.known:
            return [0] * count
        found = self._best([self._odds(each).value for each in requests])
        if any(found):
            self._doubts, self._rest = 0, _REST
        else:
            self._doubts += 1
            if self._doubts >= _DOUBTS:
                self.resting, self._rest, self._doubts = (
                    self._rest,
                    min(2 * self._rest, _LONGEST_REST),
                    0,
                )
                self._running = count
        return found

    def judged(self, request: Request, *, accepted: int, drafted: int) -> None:
        self._all.add(accepted, drafted)
        self._odds(request).add(accepted, drafted)

    def forget(self, request: Request) -> None:
        self._of.pop(request, None)

    def _odds(self, request: Request) -> Odds:
        return self._of.setdefault(request, Odds(self._all.value, trials=4, forget=0.9))

    def _best(self, odds: Sequence[float]) -> list[int]:
        """The lengths with the most expected tokens a second. A draft's tokens are accepted one
        after the other, so the
        j-th brings odds**j (arXiv 2211.17192, equation 1); it is worth a place while that is more
        than what its
        computing would have brought otherwise."""
        count = len(odds)
        plain = best = count / self.target.at(count)
        found = [0] * count
        each_s = self.target.a_token + self.draft.a_token
        for longest in range(1, self.most + 1):
            lengths = [_while_worth(odd, best * each_s, longest) for odd in odds]
            passes = [sum(each > place for each in lengths) for place in range(max(lengths))]
            seconds = self.target.at(count + sum(lengths)) + sum(
                self.draft.at(each) for each in passes
            )
            tokens = sum(
                sum(odd**place for place in range(each + 1))
                for odd, each in zip(odds, lengths, strict=True)
            )
            if tokens / seconds > max(best, plain * _GAIN):
                best, found = tokens / seconds, lengths
        return found


def _while_worth(odd: float, least: float, longest: int) -> int:
    length = 0
    while length < longest and odd ** (length + 1) > least:
        length += 1
    return length
