"""The launches of `FusedAdamW`: one that measures all gradients, one a rule and dtype that steps.

Knows tables of tensors; knows no optimizer's groups or state.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from kernels import runtime
from kernels.jit import next_power_of_2
from kernels.optim.step_options import Asked, Item
from kernels.optim.tensor_table import Table, on_device, tables
from kernels.optim.triton_optim import WARPS, adamw_kernel, gradient_norm_kernel
from kernels.optim.unscale import KINDS, sizes

MOST_PARTS = 2048
"""Partial sums that `gradient_norm_kernel` leaves at most; each program of `adamw_kernel` adds them all up."""


@dataclass(frozen=True)
class _Rule:
    """What all parameters of one launch share. clip_norm 0: no clipping."""

    beta1: float
    beta2: float
    eps: float
    clip_norm: float
    stochastic: bool
    seed: int


@dataclass(frozen=True)
class _Told:
    """What was measured: sums of squares and flags [parts] fp32, in parts; None where nothing was."""

    squares: torch.Tensor | None
    found: torch.Tensor | None


def ticket(device: torch.device, kept: torch.Tensor | None) -> torch.Tensor:
    """The counter by which a launch's last program knows itself; zero before and after.

    The caller keeps it.
    """
    return (
        kept
        if kept is not None and kept.device == device
        else torch.zeros(1, dtype=torch.int32, device=device)
    )


def step(
    work: list[Item], asked: Asked, ticket: torch.Tensor
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Steps all parameters; (norm, skipped) fp32 [1].

    The norm is None where nothing was measured.
    """
    if asked.grad_norm is not None:
        told = _Told(asked.grad_norm.square().view(1), None)
    elif asked.measured:
        told = _measured([item.grad for item in work], asked.inv_scale)
    else:
        told = _Told(None, None)
    by_rule: dict[_Rule, list[Item]] = {}
    for item in work:
        rule = _Rule(*item.betas, item.eps, asked.clip_norm or 0.0, asked.stochastic, asked.seed)
        by_rule.setdefault(rule, []).append(item)
    chunk, _ = sizes()
    norm, skipped = torch.zeros((2, 1), dtype=torch.float32, device=ticket.device).unbind()
    with runtime.on(ticket):
        for rule, items in by_rule.items():
            hyper = {id(item.param): (item.lr, item.weight_decay) for item in items}
            for table in tables([item.row for item in items], chunk):
                pairs = [hyper[id(row[0])] for row in table.rows]
                values = (*(lr for lr, _ in pairs), *(decay for _, decay in pairs))
                _step(rule, table, values, told, asked, norm, skipped, ticket)
    return (None if told.squares is None else norm), skipped


def _measured(grads: list[torch.Tensor], inv_scale: torch.Tensor | None) -> _Told:
    """The unscaled gradients' sums of squares, and 1 where one is not finite, a part for each
    program.
    """
    chunk, block = sizes()
    device = grads[0].device
    some = tables([(g,) for g in grads], chunk)
    most = max(1, min(MOST_PARTS, runtime.sm_count(device) * 8) // max(1, len(some)))
    parts = [max(1, min(table.chunks, most)) for table in some]
    squares = torch.empty(sum(parts), dtype=torch.float32, device=device)
    found = torch.empty_like(squares)
    first = 0
    with runtime.on(grads[0]):
        for table, programs in zip(some, parts, strict=True):
            gradient_norm_kernel[(programs,)](
                table.addresses,
                table.sizes,
                table.chunk_tensor,
                table.chunk_place,
                table.chunks,
                inv_scale,
                squares[first:],
                found[first:],
                KIND=KINDS[table.dtypes[0]],
                ALIGNED=table.aligned,
                CHUNK=chunk,
                BLOCK=block,
                num_warps=WARPS,
            )
            first += programs
    return _Told(squares, found)


def _step(
    rule: _Rule,
    table: Table,
    hyper: tuple[float, ...],
    told: _Told,
    asked: Asked,
    norm: torch.Tensor,
    skipped: torch.Tensor,
    ticket: torch.Tensor,
) -> None:
    chunk, block = sizes()
    rows = len(table.rows)
    parts = told.squares.numel() if told.squares is not None else 1
    adamw_kernel[(max(1, min(table.chunks, runtime.sm_count(ticket.device) * 4)),)](
        table.addresses,
        table.sizes,
        table.chunk_tensor,
        table.chunk_place,
        table.chunks,
        rows,
        asked.inv_scale,
        told.squares,
        told.found,
        parts,
        asked.found_inf,
        norm,
        skipped,
        ticket,
        on_device(hyper, (2, rows), torch.float32, ticket.device),
        1 - rule.beta1,
        rule.beta2,
        1 - rule.beta2,
        _log(rule.beta1),
        _log(rule.beta2),
        rule.eps,
        rule.clip_norm,
        rule.seed & 0x7FFFFFFF,
        PARAM=KINDS[table.dtypes[0]],
        GRAD=KINDS[table.dtypes[1]],
        STOCHASTIC=rule.stochastic and table.dtypes[0] == torch.bfloat16,
        ALIGNED=table.aligned,
        CHUNK=chunk,
        BLOCK=block,
        BLOCK_PARTS=max(16, next_power_of_2(parts)),
        num_warps=WARPS,
    )


def _log(beta: float) -> float:
    return math.log(beta) if beta else -1e4  # 0 ** step is 0
