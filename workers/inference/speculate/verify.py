"""Verification of draft tokens: results are distributed as without drafts.

Does not depend on the cache or draft models. Shapes: S rows, V vocabulary.
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


def verify_drafts(
    logits_SV: Tensor, groups: Sequence[Sequence[Row]], draft_probs: Mapping[Request, Tensor]
) -> list[list[SampledToken]]:
    """New tokens of each group: its accepted draft tokens and one more.

    A group holds one row per consecutive position of a request. A deterministic draft token
    (greedy, n-gram) is accepted if it equals the token sampled without drafts, so the answer is the
    same. A token sampled from q is accepted with probability min(1, p / q), and the first rejected
    one is replaced by a sample from max(0, p - q) (Leviathan et al., arXiv 2211.17192, algorithm 1;
    Chen et al., arXiv 2302.01318): distributed as p, but not the same token as without drafts. The
    same request, seed and drafts give the same tokens.

    p and q are the probabilities after bias, penalties, temperature and top-k/top-p. Raises
    NumericsError for a row with non-finite logits.
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
        if len(group) > 1 and group[0].request in draft_probs:
            drafted.append((number, start))
        else:
            plain += range(start, start + len(group))
    if plain:
        plain_SV = adjusted_SV[plain] if len(plain) < len(rows) else adjusted_SV
        chosen = iter(choose_tokens(plain_SV, [rows[row] for row in plain]))
        skipped = {number for number, _ in drafted}
        for number, group in enumerate(groups):
            if number not in skipped:
                draft = group[0].request.draft[: len(group) - 1]
                tokens[number] = _matching_prefix([next(chosen) for _ in group], draft)
    if drafted:
        _verify_sampled(adjusted_SV, groups, drafted, draft_probs, tokens)
    used = [start + n for new, start in zip(tokens, starts, strict=False) for n in range(len(new))]
    flat = [token for new in tokens for token in new]
    used_SV = logits_SV[used] if len(used) < len(rows) else logits_SV
    sampled = iter(attach_logprobs(used_SV, [rows[row] for row in used], flat))
    return [[next(sampled) for _ in new] for new in tokens]


def _matching_prefix(tokens: list[int], draft: Sequence[int]) -> list[int]:
    count = next((n for n, token in enumerate(draft) if tokens[n] != token), len(draft))
    return tokens[: count + 1]


def _verify_sampled(
    adjusted_SV: Tensor,
    groups: Sequence[Sequence[Row]],
    drafted: Sequence[tuple[int, int]],
    draft_probs: Mapping[Request, Tensor],
    tokens: list[list[int]],
) -> None:
    last_rows, remainders = [], []
    for number, first in drafted:
        group, request = groups[number], groups[number][0].request
        p_SV = compute_weights(adjusted_SV[first : first + len(group)], group)
        p_SV /= p_SV.sum(-1, keepdim=True)
        q_SV, draft = draft_probs[request], request.draft[: len(group) - 1]
        ids = torch.tensor(draft, device=p_SV.device).unsqueeze(1)
        ratios = (p_SV[:-1].gather(1, ids) / q_SV[: len(draft)].gather(1, ids)).squeeze(1).tolist()
        count = next(
            (n for n, ratio in enumerate(ratios) if group[n].uniform("accept") >= ratio), len(draft)
        )
        tokens[number] = draft[:count]
        rest_V = p_SV[count]
        if count < len(draft):
            more_V = (rest_V - q_SV[count]).clamp(min=0)
            rest_V = more_V if bool(more_V.sum() > 0) else rest_V  # p equals q except for rounding
        last_rows.append(group[count])
        remainders.append(rest_V)
    finals = sample_at(torch.stack(remainders), [row.uniform() for row in last_rows])
    for (number, _), token in zip(drafted, finals, strict=True):
        tokens[number].append(token)
