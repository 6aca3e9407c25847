"""Logits to tokens: bias, penalties, temperature, truncation and the draw, each row independently.

Stateless: a draw depends only on seed, answer index and position, so a preempted or restarted
request continues unchanged. Shapes: S rows, V vocabulary, K candidates.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workers.inference.request import Request
from workers.inference.sampling.parameters import SamplingParams
from workers.models.initialize import derived_seed
from workers.runtime.exit_codes import NumericsError

_CANDIDATES = 512  # likeliest tokens to truncate within, before the whole vocabulary is sorted


@dataclass(frozen=True, slots=True)
class Row:
    """A row of logits: after a request's tokens and the first `ahead` tokens of its draft."""

    request: Request
    ahead: int = 0

    @property
    def position(self) -> int:
        """The position of the token to choose."""
        return len(self.request.tokens) + self.ahead

    @property
    def tokens(self) -> list[int]:
        """All tokens before that position."""
        return self.request.tokens + self.request.draft[: self.ahead]

    def uniform(self, purpose: str = "draw") -> float:
        """A number in [0, 1) with 53 bits, from the request's seed, the position and `purpose`."""
        seed = self.request.sampling.seed
        return (derived_seed(seed, purpose, self.request.answer, self.position) >> 10) / (1 << 53)


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A token with log-probabilities if requested, of the raw logits (no bias, no penalties).

    `top` lists the likeliest tokens with theirs, the likeliest first.
    """

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


def choose_tokens(adjusted_SV: Tensor, rows: Sequence[Row]) -> list[int]:
    """A token for each row of adjusted logits: the likeliest, or drawn by the row's uniform."""
    tokens: list[int] = adjusted_SV.argmax(-1).tolist()
    sampled = [index for index, row in enumerate(rows) if not row.request.sampling.greedy]
    if sampled:
        sampled_rows = [rows[index] for index in sampled]
        weights_SV = compute_weights(adjusted_SV[sampled], sampled_rows)
        drawn = sample_at(weights_SV, [row.uniform() for row in sampled_rows])
        for index, token in zip(sampled, drawn, strict=True):
            tokens[index] = token
    return tokens


def attach_logprobs(
    logits_SV: Tensor, rows: Sequence[Row], tokens: Sequence[int]
) -> list[SampledToken]:
    """Tokens with the log-probabilities that their requests want, from the raw logits."""
    params = [row.request.sampling for row in rows]
    sampled = [
        _with_logprobs(logits_SV[index], token, params[index].top_logprobs)
        if params[index].top_logprobs
        else SampledToken(token)
        for index, token in enumerate(tokens)
    ]
    chosen = [
        index for index, each in enumerate(params) if each.wants_logprobs and not each.top_logprobs
    ]
    if chosen:
        logprobs = _chosen_logprobs(
            logits_SV[chosen],
            [tokens[index] for index in chosen],
            [params[index].logprob_temperature for index in chosen],
        )
        for index, logprob in zip(chosen, logprobs, strict=True):
            sampled[index] = SampledToken(tokens[index], logprob)
    return sampled


def adjust_logits(logits_SV: Tensor, rows: Sequence[Row]) -> Tensor:
    """Logits with bias and penalties, and -inf for tokens that a constraint forbids.

    A new tensor if anything changes. Raises NumericsError for logits that are not finite.
    """
    if not bool(torch.isfinite(logits_SV).all()):
        raise NumericsError(
            "the model's logits are not finite numbers; check its weights, or try bf16 or fp32"
        )
    changed = [
        index
        for index, row in enumerate(rows)
        if row.request.sampling.adjusts_logits or row.request.guide
    ]
    if not changed:
        return logits_SV
    adjusted_SV = logits_SV.clone()
    for index in changed:
        row = rows[index]
        _adjust(adjusted_SV[index], row)
        allowed = (
            None
            if row.request.guide is None
            else row.request.guide.allowed(row.request.draft[: row.ahead])
        )
        if allowed is not None:
            adjusted_SV[index].masked_fill_(~allowed.to(adjusted_SV.device), -math.inf)
    return adjusted_SV


def _adjust(logits_V: Tensor, row: Row) -> None:
    params, device = row.request.sampling, logits_V.device
    if params.logit_bias:
        biased = torch.tensor(list(params.logit_bias), device=device)
        logits_V[biased] += torch.tensor(
            list(params.logit_bias.values()), device=device, dtype=logits_V.dtype
        )
    if not params.has_penalties:
        return
    tokens = row.tokens
    if params.repetition_penalty != 1:
        seen = torch.tensor(sorted(set(tokens)), device=device)
        values, penalty = logits_V[seen], params.repetition_penalty
        logits_V[seen] = torch.where(values > 0, values / penalty, values * penalty)
    counts = Counter(tokens[len(row.request.prompt) :])
    if counts and (params.presence_penalty or params.frequency_penalty):
        output = torch.tensor(list(counts), device=device)
        times = torch.tensor(list(counts.values()), device=device, dtype=logits_V.dtype)
        logits_V[output] -= params.presence_penalty + params.frequency_penalty * times


