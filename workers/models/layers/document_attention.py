"""Causal attention within packed documents: one variable-length kernel call, or one call per chunk.

All chunks are one torch operator, so that the operator count for selective recomputation does not
depend on the documents. Shapes: B batch, S sequence, T = B · S, H heads, D head_dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from kernels import attention_varlen, runtime
from kernels.attention import mark_bounds_checked
from kernels.dispatch import Candidate, choose
from workers.models.layers.block_attention import block_backward, block_forward
from workers.models.layers.documents import Documents


def document_attention(
    q_BSHD: Tensor,
    k_BSHD: Tensor,
    v_BSHD: Tensor,
    documents: Documents,
    *,
    window: int | None,
    scale: float | None,
) -> Tensor:
    """`[B, S, H, D of v]`; groups of query heads share a key-value head. Memory is linear in T.

    `kernels.attention_varlen` chooses a kernel if one supports variable lengths (not measured
    yet); otherwise, e.g. on a CPU, chunks use the kernels of `block_attention`.
    """
    scale = q_BSHD.shape[-1] ** -0.5 if scale is None else scale
    why_not = _why_not_varlen(q_BSHD)
    if why_not is None:
        q, k, v = (x.flatten(0, 1) for x in (q_BSHD, k_BSHD, v_BSHD))
        ends, longest = documents.offsets, documents.longest
        mark_bounds_checked(ends, documents.places)
        result = attention_varlen(
            q, k, v, ends, ends, longest, longest, causal=True, window=window, scale=scale
        )
        assert isinstance(result, Tensor)
        return result.view(*q_BSHD.shape[:3], -1)
    choose(
        "attention_varlen", {"dtype": q_BSHD.dtype}, [Candidate("own", why_not), Candidate("torch")]
    )
    out: Tensor = _attention(q_BSHD, k_BSHD, v_BSHD, documents.number, window, scale)[0]
    return out


@torch.library.custom_op(
    "orrery::document_attention",
    mutates_args=(),
    schema=(
        "(Tensor q, Tensor k, Tensor v, int documents, int? window, float scale) -> (Tensor, "
        "Tensor)"
    ),
)
def _attention(
    q: Tensor, k: Tensor, v: Tensor, documents: int, window: int | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Output `[B, S, H, D of v]` and log-sum-exp `[H, T]` of `q`, `k`, `v` `[B, S, H, D]`."""
    batches, chunks = Documents.of(documents).chunks(window)
    queries, keys, values = (_split_batch(x, batches) for x in (q, k, v))
    out = q.new_empty(*q.shape[:3], v.shape[-1])
    lse = torch.empty(
        q.shape[2], q.shape[0] * q.shape[1], dtype=_accumulator_dtype(q), device=q.device
    )
    outs, sums = _split_batch(out, batches), torch.unflatten(lse, 1, (batches, -1)).transpose(0, 1)
    for chunk in chunks:
        rows, columns = chunk.queries, chunk.keys
        part, part_lse = block_forward(
            queries[:, :, rows],
            keys[:, :, columns],
            values[:, :, columns],
            causal=chunk.causal,
            seen_QK=chunk.seen(q.device),
            scale=scale,
        )
        outs[:, :, rows] = part
        sums[:, :, rows] = part_lse
    return out, lse


@torch.library.custom_op(
    "orrery::document_attention_backward",
    mutates_args=(),
    schema="(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, int documents, "
    "int? window, "
    "float scale) -> (Tensor, Tensor, Tensor)",
)
def _attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    documents: int,
    window: int | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values."""
    batches, chunks = Documents.of(documents).chunks(window)
    slopes, queries, keys, values, outs = (_split_batch(x, batches) for x in (grad, q, k, v, out))
    sums = torch.unflatten(lse, 1, (batches, -1)).transpose(0, 1)
    dq = torch.empty_like(q, memory_format=torch.contiguous_format)
    # chunks of a window share keys
    shared = any(chunk.ahead for chunk in chunks)
    dk, dv = (_zeros_or_empty(x, shared) for x in (k, v))
    dqs, dks, dvs = (_split_batch(x, batches) for x in (dq, dk, dv))
    for chunk in chunks:
        rows, columns = chunk.queries, chunk.keys
        gradients = block_backward(
            slopes[:, :, rows],
            queries[:, :, rows],
            keys[:, :, columns],
            values[:, :, columns],
            outs[:, :, rows],
            sums[:, :, rows],
            causal=chunk.causal,
            seen_QK=chunk.seen(q.device),
            scale=scale,
        )
        dqs[:, :, rows] = gradients[0]
        for total, part in ((dks, gradients[1]), (dvs, gradients[2])):
            if shared:
                total[:, :, columns] += part
            else:
                total[:, :, columns] = part
    return dq, dk.to(k.dtype), dv.to(v.dtype)


@_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *how: Any) -> tuple[Tensor, Tensor]:
    batch, length, heads, _ = q.shape
    out = q.new_empty(batch, length, heads, v.shape[-1])
    return out, q.new_empty(heads, batch * length, dtype=_accumulator_dtype(q))


@_attention_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *more: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, *ctx.how = inputs
    ctx.documents = Documents.of(ctx.how[0])  # alive until then
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(q, k, v, *output)


def _backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
    dq, dk, dv = _attention_backward(grads[0], *ctx.saved_tensors, *ctx.how)
    return dq, dk, dv, None, None, None


_attention.register_autograd(_backward, setup_context=_setup_context)


@register_flop_formula(torch.ops.orrery.document_attention)
def _flops(q: Any, k: Any, v: Any, *how: Any, **more: Any) -> int:
    """FLOPs of full sequences, as for the other attention kernels; arguments are shapes."""
    batch, length, heads, width = q
    return int(2 * batch * heads * length * length * (width + v[-1]))


def _why_not_varlen(q: Tensor) -> str | None:
    """Why no kernel computes all documents in one call; None if one does."""
    if q.device.type == "cuda" and q.dtype in (torch.float16, torch.bfloat16):
        return None
    return (
        "no kernel supports variable lengths in fp64"
        if q.dtype is torch.float64
        else runtime.why_not(q)
    )


def _split_batch(x: Tensor, batches: int) -> Tensor:
    """`[B, S, H, D]` as `[batches, H, T / batches, D]`, a view if possible."""
    return torch.unflatten(x.flatten(0, 1), 0, (batches, -1)).transpose(1, 2)


def _zeros_or_empty(x: Tensor, summed: bool) -> Tensor:
    if summed:
        return torch.zeros(x.shape, dtype=_accumulator_dtype(x), device=x.device)
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _accumulator_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype is torch.float64 else torch.float32
