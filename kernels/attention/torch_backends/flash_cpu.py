"""Attention on a CPU by torch's flash kernel, split into chunks that it supports: memory linear in
the length.

torch's SDPA falls back to dense scores for masks aligned at the end, windows and differing head
dims, and returns no log-sum-exp. This module runs the same kernel over chunks and merges them by
their log-sum-exp. Shapes: [B, S, H, D].
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, is_grad_enabled
from torch.autograd.function import once_differentiable
from torch.compiler import is_compiling
from torch.nn import functional
from torch.nn.functional import scaled_dot_product_attention

from kernels.attention.spec import AttentionSpec
from kernels.dispatch import cached_choice, forced_by_environment

_aten = torch.ops.aten
# scores per head; up to this size torch's dense path is as fast for differing head dims
_SMALL_SQUARE = 1 << 16
_FEW_QUERIES = (
    64  # queries with a mask so small that one masked chunk is cheaper than two merged ones
)
_BLOCK = (128, 512)  # queries of a window's chunk, minimum and maximum


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Queries a..b over keys lo..hi: all visible, or causal (a square), or masked by `hidden`."""

    a: int
    b: int
    lo: int
    hi: int
    causal: bool = False
    hidden: Tensor | None = None


def is_plain(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> bool:
    """Whether torch's SDPA is best: it uses its flash kernel, or the scores are few."""
    return (
        spec.window == 0
        and spec.softcap == 0
        and (q.shape[-1] == v.shape[-1] or q.shape[1] * k.shape[1] <= _SMALL_SQUARE)
        and (not spec.causal or q.shape[1] == k.shape[1])
        and q.dtype is not torch.float16
        and q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    )


def run_cached(q: Tensor, k: Tensor, v: Tensor, causal: object, scale: object) -> Tensor | None:
    """Calls SDPA if the same kind of call was checked and `is_plain` before; else returns None.

    Costs 2 us more than SDPA itself, which takes at least 8 us; checking and choosing again costs
    40.
    """
    if is_compiling():
        return None
    try:
        key = plain_call_key(q, k, v, causal, scale)
        sdpa_options: dict[str, Any] | None = cached_choice(key)
    except (
        AttributeError,
        RuntimeError,
        TypeError,
    ):  # not dense tensors: the checks report them
        return None
    if sdpa_options is None:
        return None
    heads_first = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    return scaled_dot_product_attention(
        *heads_first, is_causal=causal is True, **sdpa_options
    ).transpose(1, 2)


def plain_call_key(
    q: Tensor, k: Tensor, v: Tensor, causal: object, scale: object
) -> tuple[object, ...] | None:
    """Cache key of a call without window, softcap and log-sum-exp; None if it is not eligible."""
    if not (q.is_cpu and k.is_cpu and v.is_cpu) or (causal is not True and causal is not False):
        return None
    if scale is not None and type(scale) is not float:
        return None
    grad = is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    return (
        q.shape,
        k.shape,
        v.shape,
        q.dtype,
        k.dtype,
        v.dtype,
        q.stride(-1),
        k.stride(-1),
        v.stride(-1),
        causal,
        scale,
        grad,
        forced_by_environment(b"KERNELS_BACKEND"),
    )


def sdpa_options(q: Tensor, k: Tensor, spec: AttentionSpec) -> dict[str, Any]:
    """Options of SDPA apart from the tensors and `is_causal`."""
    options: dict[str, Any] = {} if spec.scale == q.shape[-1] ** -0.5 else {"scale": spec.scale}
    return options if q.shape[2] == k.shape[2] else options | {"enable_gqa": True}


def why_not(spec: AttentionSpec) -> str | None:
    """Why torch's CPU kernel cannot run in chunks; None if it can."""
    return "torch's CPU kernel does not support a softcap" if spec.softcap else None


def sdpa(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
    """SDPA, for calls that are `is_plain`: [B, Q, H, D_v]."""
    return functional.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        is_causal=spec.causal,
        scale=spec.scale,
        enable_gqa=q.shape[2] != k.shape[2],
    ).transpose(1, 2)


def chunked(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """(out [B, Q, H, D_v], log-sum-exp [B, H, Q]); both have gradients.

    fp16 is multiplied in fp32, which is 13 to 500 times faster on a CPU.
    """
    out, lse = _Chunked.apply(q, k, v, spec)
    return out, lse


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec
    ) -> tuple[Tensor, Tensor]:
        out, lse = _forward(*_heads_first(q, k, v), spec)
        out = out[..., : v.shape[-1]].transpose(1, 2).to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.spec = spec
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad: Tensor | None, grad_lse: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        width = max(q.shape[-1], v.shape[-1])
        wide = _heads_first(q, k, v)
        dq, dk, dv = (torch.zeros_like(x, memory_format=torch.contiguous_format) for x in wide)
        if grad is not None:
            outs = _head_first(out, width), _head_first(grad, width)
            _add_gradients(dq, dk, dv, *wide, *outs, lse, ctx.spec)
        if grad_lse is not None:
            _add_gradients_of_lse(dq, dk, *wide[:2], lse, grad_lse, ctx.spec)
        pairs = ((dq, q), (dk, k), (dv, v))
        return *(g[..., : x.shape[-1]].transpose(1, 2).to(x.dtype) for g, x in pairs), None


def _forward(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> tuple[Tensor, Tensor]:
    """Tensors [B, H, S, D] of one width; queries that see no key keep zeros and -inf."""
    batch, heads, queries, width = q.shape
    out = q.new_zeros(batch, queries, heads, width).transpose(1, 2)
    key = torch.float64 if q.dtype is torch.float64 else torch.float32
    lse = torch.full((batch, heads, queries), -torch.inf, dtype=key, device=q.device)
    for chunk in _chunks(queries, k.shape[2], spec):
        part_out, part_lse = _kernel(q, k, v, chunk, spec)
        a, b = chunk.a, chunk.b
        if chunk.lo == 0 or spec.window:  # the first chunk of these queries
            out[:, :, a:b], lse[:, :, a:b] = part_out, part_lse
            continue
        both = torch.logaddexp(lse[:, :, a:b], part_lse)
        before = (lse[:, :, a:b] - both).exp().unsqueeze(-1)
        out[:, :, a:b] = (
            out[:, :, a:b] * before + part_out * (part_lse - both).exp().unsqueeze(-1)
        ).to(out.dtype)
        lse[:, :, a:b] = both
    return out, lse


def _add_gradients(
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    grad: Tensor,
    lse: Tensor,
    spec: AttentionSpec,
) -> None:
    """Adds the chunks' gradients. The kernel recomputes a chunk's probabilities from the
    log-sum-exp of all chunks, so the gradients add up (FlashAttention-2, arXiv 2307.08691, alg. 2).
    """
    for chunk in _chunks(q.shape[2], k.shape[2], spec):
        rows, cols = slice(chunk.a, chunk.b), slice(chunk.lo, chunk.hi)
        gradients = _backward_kernel(
            grad[:, :, rows],
            q[:, :, rows],
            k[:, :, cols],
            v[:, :, cols],
            out[:, :, rows],
            lse[:, :, rows],
            chunk,
            spec,
        )
        dq[:, :, rows] += gradients[0]
        dk[:, :, cols] += gradients[1]
        dv[:, :, cols] += gradients[2]


def _add_gradients_of_lse(
    dq: Tensor, dk: Tensor, q: Tensor, k: Tensor, lse: Tensor, grad_lse: Tensor, spec: AttentionSpec
) -> None:
    """Adds the gradients of the log-sum-exp. d lse / d score is the probability p: dq += scale · g
    · (p k) and dk += scale · pᵀ (g q). The kernel computes both as values: p k is its result with
    keys for values, pᵀ (g q) the gradient of values under g q.
    """
    weight = (grad_lse * spec.scale).unsqueeze(-1).to(q.dtype)
    for chunk in _chunks(q.shape[2], k.shape[2], spec):
        rows, cols = slice(chunk.a, chunk.b), slice(chunk.lo, chunk.hi)
        mean_k, part_lse = _kernel(q, k, k, chunk, spec)
        share = (part_lse - lse[:, :, rows]).exp().unsqueeze(-1).to(q.dtype)
        dq[:, :, rows] += weight[:, :, rows] * share * mean_k
        gradients = _backward_kernel(
            weight[:, :, rows] * q[:, :, rows],
            q[:, :, rows],
            k[:, :, cols],
            k[:, :, cols],
            mean_k,
            lse[:, :, rows],
            chunk,
            spec,
        )
        dk[:, :, cols] += gradients[2]


def _kernel(
    q: Tensor, k: Tensor, v: Tensor, chunk: _Chunk, spec: AttentionSpec
) -> tuple[Tensor, Tensor]:
    rows, cols = slice(chunk.a, chunk.b), slice(chunk.lo, chunk.hi)
    out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
        q[:, :, rows],
        k[:, :, cols],
        v[:, :, cols],
        0.0,
        chunk.causal,
        attn_mask=_bias(q, chunk),
        scale=spec.scale,
    )
    return out, lse


def _backward_kernel(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    chunk: _Chunk,
    spec: AttentionSpec,
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad,
        q,
        k,
        v,
        out,
        lse.contiguous(),
        0.0,
        chunk.causal,
        attn_mask=_bias(q, chunk),
        scale=spec.scale,
    )
    return dq, dk, dv


def _chunks(queries: int, keys: int, spec: AttentionSpec) -> Iterator[_Chunk]:
    """Chunks in which every query sees a key. A window's queries come in blocks, each with its own
    range of keys.
    """
    shift = keys - queries
    start = max(0, -shift)  # earlier queries see no key
    if queries == 0 or keys == 0 or (spec.causal and start >= queries):
        return
    if not spec.causal:
        yield _Chunk(0, queries, 0, keys)
    elif spec.window == 0 and shift <= 0:
        yield _Chunk(start, queries, 0, keys, causal=True)
    elif spec.window == 0 and queries > _FEW_QUERIES:
        yield _Chunk(0, queries, 0, shift)
        yield _Chunk(0, queries, shift, keys, causal=True)
    else:
        window = spec.window or keys
        block = queries if queries <= _FEW_QUERIES else min(max(_BLOCK[0], window // 2), _BLOCK[1])
        for a in range(start, queries, block):
            b = min(a + block, queries)
            lo, hi = max(0, a + shift - window + 1), b + shift
            position, key = (
                torch.arange(a + shift, b + shift)[:, None],
                torch.arange(lo, hi)[None, :],
            )
            yield _Chunk(a, b, lo, hi, hidden=(key > position) | (key <= position - window))


def _bias(q: Tensor, chunk: _Chunk) -> Tensor | None:
    if chunk.hidden is None:
        return None
    return torch.zeros(chunk.hidden.shape, dtype=q.dtype).masked_fill_(chunk.hidden, -torch.inf)


def _heads_first(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    width = max(q.shape[-1], v.shape[-1])
    return _head_first(q, width), _head_first(k, width), _head_first(v, width)


def _head_first(x: Tensor, width: int) -> Tensor:
    """[B, H, S, width]: zeros after a narrower head dim, fp16 as fp32."""
    if x.dtype is torch.float16:
        x = x.float()
    if x.shape[-1] != width:
        x = functional.pad(x, (0, width - x.shape[-1]))
    # The kernel assumes contiguous columns and does not check the stride (torch 2.13).
    if x.stride(-1) != 1:
        x = x.contiguous()
    return x.transpose(1, 2)
