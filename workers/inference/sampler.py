"""Logits to tokens: bias, penalties, temperature, cuts and the draw, each row by itself whatever
stands beside it.

Knows requests' parameters and tokens; keeps no state: a draw depends on seed, answer and place
alone, so that a
preempted or restarted request goes on as it would have. Shapes: S rows, V vocabulary.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workers.inference.request import Request
from workers.inference.sampling import Sampling
from workers.models.initialise import derived_seed

_LIKELIEST = 512  # tokens that cuts are looked for among, before the whole vocabulary is sorted


@dataclass(frozen=True, slots=True)
class Row:
    """A place where a token is to be chosen: after a request's tokens and the first `ahead` of its
    draft.
    """

    request: Request
    ahead: int = 0

    @property
    def place(self) -> int:
        return len(self.request.tokens) + self.ahead

    @property
    def tokens(self) -> list[int]:
        return self.request.tokens + self.request.draft[: self.ahead]

    def uniform(self, purpose: str = "draw") -> float:
        """In [0, 1), 53 bits: by the request's seed, the place and what the number is for."""
        asked = self.request.sampling
        return (derived_seed(asked.seed, purpose, self.request.answer, self.place) >> 10) / (
            1 << 53
        )


@dataclass(frozen=True, slots=True)
class Drawn:
    """A token, and where it is asked for its log-probability by the model alone: before bias,
    penalties and cuts.

    `top` has the likeliest tokens with theirs, `top_logprobs` of them, the likeliest first.
    """

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


def chosen(adjusted_SV: Tensor, rows: Sequence[Row]) -> list[int]:
    """A token for each row of `adjusted` logits: the likeliest, or one drawn at the row's own
    uniform number.
    """
    tokens: list[int] = adjusted_SV.argmax(-1).tolist()
    drawn = [number for number, row in enumerate(rows) if not row.request.sampling.greedy]
    if drawn:
        asked = [rows[number] for number in drawn]
        found = at(weights(adjusted_SV[drawn], asked), [row.uniform() for row in asked])
        for number, token in zip(drawn, found, strict=True):
            tokens[number] = token
    return tokens


def told(logits_SV: Tensor, rows: Sequence[Row], tokens: Sequence[int]) -> list[Drawn]:
    """Tokens with what their requests want told of them, from the model's own logits."""
    return [
        _told(logits_SV[number], token, row.request.sampling.top_logprobs)
        if row.request.sampling.tells
        else Drawn(token)
        for number, (row, token) in enumerate(zip(rows, tokens, strict=True))
    ]


def adjusted(logits_SV: Tensor, rows: Sequence[Row]) -> Tensor:
    """With bias, penalties and -inf where a form forbids, before temperature and cuts; new where
    anything changes.

    Raises ArithmeticError for a row that holds no numbers.
    """
    if not bool(torch.isfinite(logits_SV).all()):
        raise ArithmeticError(
            "the model gives logits that are no finite numbers; check its weights, or try bf16 or "
            "fp32"
        )
    changed = [
        number
        for number, row in enumerate(rows)
        if row.request.sampling.adjusts or row.request.guide
    ]
    if not changed:
        return logits_SV
    out = logits_SV.clone()
    for number in changed:
        row = rows[number]
        _adjust(out[number], row)
        allowed = (
            None
            if row.request.guide is None
            else row.request.guide.allowed(row.request.draft[: row.ahead])
        )
        if allowed is not None:
            out[number].masked_fill_(~allowed.to(out.device), -math.inf)
    return out


def _adjust(logits_V: Tensor, row: Row) -> None:
    asked, device = row.request.sampling, logits_V.device
    if asked.logit_bias:
        biased = torch.tensor(list(asked.logit_bias), device=device)
        logits_V[biased] += torch.tensor(
            list(asked.logit_bias.values()), device=device, dtype=logits_V.dtype
        )
    if not asked.penalises:
        return
    tokens = row.tokens
    if asked.repetition_penalty != 1:
        seen = torch.tensor(sorted(set(tokens)), device=device)
        values, by = logits_V[seen], asked.repetition_penalty
        logits_V[seen] = torch.where(values > 0, values / by, values * by)
    counts = Counter(tokens[len(row.request.prompt) :])
    if counts and (asked.presence_penalty or asked.frequency_penalty):
        answered = torch.tensor(list(counts), device=device)
        times = torch.tensor(list(counts.values()), device=device, dtype=logits_V.dtype)
        logits_V[answered] -= asked.presence_penalty + asked.frequency_penalty * times


