"""Allowed next tokens of each constrained request.

Does not depend on logits. V is the size of the model's vocabulary.
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

from workers.inference.constrain.grammar import build_grammar, get_constraint
from workers.inference.sampling.parameters import SamplingParams
from workers.inference.text.tokenizer import ByteTokenizer, Tokenizer
from workers.models.text.tokenizer import TextTokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer


_CACHED = 64  # guides


class Guides:
    """Guides of one model: `open` one per constrained request.

    `stop_token_ids` are allowed where the answer may be complete. A guide is compiled once and then
    copied; compiling may take a second, and may be done earlier in another thread.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, stop_token_ids: Sequence[int], *, vocab: int
    ) -> None:
        self.tokenizer, self.stop_token_ids, self.vocab = tokenizer, tuple(stop_token_ids), vocab
        self._cache: OrderedDict[tuple[str, str], Guide] = OrderedDict()
        self._lock = threading.Lock()

    def open(self, params: SamplingParams) -> Guide:
        """A new guide. Raises ValueError for a malformed or unsatisfiable constraint, or if the
        model has no tokenizer.
        """
        key = get_constraint(params)
        with self._lock:
            if (guide := self._cache.get(key)) is not None:
                self._cache.move_to_end(key)
        if guide is None:
            guide = self._compile(params, key[0])
            with self._lock:
                self._cache[key] = guide
                while len(self._cache) > _CACHED:
                    self._cache.popitem(last=False)
        return guide.copy()

    def _compile(self, params: SamplingParams, name: str) -> Guide:
        from llguidance import LLMatcher

        text = build_grammar(params)
        try:
            tokenizer = self._llguidance_tokenizer
        except ValueError as error:
            raise ValueError(f"{name} cannot be met: {error}") from None
        guide = Guide(LLMatcher(tokenizer, text, log_level=0), self.vocab)
        if problem := guide.first_error():
            raise ValueError(f"{name} cannot be met: {problem}. Use a simpler one, or omit it.")
        return guide

    @cached_property
    def _llguidance_tokenizer(self) -> LLTokenizer:
        from llguidance import LLTokenizer, TokenizerWrapper

        if isinstance(self.tokenizer, TextTokenizer):
            # without a stop token, use an id that the model never produces
            ends = list(self.stop_token_ids) or [self.vocab]
            try:
                return LLTokenizer(
                    self.tokenizer.as_json(), n_vocab=max(self.vocab, *ends) + 1, eos_token=ends
                )
            except Exception as error:  # the package raises bare Exception
                message = str(error).splitlines()[0][:120]
                raise ValueError(
                    f"answers cannot be constrained with this tokenizer: {message}; leave it out"
                ) from None
        if isinstance(self.tokenizer, ByteTokenizer):
            end = self.stop_token_ids[0] if self.stop_token_ids else 256
            return LLTokenizer(TokenizerWrapper(_ByteVocabulary(end)))
        raise ValueError(
            "constrained output requires a tokenizer, but this model has none; omit json_schema"
        )


class Guide:
    """State of one answer: call `advance` with each token; `allowed` masks the next one.

    `failed`: llguidance gave up on the grammar; the answer then counts as `complete`.
    """

    def __init__(self, matcher: LLMatcher, vocab: int) -> None:
        self._matcher, self._vocab = matcher, vocab
        self._current: NDArray[np.bool_] | None = None  # mask of the next token
        self.failed = False

    def allowed(self, draft: Sequence[int] = ()) -> Tensor | None:
        """Bool `[V]` after the draft tokens; None if these are not allowed or end the answer."""
        if not draft:
            return torch.from_numpy(self._next())
        matcher, draft = self._matcher, list(draft)
        consumed = matcher.try_consume_tokens(draft)
        mask = None if consumed < len(draft) else self._mask()
        if consumed:
            matcher.rollback(consumed)
        return torch.from_numpy(mask) if mask is not None and mask.any() else None

    def advance(self, token: int) -> None:
        """Append a token of the answer."""
        self._current = None
        self.failed = self.failed or not self._matcher.consume_token(token)

    @property
    def complete(self) -> bool:
        """Whether no token may follow."""
        return self.failed or bool(self._matcher.is_stopped()) or not self._next().any()

    def first_error(self) -> str:
        """Why no answer can begin: llguidance fails, or no token of the model fits; empty if one
        can.
        """
        matcher = self._matcher
        first: list[int] = [] if matcher.is_error() else self._next().nonzero()[0].tolist()
        if first:
            matcher.rollback(matcher.try_consume_tokens(first[:1]))
        if matcher.is_error():
            return str(matcher.get_error()).splitlines()[0][:200]
        return "" if first else "no token of this model begins such an answer"

    def copy(self) -> Guide:
        """An independent copy of the state."""
        guide = Guide(self._matcher.deep_copy(), self._vocab)
        guide._current, guide.failed = self._current, self.failed
        return guide

    def _next(self) -> NDArray[np.bool_]:
        if self._current is None:
            self._current = self._mask()
        return self._current

    def _mask(self) -> NDArray[np.bool_]:
        """Computed by numpy: guides are compiled in threads, where torch would start its own
        workers
        (see `cpu.threads`).
        """
        bits = np.unpackbits(
            np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8), bitorder="little"
        )
        mask = np.zeros(self._vocab, dtype=np.bool_)
        mask[: len(bits)] = bits[: self._vocab]
        return mask


class _ByteVocabulary:
    """A tokenizer whose tokens are bytes, in llguidance's interface."""

    def __init__(self, end: int) -> None:
        self.eos_token_id, self.bos_token_id = end, None
        self.special_token_ids = list(range(256, max(256, end) + 1))
        self.tokens = [bytes([byte]) for byte in range(256)] + [
            b"<%d>" % id for id in self.special_token_ids
        ]

    def __call__(self, text: Any) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)
