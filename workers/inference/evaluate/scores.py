"""Scores of answers against references: BLEU and chrF (sacrebleu), ROUGE (rouge-score), exact
match.

Does not depend on where the answers come from.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from workers.inference.evaluate.metrics import ROUGE

References = Sequence[tuple[str, ...]]


def score_answers(
    metrics: Sequence[str], answers: Sequence[str], references: References
) -> dict[str, float]:
    """Corpus BLEU and chrF, 0 to 100; means of ROUGE's F and exact match over answers, 0 to 1."""
    lines = [score_line(metrics, *pair) for pair in zip(answers, references, strict=True)]
    scores: dict[str, float] = {}
    for name in metrics:
        if name in ("bleu", "chrf"):
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


def _corpus_score(name: str, answers: Sequence[str], references: References) -> float:
    from sacrebleu import corpus_bleu, corpus_chrf

    most = max((len(texts) for texts in references), default=0)
    # sacrebleu takes one list per reference index, None if an answer has fewer references
    streams: list[Any] = [
        [texts[index] if index < len(texts) else None for texts in references]
        for index in range(most)
    ]
    compute = corpus_bleu if name == "bleu" else corpus_chrf
    return float(compute(list(answers), streams).score)


_SCORERS: dict[tuple[str, ...], Any] = {}


def _scorer(names: tuple[str, ...]) -> Any:
    if names not in _SCORERS:
        from rouge_score.rouge_scorer import RougeScorer

        _SCORERS[names] = RougeScorer(list(names), use_stemmer=False)
    return _SCORERS[names]