def weights(adjusted_SV: Tensor, rows: Sequence[Row]) -> Tensor:
    """fp64 `[S, V]`, proportional to the probabilities that the rows are drawn from; none of them
    greedy.
    """
    out_SV = torch.empty(adjusted_SV.shape, dtype=torch.float64, device=adjusted_SV.device)
    # apart, so that no row's draw depends on what its neighbours ask for
    for cuts in (False, True):
        part = [number for number, row in enumerate(rows) if row.request.sampling.cuts == cuts]
        if part:
            out_SV[part] = _weights(adjusted_SV[part], [rows[number] for number in part], cuts=cuts)
    return out_SV


def at(weights_SV: Tensor, uniforms: Sequence[float]) -> list[int]:
    """For each row the first place up to which more than its uniform share of the weights lies."""
    up_to = weights_SV.cumsum(-1)
    total = up_to[:, -1:]
    # a product must not be rounded up to the total
    below = torch.nextafter(total, torch.zeros_like(total))
    share = torch.minimum(_column(uniforms, weights_SV) * total, below)
    tokens: list[int] = torch.searchsorted(up_to, share, right=True).squeeze(1).tolist()
    return tokens


def _weights(logits_SV: Tensor, rows: Sequence[Row], *, cuts: bool) -> Tensor:
    asked = [each.request.sampling for each in rows]
    temperature = _column([each.temperature for each in asked], logits_SV)
    # the likeliest at 0 first: a temperature near 0 then makes -inf of the others, and no overflow
    scores_SV = (logits_SV.double() - logits_SV.double().amax(-1, keepdim=True)) / temperature
    if not cuts:
        return scores_SV.softmax(-1)
    vocab = scores_SV.shape[1]
    if vocab <= _LIKELIEST:
        return _all_sorted(scores_SV, asked)
    out_SV, seen = _few_sorted(scores_SV, asked)
    rest = [number for number, each in enumerate(seen) if not each]
    if rest:
        out_SV[rest] = _all_sorted(scores_SV[rest], [asked[number] for number in rest])
    return out_SV


def _few_sorted(scores_SV: Tensor, asked: Sequence[Sampling]) -> tuple[Tensor, list[bool]]:
    """The cuts made among the likeliest tokens alone, and for which rows that is what `_all_sorted`
    would keep: where
    the cut falls before the last of them, and not among equals of it."""
    values_SK, ids_SK = scores_SV.topk(_LIKELIEST, dim=-1)
    # equals in the order of their ids, as a stable sort of all leaves them
    ids_SK, by_id = ids_SK.sort(dim=-1)
    values_SK, order = values_SK.gather(1, by_id).sort(dim=-1, descending=True, stable=True)
    ids_SK = ids_SK.gather(1, order)
    place = torch.arange(_LIKELIEST, device=scores_SV.device)
    most = _column([each.top_k or math.inf for each in asked], scores_SV)
    of_all_SK = scores_SV.softmax(-1).gather(1, ids_SK)
    of_few_SK = values_SK.masked_fill(place >= most, -math.inf).softmax(-1)
    shares_SK = torch.where(torch.isinf(most), of_all_SK, of_few_SK)
    kept = _kept(shares_SK, asked)
    inside = kept & (place < most)
    # what is kept is one stretch from the likeliest on; it must end above the least of those looked
    # at
    last = inside.sum(-1, keepdim=True) - 1
    sure = values_SK.gather(1, last).squeeze(1) > values_SK[:, -1]
    out_SV = torch.zeros_like(scores_SV).scatter_(1, ids_SK, shares_SK * inside)
    return out_SV, sure.tolist()


def _all_sorted(scores_SV: Tensor, asked: Sequence[Sampling]) -> Tensor:
    """The cuts as they are defined, over the whole vocabulary in order."""
    sorted_SV, order = scores_SV.sort(dim=-1, descending=True, stable=True)
    place = torch.arange(scores_SV.shape[1], device=scores_SV.device)
    most = _column([each.top_k or math.inf for each in asked], scores_SV)
    shares_SV = sorted_SV.masked_fill(place >= most, -math.inf).softmax(-1)
    return torch.zeros_like(shares_SV).scatter_(1, order, shares_SV * _kept(shares_SV, asked))


def _kept(shares: Tensor, asked: Sequence[Sampling]) -> Tensor:
    """Of shares, the largest first, the fewest that hold top_p together: those before which less
    than that is reached;
    and none below min_p of the first."""
    before = shares.cumsum(-1) - shares
    top_p = _column([each.top_p for each in asked], shares)
    least = _column([each.min_p for each in asked], shares) * shares[:, :1]
    first = torch.arange(shares.shape[1], device=shares.device) == 0
    return ((before < top_p) | (top_p >= 1) | first) & (shares >= least)


def _column(numbers: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64, device=like.device).unsqueeze(1)


def _told(logits_V: Tensor, token: int, top: int) -> Drawn:
    logprobs_V = logits_V.double().log_softmax(-1)
    values, ids = logprobs_V.topk(min(top, len(logprobs_V)))
    alternatives = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    return Drawn(token, float(logprobs_V[token]), alternatives)
