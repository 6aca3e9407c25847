"""Which tokens may come next, for each request that keeps to a form.

Knows tokenizers and masks; knows no logits. V is the model's vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from workers.inference.constrain.grammar import grammar_of
from workers.inference.sampling import Sampling
from workers.inference.words import ByteWords, Words
from workers.models.tokenizer import TextTokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer


class Guides:
    """Of one model: `open` one for each request that is constrained. `ends` may come where the form is complete."""

    def __init__(self, words: Words | None, ends: Sequence[int], *, vocab: int) -> None:
        self.words, self.ends, self.vocab = words, tuple(ends), vocab

    def open(self, asked: Sampling) -> Guide:
        """Raises ValueError for a form that is malformed or cannot be met, or a model whose tokens are not known."""
        from llguidance import LLMatcher

        matcher = LLMatcher(self._tokenizer, grammar_of(asked), log_level=0)
        if matcher.is_error():
            raise ValueError(f"the answer's form cannot be met: {matcher.get_error().splitlines()[0][:200]}")
        return Guide(matcher, self.vocab)

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        from llguidance import LLTokenizer, TokenizerWrapper

        if isinstance(self.words, TextTokenizer):
            # an end that no model gives stands for none
            ends = list(self.ends) or [self.vocab]
            try:
                return LLTokenizer(self.words.as_json(), n_vocab=max(self.vocab, *ends) + 1, eos_token=ends)
            except Exception as error:  # the package raises bare Exception
                says = str(error).splitlines()[0][:120]
                raise ValueError(f"answers cannot be constrained with this tokenizer: {says}; leave it out") from None
        if isinstance(self.words, ByteWords):
            return LLTokenizer(TokenizerWrapper(_Bytes(self.ends[0] if self.ends else 256)))
        raise ValueError("a form is of text, and this model came without a tokenizer; leave json_schema out")


class Guide:
    """`take` every token of the answer; `allowed` says what may come next. `complete` when nothing may."""

    def __init__(self, matcher: LLMatcher, vocab: int) -> None:
        self._matcher, self._vocab = matcher, vocab
        self._now: Tensor | None = None  # the mask of the present place

    def allowed(self, draft: Sequence[int] = ()) -> Tensor | None:
        """Bool `[V]`, after so many drafted tokens; None where these are not allowed themselves, or end the answer."""
        if not draft:
            return self._next()
        matcher, draft = self._matcher, list(draft)
        taken = matcher.try_consume_tokens(draft)
        found = None if taken < len(draft) else self._mask()
        if taken:
            matcher.rollback(taken)
        return found if found is not None and found.any() else None

    def take(self, token: int) -> None:
        self._now = None
        if not self._matcher.consume_token(token):
            raise RuntimeError(f"a form broke at token {token}: {self._matcher.get_error().splitlines()[0][:200]}")

    @property
    def complete(self) -> bool:
        return bool(self._matcher.is_stopped()) or not bool(self._next().any())

    def copy(self) -> Guide:
        return Guide(self._matcher.deep_copy(), self._vocab)

    def _next(self) -> Tensor:
        if self._now is None:
            self._now = self._mask()
        return self._now

    def _mask(self) -> Tensor:
        bits = np.unpackbits(np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8), bitorder="little")
        mask = torch.zeros(self._vocab, dtype=torch.bool)
        mask[: len(bits)] = torch.from_numpy(bits[: self._vocab].astype(bool))
        return mask


class _Bytes:
    """A tokenizer whose tokens are bytes, as llguidance wants to see one."""

    def __init__(self, end: int) -> None:
        self.eos_token_id, self.bos_token_id = end, None
        self.tokens = [bytes([each]) for each in range(256)] + [b"<end>"]
        self.special_token_ids = [256]

    def __call__(self, text: Any) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)
