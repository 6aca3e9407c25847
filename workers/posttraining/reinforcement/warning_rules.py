"""Signs of known failures of policy optimization, from metrics of iterations.

Each rule compares means over ten iterations. Does not depend on how warnings are shown.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

WINDOW = 10  # iterations
ENTROPY_SHARE = 0.1  # of the entropy at the start
LENGTH_FACTOR = 2.0
EQUAL_SHARE = 0.9  # of groups
MISMATCH_KL, MISMATCH_OUTSIDE = 0.01, 0.05  # nats per token, share of tokens
KL_LIMIT = 1.0  # nats per token
COMPONENT_SHARE = 0.8  # of a reward's mean at the start

VALUE_AFTER = 3 * WINDOW  # iterations in which the value model may learn

Means = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Warned:
    """A rule that holds: `kind` names it, `values` are the numbers it compared."""

    kind: str
    values: dict[str, float | str]


@dataclass(slots=True)
class WarningRules:
    """`add` after each update; warns when a rule begins to hold, not again while it does."""

    component_names: tuple[str, ...] = ()
    _updates: list[dict[str, float]] = field(default_factory=list)
    _iteration: int = -1
    _closed: int = 0
    _first: list[dict[str, float]] = field(default_factory=list)
    _last: deque[dict[str, float]] = field(default_factory=lambda: deque(maxlen=WINDOW))
    _holding: set[str] = field(default_factory=set)

    def add(self, iteration: int, values: Mapping[str, float]) -> list[Warned]:
        """The rules that began to hold by the end of the iteration before this one."""
        result: list[Warned] = []
        if iteration != self._iteration and self._updates:
            result = self._close()
        self._iteration = iteration
        self._updates.append(dict(values))
        return result

    def _close(self) -> list[Warned]:
        means = _means(self._updates)
        self._updates = []
        self._closed += 1
        self._last.append(means)
        if len(self._first) < WINDOW:
            self._first.append(means)
        if len(self._last) < WINDOW:
            return []
        holding = warnings_of(_means(self._first), _means(list(self._last)), self.component_names)
        if self._closed < VALUE_AFTER:
            holding = [each for each in holding if each.kind != "value_unexplained"]
        begun = [each for each in holding if each.kind not in self._holding]
        self._holding = {each.kind for each in holding}
        return begun


def warnings_of(first: Means, last: Means, components: tuple[str, ...] = ()) -> list[Warned]:
    """The rules that hold, from means over the first and the last `WINDOW` iterations.

    `components`: metrics of single rewards.
    """
    result = []
    for name, rule in (
        ("entropy_collapse", _entropy),
        ("length_growth", _length),
        ("equal_groups", _equal_groups),
        ("mismatch_drift", _mismatch),
        ("value_unexplained", _value),
    ):
        values = rule(first, last)
        if values is not None:
            result.append(Warned(name, values))
    hacking = _hacking(first, last, components)
    return result + ([Warned("reward_hacking", hacking)] if hacking is not None else [])


Numbers = dict[str, float | str]


def _entropy(first: Means, last: Means) -> Numbers | None:
    """Entropy below a tenth of that at the start."""
    before, now = first.get("entropy"), last.get("entropy")
    if before is None or now is None or now >= ENTROPY_SHARE * before:
        return None
    return {"before": before, "now": now}


def _length(first: Means, last: Means) -> Numbers | None:
    """Answers twice as long as at the start."""
    before, now = first.get("response_tokens"), last.get("response_tokens")
    if before is None or now is None or now < LENGTH_FACTOR * before:
        return None
    cut = last.get("response_tokens/cut_fraction", 0.0)
    return {"before": before, "now": now, "cut": cut}


def _equal_groups(first: Means, last: Means) -> Numbers | None:
    """In nine of ten groups all rewards are equal."""
    now = last.get("groups/equal")
    return None if now is None or now < EQUAL_SHARE else {"now": now}


def _mismatch(first: Means, last: Means) -> Numbers | None:
    """Sampler and trainer disagree: by divergence, or by the share of ratios beyond 0.5 and 2."""
    divergence, outside = last.get("mismatch/kl", 0.0), last.get("mismatch/outside", 0.0)
    if divergence <= MISMATCH_KL and outside <= MISMATCH_OUTSIDE:
        return None
    return {"kl": divergence, "outside": outside}


def _value(first: Means, last: Means) -> Numbers | None:
    """Values predict returns worse than a constant."""
    now = last.get("value/explained_variance")
    return None if now is None or now >= 0 else {"now": now}


def _hacking(first: Means, last: Means, components: tuple[str, ...]) -> Numbers | None:
    """The reward rose by more than its standard deviation at the start, while the divergence is
    above `KL_LIMIT` or a single reward fell by a fifth.
    """
    before, now = first.get("reward/mean"), last.get("reward/mean")
    if before is None or now is None or now - before <= max(first.get("reward/std", 0.0), 1e-9):
        return None
    values: Numbers = {"before": before, "now": now}
    for name in components:
        was, is_ = first.get(name), last.get(name)
        if was is not None and is_ is not None and is_ < was - (1 - COMPONENT_SHARE) * abs(was):
            return values | {"reward": name.removeprefix("reward/"), "was": was, "is": is_}
    divergence = last.get("kl", 0.0)
    return values | {"kl": divergence} if divergence > KL_LIMIT else None


def _means(points: list[dict[str, float]]) -> dict[str, float]:
    names = {name for point in points for name in point}
    return {
        name: float(np.mean([point[name] for point in points if name in point])) for name in names
    }
