"""Which drafted tokens stay and what comes after them: tokens are distributed as the model alone
would have them.

Knows logits and probabilities; knows neither cache nor draft models. Shapes: S rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from workers.inference.request import Request
from workers.inference.sampling.sampler import (
    Row,
    SampledToken,
    adjust_logits,
    attach_logprobs,
    choose_tokens,
    compute_weights,
    sample_at,
)


def verified(
    logits_SV: Tensor, groups: Sequence[Sequence[Row]], drawn_from: Mapping[Request, Tensor]
) -> list[list[SampledToken]]:
    """New tokens of each group, whose rows are a request's places one after the other: its draft as
    far as it is
    accepted, and one more.

    A draft that follows from the tokens before it (greedy, looked up) is accepted where it is the
    token that would have
    been drawn without it: the answer is then token for token the plain one, whatever was drafted.
    One that was drawn
    from q is accepted with probability min(1, p / q), and the first that is not is replaced by a
    draw from
    max(0, p - q) (Leviathan et al., arXiv 2211.17192, algorithm 1; Chen et al., arXiv 2302.01318):
    distributed as p,
    but another token than the plain draw. The same request, seed and drafts give the same tokens.

    p and q are what is left after bias, penalties, temperature and cuts. Raises NumericsError for
    a row that holds no
    numbers.
    """
    rows = [row for group in groups for row in group]
    if not rows:
        return []
    adjusted_SV = adjust_logits(logits_SV, rows)
    tokens: list[list[int]] = [[] for _ in groups]
    plain: list[int] = []  # rows
    drafted: list[tuple[int, int]] = []  # group and its first row
    starts = list(accumulate((len(group) for group in groups), initial=0))
    for number, (group, start) in enumerate(zip(groups, starts, strict=False)):
        if len(group) > 1 and group[0].request in drawn_from:
            drafted.append((number, start))
        else:
            plain += range(start, start + len(group))
    if plain:
        some = len(plain) < len(rows)
        found = iter(
            choose_tokens(adjusted_SV[plain] if some else adjusted_SV, [rows[row] for row in plain])
        )
        skipped = {number for number, _ in drafted}
        for number, group in enumerate(groups):
            if number not in skipped:
                draft = group[0].request.draft[: len(group) - 1]
                tokens[number] = _while_equal([next(found) for _ in group], draft)
    if drafted:
        _accepted(adjusted_SV, groups, drafted, drawn_from, tokens)
    kept = [
        start + place
        for each, start in zip(tokens, starts, strict=False)
        for place in range(len(each))
    ]
    some = len(kept) < len(rows)
    flat = [token for each in tokens for token in each]
    answers = iter(attach_logprobs(logits_SV[kept] if some else logits_SV, [rows[row] for row in kept], flat))
    return [[next(answers) for _ in each] for each in tokens]


def _while_equal(tokens: list[int], draft: Sequence[int]) -> list[int]:
    count = next((place for place, token in enumerate(draft) if tokens[place] != token), len(draft))
    return tokens[: count + 1]


def _accepted(
    adjusted_SV: Tensor,
    groups: Sequence[Sequence[Row]],
    drafted: Sequence[tuple[int, int]],
    drawn_from: Mapping[Request, Tensor],
    tokens: list[list[int]],
) -> None:
    last_rows, left = [], []
    for number, first in drafted:
        group, request = groups[number], groups[number][0].request
        p_SV = compute_weights(adjusted_SV[first : first + len(group)], group)
        p_SV /= p_SV.sum(-1, keepdim=True)
        q_SV, draft = drawn_from[request], request.draft[: len(group) - 1]
        ids = torch.tensor(draft, device=p_SV.device).unsqueeze(1)
        ratios = (p_SV[:-1].gather(1, ids) / q_SV[: len(draft)].gather(1, ids)).squeeze(1).tolist()
        count = next(
            (n for n, ratio in enumerate(ratios) if group[n].uniform("accept") >= ratio), len(draft)
        )
        tokens[number] = draft[:count]
        rest_V = p_SV[count]
        if count < len(draft):
            more_V = (rest_V - q_SV[count]).clamp(min=0)
            rest_V = more_V if bool(more_V.sum() > 0) else rest_V  # equal but for rounding
        last_rows.append(group[count])
        left.append(rest_V)
    finals = sample_at(torch.stack(left), [row.uniform() for row in last_rows])
    for (number, _), token in zip(drafted, finals, strict=True):
        tokens[number].append(token)
