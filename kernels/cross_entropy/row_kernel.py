"""Row operations on a chunk of logits: log-sum-exp, target logit, and the gradient in place of the
logits.

Implemented twice: a Triton kernel, and torch operations without Triton. Shapes: c rows, V columns,
the vocabulary from `start` on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels import runtime, tuning
from kernels.jit import jit, next_power_of_2, tl
from kernels.shipped import ShippedKernel

TWO_LOG2_E = 2.0 * math.log2(math.e)
MIN_LOG = -87.0  # log of the smallest normal fp32 probability


@dataclass(frozen=True)
class VocabularyShard:
    """The token of the first column, the ignored target, and the cap on logits (0: none)."""

    start: int
    ignore_index: int
    softcap: float


def stats_and_grads(
    logits: Tensor,
    targets: Tensor,
    vocabulary: VocabularyShard,
    *,
    own: bool,
    lse: Tensor | None = None,
    weights: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`[c]` fp32 each: log-sum-exp of a row, and its target's logit, 0 if it is in another shard or
    ignored.

    `lse` replaces the first (the value over all shards). With `weights`, `[c]` or `[1]` fp32,
    logits `[c, V]` become weights · (softmax - target), 0 in ignored rows.
    """
    if own:
        return _launch(logits, targets, vocabulary, lse, weights)
    return _compute_by_torch(logits, targets, vocabulary, lse, weights)


def _compute_by_torch(
    logits: Tensor,
    targets: Tensor,
    vocabulary: VocabularyShard,
    lse: Tensor | None,
    weights: Tensor | None,
) -> tuple[Tensor, Tensor]:
    columns, cap = logits.shape[1], vocabulary.softcap
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    wide = logits.to(dtype) if not cap else cap * torch.tanh(logits.to(dtype) / cap)
    ignored = targets == vocabulary.ignore_index
    position = targets.long() - vocabulary.start
    in_shard = (position >= 0) & (position < columns) & ~ignored
    position = position.masked_fill(~in_shard, 0).unsqueeze(1)
    if columns:
        at = wide.gather(1, position).squeeze(1)
        target = at.masked_fill(~in_shard, 0.0)
        # not logsumexp: on a CPU its exp takes 17 ns per number, twenty times as long, if
        # probabilities underflow
        row_lse = at - wide.log_softmax(1).gather(1, position).squeeze(1) if lse is None else lse
    else:
        target, row_lse = (
            wide.new_zeros(len(targets)),
            wide.new_full((len(targets),), float("-inf")),
        )
        row_lse = row_lse if lse is None else lse
    if weights is not None and columns:
        grad = wide.sub(row_lse.unsqueeze(1)).clamp_min_(MIN_LOG).exp_()
        grad.scatter_add_(1, position, -in_shard.to(dtype).unsqueeze(1))
        if cap:
            grad.mul_(1 - (wide / cap).square_())
        grad.mul_(weights.to(dtype).unsqueeze(1)).masked_fill_(ignored.unsqueeze(1), 0.0)
        logits.copy_(grad)
    return row_lse, target


