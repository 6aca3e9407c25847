"""ROUGE-L of a text against a growing pool. Does not depend on what the texts are.

An index of words bounds the score of every earlier text at once, so only texts that share many
words are compared: a candidate costs milliseconds against 100,000 texts.
"""

from __future__ import annotations

import re
import threading
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from rouge_score import rouge_scorer

_WORD = re.compile(r"\w+")


@dataclass(frozen=True, slots=True)
class Nearest:
    """The most similar text of the pool, by its name, with their ROUGE-L."""

    score: float
    name: str


class Pool:
    """Texts by name. Thread-safe."""

    def __init__(self) -> None:
        self._texts: list[list[str]] = []
        self._names: list[str] = []
        self._lengths = array("I")
        # the k-th occurrence of a word → the texts that have it
        self._index: dict[tuple[str, int], array[int]] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._texts)

    def add(self, text: str, name: str) -> None:
        """Add a text."""
        own = words(text)
        with self._lock:
            number = len(self._texts)
            self._texts.append(own)
            self._names.append(name)
            self._lengths.append(len(own))
            for key in _occurrences(own):
                self._index.setdefault(key, array("I")).append(number)

    def nearest(self, text: str, *, above: float) -> Nearest | None:
        """A text with a ROUGE-L above `above`: the first that is found; None without one."""
        own = words(text)
        with self._lock:
            if not own or not self._texts:
                return None
            postings = [self._index[key] for key in _occurrences(own) if key in self._index]
            if not postings:
                return None
            shared = np.bincount(
                np.concatenate([np.frombuffer(each, dtype=np.uint32) for each in postings]),
                minlength=len(self._texts),
            )
            lengths = np.frombuffer(self._lengths, dtype=np.uint32)
            # a common subsequence has at most the words that both have
            bounds = 2.0 * shared / (lengths + len(own))
            places = [int(place) for place in np.flatnonzero(bounds > above)]
            places.sort(key=lambda place: -bounds[place])
            others = [(self._texts[place], self._names[place]) for place in places]
            del lengths  # the array cannot grow while a view of it exists
        for other, name in others:
            score = rouge_l(own, other)
            if score > above:
                return Nearest(score, name)
        return None


def words(text: str) -> list[str]:
    """The words of a text in lower case."""
    return _WORD.findall(text.lower())


def rouge_l(one: Sequence[str], other: Sequence[str]) -> float:
    """F-measure of the longest common subsequence of words (Lin 2004)."""
    if not one or not other:
        return 0.0
    scores = rouge_scorer.RougeScorer(["rougeL"], tokenizer=_Split()).score(
        " ".join(one), " ".join(other)
    )
    return float(scores["rougeL"].fmeasure)


class _Split:
    """Splits words at spaces; the package's own tokenizer drops letters outside a to z."""

    def tokenize(self, text: str) -> list[str]:
        """The words of a text."""
        return text.split()


def _occurrences(text_words: Sequence[str]) -> list[tuple[str, int]]:
    counts: Counter[str] = Counter()
    keys = []
    for word in text_words:
        keys.append((word, counts[word]))
        counts[word] += 1
    return keys
