"""`linear_cross_entropy`: the loss chunk by chunk of tokens, without all logits in memory.

Per chunk: logits by one product, their gradient in place, two more products. Under mean and sum the
forward pass computes the gradients: six instead of eight M·H·V products. Shapes: N tokens, H
hidden, V vocabulary rows of this rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels import checks, runtime
from kernels.cross_entropy.reference import linear_cross_entropy as reference
from kernels.cross_entropy.row_kernel import VocabularyShard, stats_and_grads
from kernels.cross_entropy.weight_gradient import add_product, scaled, zeros_for
from kernels.dispatch import Candidate, choose

REDUCTIONS = ("mean", "sum", "none")
CHUNK_BYTES = {"cuda": 512 << 20, "cpu": 32 << 20}
"""Bytes of a chunk's logits. On a GPU, 131,072 rows in bf16 give 2,048 tokens, which fill it; on a
CPU a chunk stays near its caches. The gradient of 16-bit weights is summed in fp32, which takes 4
bytes per weight.
"""


@dataclass(frozen=True)
class _Call:
    vocabulary: VocabularyShard
    reduction: str
    chunk: int
    group: dist.ProcessGroup | None
    own: bool
    early: bool  # gradients in the forward pass
    needs: tuple[bool, bool]  # of h, of w


def linear_cross_entropy(
    h: Tensor,
    w: Tensor,
    targets: Tensor,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    softcap: float = 0.0,
    chunk: int | None = None,
    group: dist.ProcessGroup | None = None,
    start: int | None = None,
    check: bool = True,
    backend: str | None = None,
) -> Tensor:
    """Cross-entropy of logits h·wᵀ, fp32: a scalar for "mean" (over counted targets; NaN without
    any, as in torch) and "sum", `targets`' shape for "none".

    h `[…, H]`; w `[V, H]`; targets `[…]` int, 0 to V - 1 or `ignore_index`. softcap c > 0: logits
    are c · tanh(logits / c). chunk: tokens whose logits are in memory at a time. group: w holds
    this rank's rows of the vocabulary, from `start` on. Without `start` the ranks exchange their
    numbers of rows, which synchronizes; with it a target outside every shard gives NaN. h and
    targets are the same on all ranks, and so are the loss and h's gradient. check: rejects targets
    out of range, which synchronizes with a GPU; otherwise a device assertion fails. Backward
    recomputes the logits under "none", for fp16 (whose gradients need the loss scale before
    rounding) and when run a second time. Raises ValueError or TypeError.
    """
    _check(h, w, targets, reduction, softcap, chunk, ignore_index)
    size = 1 if group is None else group.size()
    first, total = (
        (0, w.shape[0])
        if size == 1
        else _vocabulary_range(w, cast(dist.ProcessGroup, group), start)
    )
    _check_targets(targets, total, ignore_index, check)
    facts: dict[str, object] = {
        "dtype": h.dtype,
        "device": h.device.type,
        "reduction": reduction,
        "softcap": bool(softcap),
        "sharded": size > 1,
    }
    sharded_reason = "the reference needs the full vocabulary" if size > 1 else None
    double = "fp64" if h.dtype == torch.float64 else None
    candidates = (
        Candidate("own", runtime.why_not(h) or double),
        Candidate("torch"),
        Candidate("reference", sharded_reason),
    )
    chosen = choose("linear_cross_entropy", facts, candidates, backend).backend
    h_NH, targets_N = h.reshape(-1, h.shape[-1]), targets.reshape(-1)
    if chosen == "reference":
        loss = reference(
            h_NH, w, targets_N, ignore_index=ignore_index, reduction=reduction, softcap=softcap
        )
        return loss.view(targets.shape) if reduction == "none" else loss
    grad = torch.is_grad_enabled()
    needs = (grad and h.requires_grad, grad and w.requires_grad)
    call = _Call(
        VocabularyShard(first, ignore_index, float(softcap)),
        reduction,
        chunk or _chunk(w),
        group if size > 1 else None,
        chosen == "own",
        any(needs) and reduction != "none" and h.dtype != torch.float16,
        needs,
    )
    loss = cast(Tensor, _LinearCrossEntropy.apply(h_NH, w, targets_N, call))  # type: ignore[no-untyped-call]
    return loss.view(targets.shape) if reduction == "none" else loss


def _check(
    h: Tensor,
    w: Tensor,
    targets: Tensor,
    reduction: str,
    softcap: float,
    chunk: int | None,
    ignore_index: int,
) -> None:
    checks.dtype_in("h", h, (*checks.FLOATS, torch.float64))
    checks.same_dtype(h=h, w=w)
    if h.dim() < 1:
        raise ValueError("h has no dimensions; it must be [..., hidden].")
    checks.shape("w", w, (None, h.shape[-1]), "vocabulary, hidden of h")
    checks.integer_dtype("targets", targets)
    checks.shape("targets", targets, tuple(h.shape[:-1]), "h without its last dimension")
    checks.same_device(h=h, w=w, targets=targets)
    checks.one_of("reduction", reduction, REDUCTIONS)
    checks.softcap(softcap)
    checks.integer("ignore_index", ignore_index, None)
    if chunk is not None:
        checks.integer("chunk", chunk)


def _check_targets(targets: Tensor, total: int, ignore_index: int, check: bool) -> None:
    if not targets.numel():
        return
    bad = (targets != ignore_index) & ((targets < 0) | (targets >= total))
    if targets.is_cuda and (not check or torch.cuda.is_current_stream_capturing()):
        torch._assert_async(~bad.any())
    elif bool(bad.any()):
        raise ValueError(
            f"targets contain {int(targets[bad][0])}; they must be in 0 to {total - 1} or be "
            f"ignore_index {ignore_index}."
        )


def _vocabulary_range(w: Tensor, group: dist.ProcessGroup, start: int | None) -> tuple[int, int]:
    """The first row of this rank, and the rows of all ranks (unbounded if `start` was given)."""
    if start is not None:
        return start, 1 << 62
    counts = [torch.zeros(1, dtype=torch.int64, device=w.device) for _ in range(group.size())]
    dist.all_gather(counts, torch.tensor([w.shape[0]], device=w.device), group=group)
    numbers = [int(c) for c in counts]
    return sum(numbers[: group.rank()]), sum(numbers)


def _chunk(w: Tensor) -> int:
    width = 4 if w.dtype == torch.float16 and not w.is_cuda else w.element_size()
    most = CHUNK_BYTES.get(w.device.type, CHUNK_BYTES["cpu"])
    return max(64, most // (max(1, w.shape[0]) * width) // 64 * 64)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor, w: Tensor, targets: Tensor, call: _Call) -> Tensor:
        ctx.call = call
        counting = targets != call.vocabulary.ignore_index
        scale = torch.ones(
            1, device=h.device, dtype=torch.float64 if h.dtype == torch.float64 else torch.float32
        )
        if call.reduction == "mean":
            scale = 1.0 / counting.sum(dtype=scale.dtype).view(1)
        losses, lse, dh, dw = _run_chunks(h, w, targets, call, scale if call.early else None)
        ctx.gradients = (dh, dw) if call.early else None
        ctx.save_for_backward(h, w, targets, lse, scale)
        if call.reduction == "none":
            return losses
        total = losses.sum()
        return total * scale[0] if call.reduction == "mean" else total

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        call: _Call = ctx.call
        (gradient,) = gradients
        if ctx.gradients is None:
            h, w, targets, lse, scale = ctx.saved_tensors
            weights = (gradient.to(lse.dtype) * scale).reshape(-1)
            if call.reduction != "none":
                weights = weights.expand(len(targets))
            _, _, dh, dw = _run_chunks(h, w, targets, call, weights.contiguous(), lse)
            return (*_as_operands((dh, dw), (h, w)), None, None)
        saved, ctx.gradients = ctx.gradients, None
        h, w, *_ = ctx.saved_tensors
        if gradient.is_cuda or float(gradient) != 1.0:  # reading a GPU's value would synchronize
            # in place: another gradient of the weight would be another 1 GiB at 131,072 x 4,096
            saved = tuple(None if x is None else scaled(x, gradient) for x in saved)
        return (*_as_operands(saved, (h, w)), None, None)


def _as_operands(
    gradients: tuple[Tensor | None, ...], operands: tuple[Tensor, ...]
) -> tuple[Tensor | None, ...]:
    return tuple(
        None if x is None else x.to(operand.dtype)
        for x, operand in zip(gradients, operands, strict=True)
    )


def _run_chunks(
    h: Tensor,
    w: Tensor,
    targets: Tensor,
    call: _Call,
    weights: Tensor | None,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Losses `[N]`, log-sum-exps `[N]` (the given ones if any), and with `weights` the gradients of
    h and w, not yet rounded to their dtypes.
    """
    # 500x slower on a CPU
    kind = torch.float32 if h.dtype == torch.float16 and not h.is_cuda else h.dtype
    x, y = h.to(kind), w.to(kind)
    count, columns = h.shape[0], w.shape[0]
    wide = torch.float64 if kind == torch.float64 else torch.float32
    losses = torch.zeros(count, dtype=wide, device=h.device)
    lses = torch.zeros(count, dtype=wide, device=h.device) if lse is None else lse
    dh = torch.empty_like(x) if weights is not None and call.needs[0] else None
    dw = zeros_for(y) if weights is not None and call.needs[1] else None
    logits = torch.empty(min(call.chunk, count), columns, dtype=kind, device=h.device)
    for first in range(0, count, call.chunk):
        part = slice(first, min(count, first + call.chunk))
        chunk = logits[: part.stop - first]
        torch.mm(x[part], y.t(), out=chunk)
        weight = None if weights is None else weights if len(weights) == 1 else weights[part]
        if lse is not None:
            stats_and_grads(
                chunk, targets[part], call.vocabulary, own=call.own, lse=lse[part], weights=weight
            )
        else:
            losses[part], lses[part] = _losses(chunk, targets[part], call, weight)
        if dh is not None:
            torch.mm(chunk, y, out=dh[part])
        if dw is not None:
            add_product(dw, chunk, x[part])
    if dh is not None and call.group is not None:
        dist.all_reduce(dh, group=call.group)
    return losses, lses, dh, dw


def _losses(
    chunk: Tensor, targets: Tensor, call: _Call, weights: Tensor | None
) -> tuple[Tensor, Tensor]:
    vocabulary = call.vocabulary
    if call.group is None:
        lse, at = stats_and_grads(chunk, targets, vocabulary, own=call.own, weights=weights)
    else:
        lse, at = stats_and_grads(chunk, targets, vocabulary, own=call.own)
        most = lse.clone()
        dist.all_reduce(most, dist.ReduceOp.MAX, group=call.group)
        position = targets - vocabulary.start
        here = ((position >= 0) & (position < chunk.shape[1])) | (
            targets == vocabulary.ignore_index
        )
        sums = torch.stack([(lse - most).exp_(), at, here.to(at.dtype)])
        dist.all_reduce(sums, group=call.group)
        # a target outside every shard
        lse, at = most + sums[0].log(), torch.where(sums[2] > 0, sums[1], torch.nan)
        if weights is not None:
            stats_and_grads(chunk, targets, vocabulary, own=call.own, lse=lse, weights=weights)
    return (lse - at).masked_fill(targets == vocabulary.ignore_index, 0.0), lse
