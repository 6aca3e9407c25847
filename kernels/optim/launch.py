"""Launches of `FusedAdamW`: one measures all gradients, one per rule and dtype steps."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from kernels import runtime
from kernels.jit import next_power_of_2
from kernels.optim.step_options import ParameterUpdate, StepOptions
from kernels.optim.tensor_table import Table, tables, to_device
from kernels.optim.triton_optim import WARPS, adamw_kernel, gradient_norm_kernel
from kernels.optim.unscale import KINDS, block_sizes

MAX_PARTS = 2048
"""Maximum partial sums of `gradient_norm_kernel`; each program of `adamw_kernel` adds up all of
them.
"""


@dataclass(frozen=True)
class _Rule:
    """Options shared by the parameters of one launch. clip_norm 0: no clipping."""

    beta1: float
    beta2: float
    eps: float
    clip_norm: float
    stochastic: bool
    seed: int


@dataclass(frozen=True)
class _Measurement:
    """Partial sums of squares and overflow flags, [parts] fp32 each; None if not measured."""

    squares: torch.Tensor | None
    overflow: torch.Tensor | None


def get_ticket(device: torch.device, current: torch.Tensor | None) -> torch.Tensor:
    """The counter (int32 [1]) by which a launch's last program recognizes itself; 0 at rest.

    The caller stores it.
    """
    return (
        current
        if current is not None and current.device == device
        else torch.zeros(1, dtype=torch.int32, device=device)
    )


def step(
    work: list[ParameterUpdate], options: StepOptions, ticket: torch.Tensor
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Steps all parameters; (norm, skipped) fp32 [1]. Without a measured norm it is None."""
    if options.grad_norm is not None:
        measurement = _Measurement(options.grad_norm.square().view(1), None)
    elif options.measured:
        measurement = _measure([item.grad for item in work], options.inv_scale)
    else:
        measurement = _Measurement(None, None)
    by_rule: dict[_Rule, list[ParameterUpdate]] = {}
    for item in work:
        rule = _Rule(
            *item.betas, item.eps, options.clip_norm or 0.0, options.stochastic, options.seed
        )
        by_rule.setdefault(rule, []).append(item)
    chunk, _ = block_sizes()
    norm, skipped = torch.zeros((2, 1), dtype=torch.float32, device=ticket.device).unbind()
    with runtime.device_guard(ticket):
        for rule, items in by_rule.items():
            hyper = {id(item.param): (item.lr, item.weight_decay) for item in items}
            for table in tables([item.row for item in items], chunk):
                pairs = [hyper[id(row[0])] for row in table.rows]
                values = (*(lr for lr, _ in pairs), *(decay for _, decay in pairs))
                _step(rule, table, values, measurement, options, norm, skipped, ticket)
    return (None if measurement.squares is None else norm), skipped


def _measure(grads: list[torch.Tensor], inv_scale: torch.Tensor | None) -> _Measurement:
    """The unscaled gradients' sums of squares, and 1 if one is not finite, one part per program."""
    chunk, block = block_sizes()
    device = grads[0].device
    groups = tables([(g,) for g in grads], chunk)
    most = max(1, min(MAX_PARTS, runtime.sm_count(device) * 8) // max(1, len(groups)))
    parts = [max(1, min(table.chunks, most)) for table in groups]
    squares = torch.empty(sum(parts), dtype=torch.float32, device=device)
    overflow = torch.empty_like(squares)
    first = 0
    with runtime.device_guard(grads[0]):
        for table, programs in zip(groups, parts, strict=True):
            gradient_norm_kernel[(programs,)](
                table.addresses,
                table.sizes,
                table.chunk_tensor,
                table.chunk_place,
                table.chunks,
                inv_scale,
                squares[first:],
                overflow[first:],
                KIND=KINDS[table.dtypes[0]],
                ALIGNED=table.aligned,
                CHUNK=chunk,
                BLOCK=block,
                num_warps=WARPS,
            )
            first += programs
    return _Measurement(squares, overflow)


def _step(
    rule: _Rule,
    table: Table,
    hyper: tuple[float, ...],
    measurement: _Measurement,
    options: StepOptions,
    norm: torch.Tensor,
    skipped: torch.Tensor,
    ticket: torch.Tensor,
) -> None:
    chunk, block = block_sizes()
    rows = len(table.rows)
    parts = measurement.squares.numel() if measurement.squares is not None else 1
    adamw_kernel[(max(1, min(table.chunks, runtime.sm_count(ticket.device) * 4)),)](
        table.addresses,
        table.sizes,
        table.chunk_tensor,
        table.chunk_place,
        table.chunks,
        rows,
        options.inv_scale,
        measurement.squares,
        measurement.overflow,
        parts,
        options.found_inf,
        norm,
        skipped,
        ticket,
        to_device(hyper, (2, rows), torch.float32, ticket.device),
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
