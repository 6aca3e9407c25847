"""Attention on a CPU by torch's own flash kernel, cut into parts that it can do: memory linear in
the length.

torch's front door falls back to the dense square for masks aligned at the end, windows and head
dims that differ,
and gives no log-sum-exp. Here the same kernel runs over parts that merge by theirs. Shapes: [B, S,
H, D].
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

from kernels.attention.spec import Form
from kernels.dispatch import forced_by_environment, repeated

_aten = torch.ops.aten
# scores a head; torch's dense path is as fast up to there for head dims that differ
_SMALL_SQUARE = 1 << 16
_FEW = 64  # queries whose mask is so small that one masked part is cheaper than two merged ones
_BLOCK = (128, 512)  # queries of a window's part, least and most


@dataclass(frozen=True, slots=True)
class _Part:
    """Queries a..b over keys lo..hi: all of them seen, or causally (a square), or as `hidden`
    tells.
    """

    a: int
    b: int
    lo: int
    hi: int
    causal: bool = False
    hidden: Tensor | None = None


def plain(q: Tensor, k: Tensor, v: Tensor, form: Form) -> bool:
    """Whether torch's front door is best: it takes its flash kernel, or a square of scores that is
    small.
    """
    return (
        form.window == 0
        and form.softcap == 0
        and (q.shape[-1] == v.shape[-1] or q.shape[1] * k.shape[1] <= _SMALL_SQUARE)
        and (not form.causal or q.shape[1] == k.shape[1])
        and q.dtype is not torch.float16
        and q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    )


def recognised(q: Tensor, k: Tensor, v: Tensor, causal: object, scale: object) -> Tensor | None:
    """torch's own call, for a kind of call that was checked and found `plain` before; None for any
    other.

    Costs 2 us more than torch's call by itself, which takes 8 at its smallest; checking and
    choosing anew costs 40.
    """
    if is_compiling():
        return None
    try:
        kind = plain_kind(q, k, v, causal, scale)
        how: dict[str, Any] | None = repeated(kind)
    except (
        AttributeError,
        RuntimeError,
        TypeError,
    ):  # no dense tensors: refused in words behind this
        return None
    if how is None:
        return None
    heads_first = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    return scaled_dot_product_attention(*heads_first, is_causal=causal is True, **how).transpose(
        1, 2
    )


def plain_kind(
    q: Tensor, k: Tensor, v: Tensor, causal: object, scale: object
) -> tuple[object, ...] | None:
    """All that checks, choice and `plain` rest on where neither window, cap nor log-sum-exp is
    asked for; None for what
    none of them would take as it is."""
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


def how(q: Tensor, k: Tensor, form: Form) -> dict[str, Any]:
    """What torch's call is given beside the tensors and `is_causal`."""
    given: dict[str, Any] = {} if form.scale == q.shape[-1] ** -0.5 else {"scale": form.scale}
    return given if q.shape[2] == k.shape[2] else given | {"enable_gqa": True}


def why_not(form: Form) -> str | None:
    """Why torch's CPU kernel cannot do it in parts; None when it can."""
    return "torch's CPU kernel knows no softcap" if form.softcap else None


def front_door(q: Tensor, k: Tensor, v: Tensor, form: Form) -> Tensor:
    """torch's own call, for what is `plain`: [B, Q, H, D_v]."""
    return functional.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        is_causal=form.causal,
        scale=form.scale,
        enable_gqa=q.shape[2] != k.shape[2],
    ).transpose(1, 2)


def in_parts(q: Tensor, k: Tensor, v: Tensor, form: Form) -> tuple[Tensor, Tensor]:
    """(out [B, Q, H, D_v], log-sum-exp [B, H, Q]); both have gradients. fp16 is multiplied in fp32,
    which a CPU does
    13 to 500 times faster."""
    out, lse = _Parts.apply(q, k, v, form)
    return out, lse


class _Parts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, form: Form) -> tuple[Tensor, Tensor]:
        out, lse = _forward(*_heads_first(q, k, v), form)
        out = out[..., : v.shape[-1]].transpose(1, 2).to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.form = form
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
            _add_gradients(dq, dk, dv, *wide, *outs, lse, ctx.form)
        if grad_lse is not None:
            _add_gradients_of_lse(dq, dk, *wide[:2], lse, grad_lse, ctx.form)
        pairs = ((dq, q), (dk, k), (dv, v))
        return *(g[..., : x.shape[-1]].transpose(1, 2).to(x.dtype) for g, x in pairs), None


