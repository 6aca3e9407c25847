"""Estimates of a pass's duration by its tokens, and of the acceptance rate of drafts.

Pure arithmetic on recent measurements.
"""

from __future__ import annotations

_DECAY = 0.98  # weight of a measurement after the next one: about 50 passes count
_OUTLIER = 4.0  # times the expected duration: another program used the machine
_FIRST = 8  # measurements accepted without an outlier check


class PassCost:
    """Duration of a pass as a linear function of its tokens, by decaying least squares."""

    def __init__(self) -> None:
        self._n = self._x = self._y = self._xx = self._xy = 0.0
        self.measured = 0

    def add(self, tokens: int, seconds: float) -> None:
        """Add a measured pass."""
        if self.measured >= _FIRST:
            seconds = min(seconds, _OUTLIER * self.at(tokens))
        self.measured += 1
        self._n = self._n * _DECAY + 1
        self._x = self._x * _DECAY + tokens
        self._y = self._y * _DECAY + seconds
        self._xx = self._xx * _DECAY + tokens * tokens
        self._xy = self._xy * _DECAY + tokens * seconds

    @property
    def per_token_s(self) -> float:
        """Seconds per additional token; 0 if all passes had the same number of tokens."""
        if not self._n:
            return 0.0
        spread = self._xx / self._n - (self._x / self._n) ** 2
        if spread < 1e-6:
            return 0.0
        return max(0.0, (self._xy / self._n - self._x * self._y / self._n**2) / spread)

    def at(self, tokens: int) -> float:
        """Expected seconds of a pass, at least a tenth of the mean; 0 without measurements."""
        if not self._n:
            return 0.0
        mean = self._y / self._n
        return max(mean / 10, mean + self.per_token_s * (tokens - self._x / self._n))


class AcceptanceRate:
    """Probability that a draft token is accepted if those before it were.

    Starts at `prior` with the weight of `trials`; older trials decay by `decay`.
    """

    def __init__(self, prior: float, *, trials: float, decay: float) -> None:
        self._trials, self._hits, self._decay = trials, prior * trials, decay

    def add(self, accepted: int, drafted: int) -> None:
        """Add the result of one draft."""
        for hit in (*[1.0] * accepted, *([0.0] if accepted < drafted else [])):
            self._trials = self._trials * self._decay + 1
            self._hits = self._hits * self._decay + hit

    @property
    def value(self) -> float:
        """The estimated probability."""
        return self._hits / self._trials
