"""Filters of candidates: each says why it rejects one, with the number it compared.

Does not depend on servers: scores are a function.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import get_args

from workers.contracts.specs.finetuning.produce import FilterSpec, ScoreKind
from workers.posttraining.produce.scores import Candidate
from workers.posttraining.produce.similarity import Pool, words
from workers.runtime.exit_codes import UserError

ROUGE_THRESHOLD = 0.7  # Self-Instruct (arXiv 2212.10560)
JUDGE_THRESHOLD = 6.0
_SCRIPT_SHARE = 0.7  # of letters
_REFUSAL = re.compile(
    r"^\W*(i('m| am) sorry|i can('|no)t|i cannot|as an ai\b|i('m| am) unable|sorry, )", re.I
)
_SCRIPTS = {
    "latin": ("LATIN",),
    "cyrillic": ("CYRILLIC",),
    "cjk": ("CJK", "HIRAGANA", "KATAKANA", "HANGUL"),
    "arabic": ("ARABIC",),
    "greek": ("GREEK",),
}

# (filter, candidate) → score; None if the judge gives none
Score = Callable[[FilterSpec, Candidate], float | None]
Grams = set[tuple[str, ...]]


@dataclass(slots=True)
class Verdict:
    """The filter that rejects (None: all accept), its reason, and the numbers of all filters."""

    rejected_by: str | None = None
    detail: str = ""
    scores: dict[str, float] = field(default_factory=dict)


class Filters:
    """Applies all filters in their order; the pool holds the texts accepted so far. Thread-safe."""

    def __init__(
        self, specs: Sequence[FilterSpec], *, score: Score, compare_prompts: bool = True
    ) -> None:
        """Without `compare_prompts` (given prompts are answered) rouge_l compares answers."""
        self.specs, self.score, self.compare_prompts = list(specs), score, compare_prompts
        self.pool = Pool()
        self._limits = [
            ROUGE_THRESHOLD if spec.threshold is None else spec.threshold
            for spec in self.specs
            if spec.kind == "rouge_l"
        ]
        self._ngrams = {
            number: _file_ngrams(Path(str(spec.against)), spec.n)
            for number, spec in enumerate(self.specs)
            if spec.kind == "ngram"
        }

    def verdict(self, candidate: Candidate) -> Verdict:
        """What the filters say, up to the first that rejects."""
        verdict = Verdict()
        for number, spec in enumerate(self.specs):
            detail = self._rejection(number, spec, candidate, verdict.scores)
            if detail is not None:
                verdict.rejected_by, verdict.detail = spec.kind, detail
                break
        return verdict

    def repeated(self, candidate: Candidate) -> Verdict:
        """What the rouge_l filters say now: the pool may have grown since `verdict`."""
        verdict = Verdict()
        for limit in self._limits:
            detail = self._similar(candidate, limit, verdict.scores)
            if detail is not None:
                verdict.rejected_by, verdict.detail = "rouge_l", detail
                break
        return verdict

    def add(self, candidate: Candidate, name: str) -> None:
        """Add an accepted candidate to the pool."""
        if self._limits:
            self.pool.add(self._compared(candidate), name)

    def _compared(self, candidate: Candidate) -> str:
        return candidate.prompt if self.compare_prompts else candidate.answer

    def _similar(self, candidate: Candidate, limit: float, scores: dict[str, float]) -> str | None:
        nearest = self.pool.nearest(self._compared(candidate), above=limit)
        if nearest is None:
            return None
        scores["rouge_l"] = round(nearest.score, 4)
        return f"ROUGE-L {nearest.score:.2f} with {nearest.name}, at most {limit:g}"

    def _rejection(
        self, number: int, spec: FilterSpec, candidate: Candidate, scores: dict[str, float]
    ) -> str | None:
        """Why the filter rejects; None if it accepts."""
        answer = candidate.answer
        if spec.kind == "length":
            size = len(answer.strip())
            scores["length"] = size
            if spec.min_chars <= size <= spec.max_chars:
                return None
            return f"{size} characters, not {spec.min_chars} to {spec.max_chars}"
        if spec.kind == "complete":
            return "the answer ends at the token limit" if candidate.cut else None
        if spec.kind == "refusal":
            match = _REFUSAL.match(answer)
            return f"begins with {match[0].strip()!r}" if match else None
        if spec.kind == "language":
            share = _script_share(answer, spec.script)
            scores["language"] = round(share, 4)
            if share >= _SCRIPT_SHARE:
                return None
            return f"{share:.0%} of the letters are {spec.script}, at least {_SCRIPT_SHARE:.0%}"
        if spec.kind == "ngram":
            text_words = words(f"{candidate.prompt} {answer}")
            common = _ngrams(text_words, spec.n) & self._ngrams[number]
            return (
                f"{spec.n} words of {Path(str(spec.against)).name}: {' '.join(min(common))}"
                if (common)
                else None
            )
        if spec.kind == "rouge_l":
            limit = ROUGE_THRESHOLD if spec.threshold is None else spec.threshold
            return self._similar(candidate, limit, scores)
        return self._low_score(spec, candidate, scores)

    def _low_score(
        self, spec: FilterSpec, candidate: Candidate, scores: dict[str, float]
    ) -> str | None:
        assert spec.kind in get_args(ScoreKind)
        value = self.score(spec, candidate)
        if value is None:
            return "the judge gave no score"
        scores[spec.kind] = value
        if spec.kind in ("regex", "exact", "number"):
            wanted = {
                "regex": f"no match of {spec.pattern}",
                "exact": f"not the known answer {candidate.expected!r}",
                "number": f"the last number is not {candidate.expected!r}",
            }
            return None if value else wanted[spec.kind]
        default = JUDGE_THRESHOLD if spec.kind == "judge" else 0.0
        limit = default if spec.threshold is None else spec.threshold
        return None if value >= limit else f"score {value:g}, at least {limit:g}"


def _ngrams(texts: Sequence[str], n: int) -> Grams:
    return {tuple(texts[place : place + n]) for place in range(len(texts) - n + 1)}


def _script_share(text: str, script: str) -> float:
    letters = [unicodedata.name(each, "") for each in text if each.isalpha()]
    if not letters:
        return 1.0
    return sum(name.startswith(_SCRIPTS[script]) for name in letters) / len(letters)


def _file_ngrams(path: Path, n: int) -> Grams:
    """All n-grams of the texts in a file of JSON lines, or of its plain lines."""
    grams: Grams = set()
    try:
        with open(path, encoding="utf-8") as file:
            for line in file:
                grams |= _ngrams(words(" ".join(_strings(line))), n)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"produce.filters.against: {path} cannot be read: {error}. Use a text file."
        ) from None
    if not grams:
        raise UserError(
            f"produce.filters.against: {path} has no {n} words in a row, so the filter ngram could "
            "reject nothing. Use a smaller n or another file."
        )
    return grams


def _strings(line: str) -> list[str]:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return [line]
    texts: list[str] = []
    pending = [value]
    while pending:
        each = pending.pop()
        if isinstance(each, str):
            texts.append(each)
        elif isinstance(each, dict):
            pending += list(each.values())
        elif isinstance(each, list):
            pending += each
    return texts