def compute_weights(adjusted_SV: Tensor, rows: Sequence[Row]) -> Tensor:
    """Unnormalized probabilities, fp64 `[S, V]`, that the rows are drawn from; no greedy rows."""
    weights_SV = torch.empty(adjusted_SV.shape, dtype=torch.float64, device=adjusted_SV.device)
    # separately, so that no row's draw depends on its neighbors' parameters
    for truncates in (False, True):
        part = [
            index for index, row in enumerate(rows) if row.request.sampling.truncates == truncates
        ]
        if part:
            params = [rows[index].request.sampling for index in part]
            weights_SV[part] = _weights(adjusted_SV[part], params, truncates=truncates)
    return weights_SV


def sample_at(weights_SV: Tensor, uniforms: Sequence[float]) -> list[int]:
    """Per row, the first token at which the cumulative weight exceeds its uniform share."""
    cumulative_SV = weights_SV.cumsum(-1)
    total = cumulative_SV[:, -1:]
    # the product must not be rounded up to the total
    below_total = torch.nextafter(total, torch.zeros_like(total))
    threshold = torch.minimum(_column(uniforms, weights_SV) * total, below_total)
    tokens: list[int] = torch.searchsorted(cumulative_SV, threshold, right=True).squeeze(1).tolist()
    return tokens


def _weights(logits_SV: Tensor, params: Sequence[SamplingParams], *, truncates: bool) -> Tensor:
    temperature = _column([row.temperature for row in params], logits_SV)
    # subtract the maximum first: a temperature near 0 then gives -inf and no overflow
    scores_SV = (logits_SV.double() - logits_SV.double().amax(-1, keepdim=True)) / temperature
    if not truncates:
        return scores_SV.softmax(-1)
    vocab = scores_SV.shape[1]
    if vocab <= _CANDIDATES:
        return _truncate_sorted(scores_SV, params)
    weights_SV, exact = _truncate_candidates(scores_SV, params)
    rest = [index for index, is_exact in enumerate(exact) if not is_exact]
    if rest:
        weights_SV[rest] = _truncate_sorted(scores_SV[rest], [params[index] for index in rest])
    return weights_SV


def _truncate_candidates(
    scores_SV: Tensor, params: Sequence[SamplingParams]
) -> tuple[Tensor, list[bool]]:
    """Truncate among the likeliest tokens only; for which rows that equals `_truncate_sorted`.

    It does if the last retained token is above the last candidate, not tied with it.
    """
    values_SK, ids_SK = scores_SV.topk(_CANDIDATES, dim=-1)
    # order ties by id, as a stable sort of the whole vocabulary does
    ids_SK, by_id = ids_SK.sort(dim=-1)
    values_SK, order = values_SK.gather(1, by_id).sort(dim=-1, descending=True, stable=True)
    ids_SK = ids_SK.gather(1, order)
    rank = torch.arange(_CANDIDATES, device=scores_SV.device)
    top_k = _column([row.top_k or math.inf for row in params], scores_SV)
    over_vocab_SK = scores_SV.softmax(-1).gather(1, ids_SK)
    over_top_k_SK = values_SK.masked_fill(rank >= top_k, -math.inf).softmax(-1)
    shares_SK = torch.where(torch.isinf(top_k), over_vocab_SK, over_top_k_SK)
    retained = _retained(shares_SK, params) & (rank < top_k)
    # what is retained is a prefix of the candidates
    last = retained.sum(-1, keepdim=True) - 1
    exact = values_SK.gather(1, last).squeeze(1) > values_SK[:, -1]
    weights_SV = torch.zeros_like(scores_SV).scatter_(1, ids_SK, shares_SK * retained)
    return weights_SV, exact.tolist()


def _truncate_sorted(scores_SV: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Truncate by definition, over the whole sorted vocabulary."""
    sorted_SV, order = scores_SV.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(scores_SV.shape[1], device=scores_SV.device)
    top_k = _column([row.top_k or math.inf for row in params], scores_SV)
    shares_SV = sorted_SV.masked_fill(rank >= top_k, -math.inf).softmax(-1)
    return torch.zeros_like(shares_SV).scatter_(1, order, shares_SV * _retained(shares_SV, params))


def _retained(shares: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Which of the shares, in descending order, top-p and min-p retain.

    Top-p retains the fewest that reach top_p together, min-p those above its share of the first.
    """
    before = shares.cumsum(-1) - shares
    top_p = _column([row.top_p for row in params], shares)
    minimum = _column([row.min_p for row in params], shares) * shares[:, :1]
    first = torch.arange(shares.shape[1], device=shares.device) == 0
    return ((before < top_p) | (top_p >= 1) | first) & (shares >= minimum)


def _column(numbers: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float64, device=like.device).unsqueeze(1)


def _chosen_logprobs(
    logits_SV: Tensor, tokens: Sequence[int], temperatures: Sequence[float]
) -> list[float]:
    """Each row's log-probability of its token, `[S]`, at its temperature."""
    scaled_SV = logits_SV.double() / _column(temperatures, logits_SV)
    column = torch.tensor(tokens, device=logits_SV.device).unsqueeze(1)
    logprobs: list[float] = (
        scaled_SV.gather(1, column).squeeze(1) - scaled_SV.logsumexp(-1)
    ).tolist()
    return logprobs


def _with_logprobs(logits_V: Tensor, token: int, top: int) -> SampledToken:
    logprobs_V = logits_V.double().log_softmax(-1)
    values, ids = logprobs_V.topk(min(top, len(logprobs_V)))
    alternatives = tuple(zip(ids.tolist(), values.tolist(), strict=True))
    return SampledToken(token, float(logprobs_V[token]), alternatives)
