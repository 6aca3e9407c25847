"""Confidence intervals of metrics, and paired tests of two models on the same items.

Shares have Wilson intervals and McNemar's exact test. All others have bootstrap intervals
(percentile) and the paired bootstrap test (Koehn 2004), BLEU and chrF over sacrebleu's statistics
of each answer. Does not depend on models.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from workers.contracts.wire.serving_reports import ComparedMetric, Wins
from workers.inference.evaluate.metrics import ROUGE
from workers.inference.evaluate.scores import CORPUS, References, resampled_corpus_score

SAMPLES = 2000  # bootstrap resamples
_SEED = 0
_Z = 1.959964  # of 95% of a normal distribution
_LESS = ("loss", "perplexity", "bits_per_byte")
# metrics of 0 or 1 per row, by the row's key
_SHARES = {"accuracy": "right", "accuracy_norm": "right_norm", "exact_match": "exact_match"}
Rows = Sequence[Mapping[str, Any]]
_Resampled = Callable[[NDArray[np.float32]], NDArray[np.float64]]
Interval = tuple[float, float]


def wilson(successes: float, count: int) -> Interval:
    """The 95% interval of a share (Wilson 1927): inside [0, 1] for every count above 0."""
    share = successes / count
    center = (share + _Z**2 / (2 * count)) / (1 + _Z**2 / count)
    half = _Z * math.sqrt(share * (1 - share) / count + _Z**2 / (4 * count**2))
    half /= 1 + _Z**2 / count
    return max(0.0, center - half), min(1.0, center + half)


def mcnemar(only_first: int, only_second: int) -> float:
    """Two-sided exact p-value that two shares on the same items are equal (McNemar 1947).

    The counts are items that only one of both has right.
    """
    total, few = only_first + only_second, min(only_first, only_second)
    logs = [
        math.lgamma(total + 1) - math.lgamma(k + 1) - math.lgamma(total - k + 1)
        for k in range(few + 1)
    ]
    tail = math.fsum(math.exp(each - total * math.log(2)) for each in logs)
    return min(1.0, 2 * tail)


def win_rate(outcomes: Sequence[str]) -> Wins:
    """Counts of `win`, `loss` and `tie` with the win rate; a tie counts half."""
    wins, losses = outcomes.count("win"), outcomes.count("loss")
    ties = len(outcomes) - wins - losses
    if not outcomes:
        return Wins()
    low, high = wilson(wins + ties / 2, len(outcomes))
    rate = (wins + ties / 2) / len(outcomes)
    return Wins(wins=wins, losses=losses, ties=ties, rate=rate, low=low, high=high)


def intervals(
    metrics: Sequence[str], rows: Rows, references: References = ()
) -> dict[str, Interval]:
    """95% intervals by metric; with fewer than 2 rows none. `references` are those of each row."""
    if len(rows) < 2:
        return {}
    weights = _resamples(len(rows))
    result: dict[str, Interval] = {}
    for name in metrics:
        if name in _SHARES:
            result[name] = wilson(sum(row[_SHARES[name]] for row in rows), len(rows))
        elif (value := _of_rows(name, rows, references)) is not None:
            result[name] = _percentiles(value(weights))
    return result


def compare(
    metrics: Mapping[str, tuple[float, float]],
    before: Rows,
    after: Rows,
    references: References,
) -> list[ComparedMetric]:
    """Compare metrics `(before, after)` of two models on the same rows.

    Rows that are not the same items (other windows of a text) are compared without a test.
    """
    paired = [row["id"] for row in before] == [row["id"] for row in after] and len(before) > 1
    weights = _resamples(len(before)) if paired else None
    result = []
    for name, (old, new) in metrics.items():
        low = high = p = None
        if weights is not None:
            first, second = (_of_rows(name, rows, references) for rows in (before, after))
            if first is not None and second is not None:
                differences = second(weights) - first(weights)
                low, high = _percentiles(differences)
                p = _bootstrap_p(differences)
            if name in _SHARES:
                pairs = [
                    (r[_SHARES[name]], s[_SHARES[name]]) for r, s in zip(before, after, strict=True)
                ]
                p = mcnemar(sum(a > b for a, b in pairs), sum(a < b for a, b in pairs))
        verdict: Literal["better", "worse", "same"] = "same"
        if p is not None and p < 0.05 and new != old:
            verdict = "better" if (new < old) == (name in _LESS) else "worse"
        result.append(
            ComparedMetric(
                name=name, before=old, after=new, low=low, high=high, p=p, verdict=verdict
            )
        )
    return result


def _resamples(count: int) -> NDArray[np.float32]:
    """How often each of `count` rows is in each resample, `[SAMPLES, count]`; above 10^5 rows
    fewer resamples keep it within 800 MB.
    """
    random = np.random.default_rng(_SEED)
    samples = max(200, min(SAMPLES, 200_000_000 // count))
    weights = np.empty((samples, count), dtype=np.float32)
    for row in weights:
        row[:] = np.bincount(random.integers(0, count, count), minlength=count)
    return weights


def _of_rows(name: str, rows: Rows, references: References) -> _Resampled | None:
    """The metric of each resample; None for an unknown one."""
    if name in CORPUS:
        return resampled_corpus_score(name, [str(row["answer"]) for row in rows], references)
    if name in _LESS:
        nll = np.array([row["nll"] for row in rows], dtype=np.float64)
        size = np.array(
            [row["bytes"] if name == "bits_per_byte" else row["tokens"] for row in rows],
            dtype=np.float64,
        )
        scale = 1 / math.log(2) if name == "bits_per_byte" else 1.0

        def ratio(weights: NDArray[np.float32]) -> NDArray[np.float64]:
            value = scale * (weights @ nll) / np.maximum(1.0, weights @ size)
            bounded: NDArray[np.float64] = np.minimum(value, 700.0)
            return np.exp(bounded) if name == "perplexity" else np.asarray(value)

        return ratio
    key = _SHARES.get(name, name)
    if key not in (*_SHARES.values(), *ROUGE):
        return None
    values = np.array([row[key] for row in rows], dtype=np.float64)
    return lambda weights: (weights @ values) / len(values)


def _percentiles(values: NDArray[np.float64]) -> Interval:
    low, high = np.percentile(values, [2.5, 97.5])
    return float(low), float(high)


def _bootstrap_p(differences: NDArray[np.float64]) -> float:
    """Two-sided p-value that the difference is 0; never below 1 over the number of resamples."""
    count = len(differences)
    below, above = int((differences <= 0).sum()), int((differences >= 0).sum())
    return min(1.0, 2 * (min(below, above) + 1) / (count + 1))
