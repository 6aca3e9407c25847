"""Logits to tokens: penalties, temperature, cuts and the draw, each row by itself whatever stands beside it.

Knows requests' parameters and tokens; keeps no state: a draw depends on seed, answer and place alone, so that a
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
from workers.models.initialise import derived_seed


@dataclass(frozen=True, slots=True)
class Drawn:
    """A token, and where it is asked for its log-probability by the model alone: before penalties and cuts."""

    token: int
    logprob: float | None = None


def sample(logits_SV: Tensor, requests: Sequence[Request]) -> list[Drawn]:
    """The next token of each request from its row. Raises ArithmeticError for a row that holds no numbers."""
    if not len(requests):
        return []
    if not bool(torch.isfinite(logits_SV).all()):
        raise ArithmeticError(
            "the model gives logits that are no finite numbers; check its weights, or try bf16 or fp32"
        )
    adjusted = _penalised(logits_SV, requests)
    tokens: list[int] = adjusted.argmax(-1).tolist()
    for cuts in (False, True):  # apart, so that no row's draw depends on what its neighbours ask for
        rows = [row for row, each in enumerate(requests) if not each.sampling.greedy and each.sampling.cuts == cuts]
        if rows:
            chosen = _drawn(adjusted[rows], [requests[row] for row in rows], cuts=cuts)
            for row, token in zip(rows, chosen, strict=True):
                tokens[row] = token
    return [
        Drawn(token, _logprob(logits_SV[row], token) if request.sampling.logprobs else None)
        for row, (token, request) in enumerate(zip(tokens, requests, strict=True))
    ]


def _penalised(logits_SV: Tensor, requests: Sequence[Request]) -> Tensor:
    rows = [row for row, each in enumerate(requests) if each.sampling.penalises]
    if not rows:
        return logits_SV
    out = logits_SV.clone()
    for row in rows:
        request, asked = requests[row], requests[row].sampling
        if asked.repetition_penalty != 1:
            seen = torch.tensor(sorted(set(request.tokens)), device=out.device)
            values, by = out[row, seen], asked.repetition_penalty
            out[row, seen] = torch.where(values > 0, values / by, values * by)
        counts = Counter(request.new_tokens)
        if counts and (asked.presence_penalty or asked.frequency_penalty):
            answered = torch.tensor(list(counts), device=out.device)
            times = torch.tensor(list(counts.values()), device=out.device, dtype=out.dtype)
            out[row, answered] -= asked.presence_penalty + asked.frequency_penalty * times
    return out


def _drawn(logits_SV: Tensor, requests: Sequence[Request], *, cuts: bool) -> list[int]:
    """By the inverse of the cumulative distribution, in fp64, at one uniform number a row."""
    asked = [each.sampling for each in requests]
    temperature = _column([each.temperature for each in asked], logits_SV)
    # the likeliest at 0 first: a temperature near 0 then makes -inf of the others, and no overflow
    scores = (logits_SV.double() - logits_SV.double().amax(-1, keepdim=True)) / temperature
    if not cuts:
        return _at(scores.softmax(-1), requests).tolist()
    scores, order = scores.sort(dim=-1, descending=True, stable=True)
    place = torch.arange(scores.shape[1], device=scores.device)
    most = _column([each.top_k or scores.shape[1] for each in asked], scores)
    shares = scores.masked_fill(place >= most, -math.inf).softmax(-1)
    # the fewest likeliest tokens that hold top_p together: those before which less than that is reached
    before = shares.cumsum(-1) - shares
    top_p = _column([each.top_p for each in asked], scores)
    least = _column([each.min_p for each in asked], scores) * shares[:, :1]
    kept = ((before < top_p) | (top_p >= 1) | (place == 0)) & (shares >= least)
    chosen = _at(shares * kept, requests)
    return order.gather(1, chosen.unsqueeze(1)).squeeze(1).tolist()


def _at(weights_SV: Tensor, requests: Sequence[Request]) -> Tensor:
    """For each row the first place up to which more than its uniform share of the weights lies."""
    up_to = weights_SV.cumsum(-1)
    total = up_to[:, -1:]
    uniform = _column([_uniform(each) for each in requests], weights_SV)
    below = torch.nextafter(total, torch.zeros_like(total))  # a product must not be rounded up to the total
    return torch.searchsorted(up_to, torch.minimum(uniform * total, below), right=True).squeeze(1)


def _uniform(request: Request) -> float:
    """In [0, 1), 53 bits."""
    return (derived_seed(request.sampling.seed, "draw", request.answer, len(request.tokens)) >> 10) / (1 << 53)


def _column(numbers: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64, device=like.device).unsqueeze(1)


def _logprob(logits_V: Tensor, token: int) -> float:
    return float(logits_V.double().log_softmax(-1)[token])
