"""Divergences of a teacher's and a student's next-token distributions, sharded or not.

Does not depend on batches. Shapes: V vocabulary, of which a rank may have a part; leading
dimensions are kept.
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from workers.contracts.specs.finetuning.objectives import DistillBody
from workers.models.layers.head import vocab_rows
from workers.training.parallel.batch_sharding import TopTokens


def divergence(student: Tensor, teacher: Tensor, options: DistillBody) -> Tensor:
    """The divergence per token, fp32, of logits `[…, V]`: full tensors, or both sharded DTensors.

    forward_kl is KL(teacher, student), reverse_kl is KL(student, teacher), jsd the generalized
    Jensen-Shannon divergence beta KL(t, m) + (1 - beta) KL(s, m) with m = beta t + (1 - beta) s
    (GKD, arXiv 2306.13649, equation 1); its ends beta 0 and 1 are the two KLs.
    """
    group = _group(student)
    log_s, log_t = (
        _log_softmax(local_logits(each) / options.temperature, group) for each in (student, teacher)
    )
    terms = _terms(log_s, log_t, options)
    summed = terms.sum(-1)
    return summed if group is None else _sum(summed, group)


def top_divergence(student: Tensor, teacher: TopTokens, temperature: float) -> Tensor:
    """KL(teacher, student) per token, fp32, of a teacher known by its most probable tokens.

    The teacher's distribution is over those tokens alone: its probabilities are divided by their
    sum. The student's is over the full vocabulary.
    """
    group = _group(student)
    logits = local_logits(student) / temperature
    total = logits.logsumexp(-1) if group is None else _log_sum_exp(logits, group)
    start, stop = 0, logits.shape[-1]
    if group is not None:
        sharded: Any = student
        start, stop = vocab_rows(student.shape[-1], sharded.device_mesh)
    log_t = (teacher.logprobs / temperature).log_softmax(-1)
    own = (teacher.tokens >= start) & (teacher.tokens < stop)
    if stop > start:
        places = (teacher.tokens - start).masked_fill(~own, 0)
        log_s = logits.gather(-1, places) - total.unsqueeze(-1)
    else:  # no rows of the vocabulary, but a gradient, of no elements
        log_s = torch.zeros_like(log_t) + logits.sum() - total.unsqueeze(-1)
    summed = (log_t.exp() * (log_t - log_s)).masked_fill(~own, 0.0).sum(-1)
    return summed if group is None else _sum(summed, group)


@torch.no_grad()
def top_tokens(logits: Tensor, count: int) -> TopTokens:
    """The `count` most probable tokens of logits `[…, V]`, sharded or not, most probable first."""
    group, own = _group(logits), local_logits(logits)
    total = own.logsumexp(-1) if group is None else _log_sum_exp(own, group)
    values, tokens = own.topk(min(count, own.shape[-1]), dim=-1)
    if group is not None:
        sharded: Any = logits
        tokens = tokens + vocab_rows(logits.shape[-1], sharded.device_mesh)[0]
        missing = count - values.shape[-1]  # every rank sends as many
        values = torch.nn.functional.pad(values, (0, missing), value=-torch.inf)
        tokens = torch.nn.functional.pad(tokens, (0, missing))
        values, tokens = _gathered(values, group), _gathered(tokens, group)
        values, places = values.topk(min(count, logits.shape[-1]), dim=-1)
        tokens = tokens.gather(-1, places)
    return TopTokens(tokens, values - total.unsqueeze(-1))


def local_logits(logits: Tensor) -> Tensor:
    """This rank's part of logits in fp32."""
    sharded: Any = logits
    return cast(Tensor, (sharded.to_local() if hasattr(logits, "to_local") else logits).float())


def _terms(log_s: Tensor, log_t: Tensor, options: DistillBody) -> Tensor:
    """What the vocabulary's entries add to the divergence."""
    beta = {"forward_kl": 0.0, "reverse_kl": 1.0}.get(options.loss, options.beta)
    if beta == 0:
        return log_t.exp() * (log_t - log_s)
    if beta == 1:
        return log_s.exp() * (log_s - log_t)
    log_m = torch.logaddexp(log_t + math.log(beta), log_s + math.log1p(-beta))
    return beta * log_t.exp() * (log_t - log_m) + (1 - beta) * log_s.exp() * (log_s - log_m)


def _log_softmax(logits: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    if group is None:
        return logits.log_softmax(-1)
    return logits - _log_sum_exp(logits, group).unsqueeze(-1)


def _group(logits: Tensor) -> dist.ProcessGroup | None:
    """The ranks that share the vocabulary; None if this one has all of it."""
    sharded: Any = logits
    return sharded.device_mesh.get_group() if hasattr(logits, "to_local") else None


def _gathered(own: Tensor, group: dist.ProcessGroup) -> Tensor:
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, own.contiguous(), group=group)
    return torch.cat(parts, dim=-1)


def _sum(own: Tensor, group: dist.ProcessGroup) -> Tensor:
    return cast(Tensor, _Sum.apply(own, group))  # type: ignore[no-untyped-call]


def _log_sum_exp(own: Tensor, group: dist.ProcessGroup) -> Tensor:
    return cast(Tensor, _LogSumExp.apply(own, group))  # type: ignore[no-untyped-call]


class _Sum(torch.autograd.Function):
    """A sum over ranks; each rank differentiates the same loss by its own part."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, group: dist.ProcessGroup) -> Tensor:
        total = own.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class _LogSumExp(torch.autograd.Function):
    """The log-sum-exp over all parts of the vocabulary, which every rank's terms depend on."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, group: dist.ProcessGroup) -> Tensor:
        empty = own.new_full(own.shape[:-1], -torch.inf)
        largest = own.amax(-1) if own.shape[-1] else empty
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        sums = (own - largest.unsqueeze(-1)).exp().sum(-1)
        dist.all_reduce(sums, group=group)
        out = largest + sums.log()
        ctx.save_for_backward(own, out)
        ctx.group = group
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        own, out = ctx.saved_tensors
        total = gradients[0].contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return (own - out.unsqueeze(-1)).exp() * total.unsqueeze(-1), None
