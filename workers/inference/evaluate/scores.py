"""Answers against references: BLEU and chrF as sacrebleu counts them, ROUGE as Google's package
does, exact match.

Texts alone; does not know where the answers come from.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from workers.inference.evaluate.metrics import ROUGE

References = Sequence[tuple[str, ...]]


def score_answers(
    metrics: Sequence[str], answers: Sequence[str], references: References
) -> dict[str, float]:
    """BLEU and chrF over all answers together, 0 to 100; ROUGE's F and exact match as means over
    answers, 0 to 1.
    """
    lines = [score_line(metrics, *each) for each in zip(answers, references, strict=True)]
    found: dict[str, float] = {}
    for name in metrics:
        if name in ("bleu", "chrf"):
            found[name] = _corpus(name, answers, references)
        elif lines and name in lines[0]:
            found[name] = sum(line[name] for line in lines) / len(lines)
    return found


def score_line(
    metrics: Sequence[str], answer: str, references: tuple[str, ...]
) -> dict[str, float]:
    """Of one answer, against the reference that is nearest: ROUGE and exact match; BLEU is none of
    a single line.
    """
    found: dict[str, float] = {}
    wanted = [name for name in metrics if name in ROUGE]
    if wanted:
        scored = _scorer(tuple(wanted)).score_multi(list(references), answer)
        found = {name: float(scored[name].fmeasure) for name in wanted}
    if "exact_match" in metrics:
        found["exact_match"] = float(answer.strip() in {each.strip() for each in references})
    return found


def _corpus(name: str, answers: Sequence[str], references: References) -> float:
    from sacrebleu import corpus_bleu, corpus_chrf

    most = max((len(each) for each in references), default=0)
    # sacrebleu wants a list for each place of a reference, None where an answer has fewer
    streams: list[Any] = [
        [each[place] if place < len(each) else None for each in references] for place in range(most)
    ]
    counted = corpus_bleu if name == "bleu" else corpus_chrf
    return float(counted(list(answers), streams).score)


_SCORERS: dict[tuple[str, ...], Any] = {}


def _scorer(names: tuple[str, ...]) -> Any:
    if names not in _SCORERS:
        from rouge_score.rouge_scorer import RougeScorer

        _SCORERS[names] = RougeScorer(list(names), use_stemmer=False)
    return _SCORERS[names]
