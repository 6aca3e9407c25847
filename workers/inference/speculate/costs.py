"""What a pass costs by how many tokens it has, and how likely drafts are accepted, from what was
measured lately.

Knows numbers alone.
"""

from __future__ import annotations

_FORGET = 0.98  # of a measurement's weight is left after the next: some 50 passes count
_OUTLIER = 4.0  # times what was expected: another program had the machine
_FIRST = 8  # measurements are believed as they are


class Costs:
    """Seconds of a pass as a line over its tokens, fitted by least squares with the newest counting
    most.
    """

    def __init__(self) -> None:
        self._n = self._x = self._y = self._xx = self._xy = 0.0
        self.known = 0

    def add(self, tokens: int, seconds: float) -> None:
        if self.known >= _FIRST:
            seconds = min(seconds, _OUTLIER * self.at(tokens))
        self.known += 1
        self._n = self._n * _FORGET + 1
        self._x = self._x * _FORGET + tokens
        self._y = self._y * _FORGET + seconds
        self._xx = self._xx * _FORGET + tokens * tokens
        self._xy = self._xy * _FORGET + tokens * seconds

    @property
    def a_token(self) -> float:
        """Seconds that one token more costs; 0 as long as all passes had the same number."""
        if not self._n:
            return 0.0
        spread = self._xx / self._n - (self._x / self._n) ** 2
        if spread < 1e-6:
            return 0.0
        return max(0.0, (self._xy / self._n - self._x * self._y / self._n**2) / spread)

    def at(self, tokens: int) -> float:
        """Seconds of a pass; 0 where none was measured. Never less than a tenth of the mean."""
        if not self._n:
            return 0.0
        mean = self._y / self._n
        return max(mean / 10, mean + self.a_token * (tokens - self._x / self._n))


class Odds:
    """How likely a drafted token is accepted if those before it were; begins as `before`, counted
    as `trials`.
    """

    def __init__(self, before: float, *, trials: float, forget: float) -> None:
        self._trials, self._hits, self._forget = trials, before * trials, forget

    def add(self, accepted: int, drafted: int) -> None:
        for hit in (*[1.0] * accepted, *([0.0] if accepted < drafted else [])):
            self._trials = self._trials * self._forget + 1
            self._hits = self._hits * self._forget + hit

    @property
    def value(self) -> float:
        return self._hits / self._trials
