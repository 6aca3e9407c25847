"""Scores of answers against references: BLEU and chrF (sacrebleu), ROUGE (rouge-score), exact
match.

Does not depend on where the answers come from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workers.inference.evaluate.metrics import ROUGE

References = Sequence[tuple[str, ...]]
CORPUS = ("bleu", "chrf")  # scores of all answers together


def score_answers(
    metrics: Sequence[str], answers: Sequence[str], references: References
) -> dict[str, float]:
    """Corpus BLEU and chrF, 0 to 100; means of ROUGE's F and exact match over answers, 0 to 1."""
    lines = [score_line(metrics, *pair) for pair in zip(answers, references, strict=True)]
    scores: dict[str, float] = {}
    for name in metrics:
        if name in CORPUS:
            scores[name] = _corpus_score(name, answers, references)
        elif lines and name in lines[0]:
            scores[name] = sum(line[name] for line in lines) / len(lines)
    return scores


def score_line(
    metrics: Sequence[str], answer: str, references: tuple[str, ...]
) -> dict[str, float]:
    """ROUGE and exact match of one answer against its best reference; BLEU needs a corpus."""
    scores: dict[str, float] = {}
    rouge = [name for name in metrics if name in ROUGE]
    if rouge:
        results = _scorer(tuple(rouge)).score_multi(list(references), answer)
        scores = {name: float(results[name].fmeasure) for name in rouge}
    if "exact_match" in metrics:
        scores["exact_match"] = float(answer.strip() in {text.strip() for text in references})
    return scores


def resampled_corpus_score(
    name: str, answers: Sequence[str], references: References
) -> Callable[[NDArray[np.float32]], NDArray[np.float64]]:
    """The BLEU or chrF of resamples, given how often each answer is in each, `[samples, answers]`.

    From sacrebleu's statistics of each answer, as its own significance tests do: the metric of a
    resample is that of their sums.
    """
    metric = _metric(name)
    statistics = np.array(
        metric._extract_corpus_statistics(list(answers), _streams(references)), dtype=np.float64
    )

    def scores(weights: NDArray[np.float32]) -> NDArray[np.float64]:
        sums = np.rint(weights @ statistics).astype(np.int64)
        return np.array([metric._aggregate_and_compute([row]).score for row in sums.tolist()])

    return scores


def _corpus_score(name: str, answers: Sequence[str], references: References) -> float:
    return float(_metric(name).corpus_score(list(answers), _streams(references)).score)


def _metric(name: str) -> Any:
    from sacrebleu.metrics.bleu import BLEU
    from sacrebleu.metrics.chrf import CHRF

    return BLEU() if name == "bleu" else CHRF()


def _streams(references: References) -> list[Any]:
    """One list per reference index, with None for an answer that has fewer references."""
    most = max((len(texts) for texts in references), default=0)
    return [
        [texts[index] if index < len(texts) else None for texts in references]
        for index in range(most)
    ]


_SCORERS: dict[tuple[str, ...], Any] = {}


def _scorer(names: tuple[str, ...]) -> Any:
    if names not in _SCORERS:
        from rouge_score.rouge_scorer import RougeScorer

        _SCORERS[names] = RougeScorer(list(names), use_stemmer=False)
    return _SCORERS[names]