@jit
def cross_entropy_rows_kernel(
    X,
    TARGETS,
    LSE,
    AT,
    WEIGHTS,
    stride,
    columns,
    start,
    ignored,
    to_exponent,
    cap,
    weight_stride,
    STATS: tl.constexpr,
    GRADS: tl.constexpr,
    CAPPED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row. STATS: a pass of online softmax writes LSE and AT; GRADS: another pass writes X,
    which is still in L2 if both run. to_exponent: 2 · log2(e) / cap.
    """
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(TARGETS + row).to(tl.int64)
    counts = target != ignored
    position = target - start
    x_row = X + row * stride
    v = tl.arange(0, BLOCK)
    if STATS:
        in_shard = counts & (position >= 0) & (position < columns)
        at = tl.load(x_row + tl.where(in_shard, position, 0), mask=in_shard, other=0.0).to(
            tl.float32
        )
        if CAPPED:
            at = tl.where(in_shard, cap * (1.0 - 2.0 / (1.0 + tl.exp2(at * to_exponent))), 0.0)
        tl.store(AT + row, at)
        m = tl.full([1], float("-inf"), tl.float32)
        l = tl.zeros([1], tl.float32)
        for first in range(0, columns, BLOCK):
            inside = first + v < columns
            x = tl.load(x_row + first + v, mask=inside, other=float("-inf")).to(tl.float32)
            if CAPPED:
                x = tl.where(
                    inside, cap * (1.0 - 2.0 / (1.0 + tl.exp2(x * to_exponent))), float("-inf")
                )
            m_new = tl.maximum(m, tl.max(x, 0))
            base = tl.where(m_new == float("-inf"), 0.0, m_new)
            l = l * tl.exp2((m - base) * 1.4426950408889634) + tl.sum(
                tl.exp2((x - base) * 1.4426950408889634), 0
            )
            m = m_new
        lse = m + tl.log2(tl.where(l > 0.0, l, 1.0)) * 0.6931471805599453
        tl.store(LSE + row + tl.arange(0, 1), lse)
    else:
        lse = tl.load(LSE + row + tl.arange(0, 1))
    if GRADS:
        weight = tl.where(counts, tl.load(WEIGHTS + row * weight_stride), 0.0)
        for first in range(0, columns, BLOCK):
            inside = first + v < columns
            x = tl.load(x_row + first + v, mask=inside, other=0.0).to(tl.float32)
            slope = weight
            if CAPPED:
                tanh = 1.0 - 2.0 / (1.0 + tl.exp2(x * to_exponent))
                x = cap * tanh
                slope = weight * (1.0 - tanh * tanh)
            p = tl.exp2((x - lse) * 1.4426950408889634)
            grad = tl.where(counts, (p - tl.where(first + v == position, 1.0, 0.0)) * slope, 0.0)
            tl.store(x_row + first + v, grad.to(X.dtype.element_ty), mask=inside)


@tuning.rule("linear_cross_entropy")
def _rule(arch: str, facts: dict[str, Any]) -> tuning.Config:
    if arch == "interpret":
        return {"BLOCK": 64, "num_warps": 4}
    block = min(8192, int(facts["columns"]))
    return {"BLOCK": block, "num_warps": 16 if block > 4096 else 8 if block > 1024 else 4}


@tuning.candidates("linear_cross_entropy")
def _candidates(arch: str, facts: dict[str, Any]) -> list[tuning.Config]:
    columns = int(facts["columns"])
    blocks = tuple(size for size in (8192, 4096, 2048, 1024) if size <= columns) or (columns,)
    choices = tuning.combinations(BLOCK=blocks, num_warps=(16, 8, 4))
    return tuning.changes(_rule(arch, facts), *choices)


def _launch(
    logits: Tensor,
    targets: Tensor,
    vocabulary: VocabularyShard,
    lse: Tensor | None,
    weights: Tensor | None,
) -> tuple[Tensor, Tensor]:
    count, columns = logits.shape
    row_lse = torch.empty(count, dtype=torch.float32, device=logits.device) if lse is None else lse
    at = torch.empty(count, dtype=torch.float32, device=logits.device) if lse is None else row_lse
    if not count:
        return row_lse, at
    config = tuning.config(
        "linear_cross_entropy", dtype=logits.dtype, columns=tuning.round_up(max(16, columns))
    )
    cap = vocabulary.softcap
    with runtime.device_guard(logits):
        cross_entropy_rows_kernel[(count,)](
            logits,
            targets,
            row_lse,
            at,
            weights,
            logits.stride(0),
            columns,
            vocabulary.start,
            vocabulary.ignore_index,
            TWO_LOG2_E / cap if cap else 0.0,
            cap,
            0 if weights is None or weights.numel() == 1 else 1,
            STATS=lse is None,
            GRADS=weights is not None,
            CAPPED=bool(cap),
            **config,
        )
    return row_lse, at


def shipped(arch: str) -> list[ShippedKernel]:
    """Both passes together; and for a sharded vocabulary each alone, one of them with a cap."""
    kernels = []
    for name, stats, grads, capped, columns in (
        ("both-131072", True, True, False, 131072),
        ("both-4096-capped", True, True, True, next_power_of_2(4096)),
        ("stats", True, False, False, 32768),
        ("grads-capped", False, True, True, 32768),
    ):
        config = _rule(arch, {"columns": columns})
        signature = {
            "X": "*bf16",
            "TARGETS": "*i64",
            "LSE": "*fp32",
            "AT": "*fp32",
            "WEIGHTS": "*fp32",
        }
        signature |= {
            "stride": "i32:16",
            "columns": "i32:16",
            "start": "i32",
            "ignored": "i32",
            "weight_stride": "i32",
        }
        signature |= {"to_exponent": "fp32", "cap": "fp32"}
        constants = {"STATS": stats, "GRADS": grads, "CAPPED": capped, "BLOCK": config["BLOCK"]}
        kernels.append(
            ShippedKernel(
                "linear_cross_entropy",
                name,
                cross_entropy_rows_kernel,
                signature,
                constants,
                config["num_warps"],
                3,
            )
        )
    return kernels
