"""Log-probabilities of a prompt's tokens, from the raw logits at the token before each.

Shapes: T tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

_ROWS = 64  # in fp64 at a time


@dataclass(frozen=True, slots=True)
class PromptScore:
    """A prompt token's log-probability and rank (1: the likeliest), and the likeliest tokens."""

    token: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


def score_tokens(logits_TV: Tensor, tokens: Sequence[int], *, top: int) -> list[PromptScore]:
    """The score of each token, with the `top` likeliest at its position."""
    scores: list[PromptScore] = []
    for first in range(0, len(tokens), _ROWS):
        logprobs_TV = logits_TV[first : first + _ROWS].double().log_softmax(-1)
        part = tokens[first : first + _ROWS]
        own_T = logprobs_TV.gather(1, logprobs_TV.new_tensor(part).long().unsqueeze(1))
        ranks = 1 + (logprobs_TV > own_T).sum(1)
        values, ids = logprobs_TV.topk(min(top, logprobs_TV.shape[1]))
        rows = zip(
            part, own_T[:, 0].tolist(), ranks.tolist(), ids.tolist(), values.tolist(), strict=True
        )
        scores += [
            PromptScore(token, logprob, rank, tuple(zip(best, likely, strict=True)))
            for token, logprob, rank, best, likely in rows
        ]
    return scores
