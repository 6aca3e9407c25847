"""Which tokens may come next, for each request that keeps to a form.

Knows tokenizers and masks; knows no logits. V is the model's vocabulary.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.inference.constrain.grammar import form_of, grammar_of
from workers.inference.sampling.parameters import SamplingParams
from workers.inference.text.tokenizer import ByteTokenizer, Tokenizer
from workers.models.text.tokenizer import TextTokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer


_REMEMBERED = 64  # forms


class Guides:
    """Of one model: `open` one for each request that is constrained. `ends` may come where the form
    is complete.

    A form is made once and then copied; making one may take a second, and may be done in another
    thread before.
    """

    def __init__(self, words: Tokenizer | None, ends: Sequence[int], *, vocab: int) -> None:
        self.words, self.ends, self.vocab = words, tuple(ends), vocab
        self._made: OrderedDict[tuple[str, str], Guide] = OrderedDict()
        self._lock = threading.Lock()

    def open(self, asked: SamplingParams) -> Guide:
        """Raises ValueError for a form that is malformed or cannot be met, or a model whose tokens
        are not known.
        """
        key = form_of(asked)
        with self._lock:
            if (known := self._made.get(key)) is not None:
                self._made.move_to_end(key)
        if known is None:
            known = self._new(asked, key[0])
            with self._lock:
                self._made[key] = known
                while len(self._made) > _REMEMBERED:
                    self._made.popitem(last=False)
        return known.copy()

    def _new(self, asked: SamplingParams, name: str) -> Guide:
        from llguidance import LLMatcher

        text = grammar_of(asked)
        try:
            tokenizer = self._tokenizer
        except ValueError as error:
            raise ValueError(f"{name} cannot be met: {error}") from None
        guide = Guide(LLMatcher(tokenizer, text, log_level=0), self.vocab)
        if wrong := guide.wrong():
            raise ValueError(f"{name} cannot be met: {wrong}; try a simpler one, or leave it out")
        return guide

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        from llguidance import LLTokenizer, TokenizerWrapper

        if isinstance(self.words, TextTokenizer):
            # an end that no model gives stands for none
            ends = list(self.ends) or [self.vocab]
            try:
                return LLTokenizer(
                    self.words.as_json(), n_vocab=max(self.vocab, *ends) + 1, eos_token=ends
                )
            except Exception as error:  # the package raises bare Exception
                message = str(error).splitlines()[0][:120]
                raise ValueError(
                    f"answers cannot be constrained with this tokenizer: {message}; leave it out"
                ) from None
        if isinstance(self.words, ByteTokenizer):
            return LLTokenizer(TokenizerWrapper(_Bytes(self.ends[0] if self.ends else 256)))
        raise ValueError(
            "a form is of text, and this model came without a tokenizer; leave json_schema out"
        )


class Guide:
    """`take` every token of the answer; `allowed` says what may come next. `complete` when nothing
    may, and where the
    form has grown beyond what its reader follows (`lost`), which ends the answer and not the
    engine.
    """

    def __init__(self, matcher: LLMatcher, vocab: int) -> None:
        self._matcher, self._vocab = matcher, vocab
        self._now: NDArray[np.bool_] | None = None  # the mask of the present place
        self.lost = False

    def allowed(self, draft: Sequence[int] = ()) -> Tensor | None:
        """Bool `[V]`, after so many drafted tokens; None where these are not allowed themselves, or
        end the answer.
        """
        if not draft:
            return torch.from_numpy(self._next())
        matcher, draft = self._matcher, list(draft)
        taken = matcher.try_consume_tokens(draft)
        found = None if taken < len(draft) else self._mask()
        if taken:
            matcher.rollback(taken)
        return torch.from_numpy(found) if found is not None and found.any() else None

    def take(self, token: int) -> None:
        self._now = None
        self.lost = self.lost or not self._matcher.consume_token(token)

    @property
    def complete(self) -> bool:
        return self.lost or bool(self._matcher.is_stopped()) or not self._next().any()

    def wrong(self) -> str:
        """Why no answer can begin: the form's reader gives up at once, or the model's tokens do not
        spell it.
        """
        matcher = self._matcher
        begins: list[int] = [] if matcher.is_error() else self._next().nonzero()[0].tolist()
        if begins:
            matcher.rollback(matcher.try_consume_tokens(begins[:1]))
        if matcher.is_error():
            return str(matcher.get_error()).splitlines()[0][:200]
        return "" if begins else "no token of this model begins such an answer"

    def copy(self) -> Guide:
        found = Guide(self._matcher.deep_copy(), self._vocab)
        found._now, found.lost = self._now, self.lost
        return found

    def _next(self) -> NDArray[np.bool_]:
        if self._now is None:
            self._now = self._mask()
        return self._now

    def _mask(self) -> NDArray[np.bool_]:
        """By numpy: forms are made in threads, where torch would start workers of their own (see
        `apart`).
        """
        bits = np.unpackbits(
            np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8), bitorder="little"
        )
        mask = np.zeros(self._vocab, dtype=np.bool_)
        mask[: len(bits)] = bits[: self._vocab]
        return mask


class _Bytes:
    """A tokenizer whose tokens are bytes, as llguidance wants to see one."""

    def __init__(self, end: int) -> None:
        self.eos_token_id, self.bos_token_id = end, None
        self.special_token_ids = list(range(256, max(256, end) + 1))
        self.tokens = [bytes([each]) for each in range(256)] + [
            b"<%d>" % each for each in self.special_token_ids
        ]

    def __call__(self, text: Any) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)