def _forward(q: Tensor, k: Tensor, v: Tensor, form: Form) -> tuple[Tensor, Tensor]:
    """Tensors [B, H, S, D] of one width; queries that see nothing keep zeros and -inf."""
    batch, heads, queries, width = q.shape
    out = q.new_zeros(batch, queries, heads, width).transpose(1, 2)
    kind = torch.float64 if q.dtype is torch.float64 else torch.float32
    lse = torch.full((batch, heads, queries), -torch.inf, dtype=kind, device=q.device)
    for part in _parts(queries, k.shape[2], form):
        part_out, part_lse = _kernel(q, k, v, part, form)
        a, b = part.a, part.b
        if part.lo == 0 or form.window:  # the first part of these queries
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
    form: Form,
) -> None:
    """The kernel makes a part's probabilities again from the log-sum-exp of all parts, so that its
    gradients just add
    (FlashAttention-2, arXiv 2307.08691, alg. 2)."""
    for part in _parts(q.shape[2], k.shape[2], form):
        rows, cols = slice(part.a, part.b), slice(part.lo, part.hi)
        found = _backward_kernel(
            grad[:, :, rows],
            q[:, :, rows],
            k[:, :, cols],
            v[:, :, cols],
            out[:, :, rows],
            lse[:, :, rows],
            part,
            form,
        )
        dq[:, :, rows] += found[0]
        dk[:, :, cols] += found[1]
        dv[:, :, cols] += found[2]


def _add_gradients_of_lse(
    dq: Tensor, dk: Tensor, q: Tensor, k: Tensor, lse: Tensor, grad_lse: Tensor, form: Form
) -> None:
    """d lse / d score is the probability p: dq += scale · g · (p k) and dk += scale · pᵀ (g q).
    Both are what the
    kernel does for values: p k is its result with keys for values, pᵀ (g q) the gradient of values
    under g q.
    """
    weight = (grad_lse * form.scale).unsqueeze(-1).to(q.dtype)
    for part in _parts(q.shape[2], k.shape[2], form):
        rows, cols = slice(part.a, part.b), slice(part.lo, part.hi)
        mean_k, part_lse = _kernel(q, k, k, part, form)
        share = (part_lse - lse[:, :, rows]).exp().unsqueeze(-1).to(q.dtype)
        dq[:, :, rows] += weight[:, :, rows] * share * mean_k
        found = _backward_kernel(
            weight[:, :, rows] * q[:, :, rows],
            q[:, :, rows],
            k[:, :, cols],
            k[:, :, cols],
            mean_k,
            lse[:, :, rows],
            part,
            form,
        )
        dk[:, :, cols] += found[2]


def _kernel(q: Tensor, k: Tensor, v: Tensor, part: _Part, form: Form) -> tuple[Tensor, Tensor]:
    rows, cols = slice(part.a, part.b), slice(part.lo, part.hi)
    out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
        q[:, :, rows],
        k[:, :, cols],
        v[:, :, cols],
        0.0,
        part.causal,
        attn_mask=_bias(q, part),
        scale=form.scale,
    )
    return out, lse


def _backward_kernel(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, part: _Part, form: Form
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad,
        q,
        k,
        v,
        out,
        lse.contiguous(),
        0.0,
        part.causal,
        attn_mask=_bias(q, part),
        scale=form.scale,
    )
    return dq, dk, dv


def _parts(queries: int, keys: int, form: Form) -> Iterator[_Part]:
    """Every query of a part sees a key of it.

    Those of a window come in blocks, each over its own stretch of keys.
    """
    shift = keys - queries
    start = max(0, -shift)  # queries before it see nothing
    if queries == 0 or keys == 0 or (form.causal and start >= queries):
        return
    if not form.causal:
        yield _Part(0, queries, 0, keys)
    elif form.window == 0 and shift <= 0:
        yield _Part(start, queries, 0, keys, causal=True)
    elif form.window == 0 and queries > _FEW:
        yield _Part(0, queries, 0, shift)
        yield _Part(0, queries, shift, keys, causal=True)
    else:
        window = form.window or keys
        block = queries if queries <= _FEW else min(max(_BLOCK[0], window // 2), _BLOCK[1])
        for a in range(start, queries, block):
            b = min(a + block, queries)
            lo, hi = max(0, a + shift - window + 1), b + shift
            place, key = torch.arange(a + shift, b + shift)[:, None], torch.arange(lo, hi)[None, :]
            yield _Part(a, b, lo, hi, hidden=(key > place) | (key <= place - window))


def _bias(q: Tensor, part: _Part) -> Tensor | None:
    if part.hidden is None:
        return None
    return torch.zeros(part.hidden.shape, dtype=q.dtype).masked_fill_(part.hidden, -torch.inf)


def _heads_first(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    width = max(q.shape[-1], v.shape[-1])
    return _head_first(q, width), _head_first(k, width), _head_first(v, width)


def _head_first(x: Tensor, width: int) -> Tensor:
    """[B, H, S, width]: zeros behind a narrower head dim, fp16 in fp32."""
    if x.dtype is torch.float16:
        x = x.float()
    if x.shape[-1] != width:
        x = functional.pad(x, (0, width - x.shape[-1]))
    # the kernel reads columns as neighbours without a look at the stride (torch 2.13)
    if x.stride(-1) != 1:
        x = x.contiguous()
    return x.transpose(1, 2)
