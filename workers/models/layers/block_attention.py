"""Attention of one block of queries and keys with its log-sum-exp, by torch's own kernels.

Does not depend on sequences, ranks or how blocks are merged. Shapes: B batch, H heads, Q queries, K
keys, D head_dim.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

_aten = torch.ops.aten
_FLASH_WIDEST = 256  # maximum head_dim of FlashAttention-2
_LSE_ALIGNED = 32  # rows to which the memory-efficient kernel pads its log-sum-exp


def block_forward(
    q_BHQD: Tensor,
    k_BHKD: Tensor,
    v_BHKD: Tensor,
    *,
    causal: bool,
    seen_QK: Tensor | None,
    scale: float,
    dropout_BHQK: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention over the block's keys, `[B, H, Q, D of v]`, and its log-sum-exp, `[B, H, Q]`.

    The log-sum-exp is in fp32 or wider, without dropout. Groups of query heads share a key-value
    head. `seen_QK` is true where a query sees a key (None: all, or as `causal`, which needs Q = K,
    allows); every query must see one. `dropout_BHQK` is a mask that multiplies probabilities.
    """
    q_BHQD, k_BHKD, v_BHKD = _multipliable(q_BHQD), _multipliable(k_BHKD), _multipliable(v_BHKD)
    kernel = _kernel(q_BHQD, v_BHKD, seen_QK, dropout_BHQK)
    if kernel == "math":
        return _math_forward(
            q_BHQD, k_BHKD, v_BHKD, _math_mask(q_BHQD, causal, seen_QK), scale, dropout_BHQK
        )
    width = v_BHKD.shape[-1]
    if kernel == "efficient":
        k, v = _every_head(q_BHQD, k_BHKD), _every_head(q_BHQD, v_BHKD)
        bias = _bias(q_BHQD, seen_QK)
        out, lse, *_ = _aten._scaled_dot_product_efficient_attention(
            q_BHQD, k, v, bias, True, 0.0, causal, scale=scale
        )
        return out, lse[..., : q_BHQD.shape[2]]
    q, k, v = _one_width(q_BHQD, k_BHKD, v_BHKD)
    if kernel == "flash":
        out, lse, *_ = _aten._scaled_dot_product_flash_attention(
            q, k, v, 0.0, causal, False, scale=scale
        )
    else:
        mask = _bias(q, seen_QK)
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, attn_mask=mask, scale=scale
        )
    return out[..., :width], lse


def block_backward(
    grad_BHQD: Tensor,
    q_BHQD: Tensor,
    k_BHKD: Tensor,
    v_BHKD: Tensor,
    out_BHQD: Tensor,
    lse_BHQ: Tensor,
    *,
    causal: bool,
    seen_QK: Tensor | None,
    scale: float,
    dropout_BHQK: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The block's contribution to the gradients of its queries, keys and values.

    `out_BHQD` and `lse_BHQ` are merged over all keys of the sequence: kernels recompute
    probabilities as exp(score - lse), which are then those of the full attention
    (FlashAttention-2, arXiv 2307.08691, algorithm 2).
    """
    q_BHQD, k_BHKD, v_BHKD = _multipliable(q_BHQD), _multipliable(k_BHKD), _multipliable(v_BHKD)
    grad_BHQD, out_BHQD = _multipliable(grad_BHQD), _multipliable(out_BHQD)
    kernel = _kernel(q_BHQD, v_BHKD, seen_QK, dropout_BHQK)
    if kernel == "math":
        mask = _math_mask(q_BHQD, causal, seen_QK)
        return _math_backward(
            grad_BHQD, q_BHQD, k_BHKD, v_BHKD, out_BHQD, lse_BHQ, mask, scale, dropout_BHQK
        )
    narrow, width = q_BHQD.shape[-1], v_BHKD.shape[-1]
    # of dropout, which is not used
    seed = torch.zeros((), dtype=torch.int64, device=q_BHQD.device)
    if kernel == "efficient":
        k, v = _every_head(q_BHQD, k_BHKD), _every_head(q_BHQD, v_BHKD)
        rows = -lse_BHQ.shape[-1] % _LSE_ALIGNED
        lse = functional.pad(lse_BHQ, (0, rows), value=math.inf)
        bias, needs_gradient = _bias(q_BHQD, seen_QK), [True, True, True, False]
        dq, dk, dv, _ = _aten._scaled_dot_product_efficient_attention_backward(
            grad_BHQD,
            q_BHQD,
            k,
            v,
            bias,
            out_BHQD,
            lse,
            seed,
            seed,
            0.0,
            needs_gradient,
            causal,
            scale=scale,
        )
        return dq, _shared_heads(dk, k_BHKD), _shared_heads(dv, v_BHKD)
    q, k, v = _one_width(q_BHQD, k_BHKD, v_BHKD)
    grad, out = _padded(grad_BHQD, q.shape[-1]), _padded(out_BHQD, q.shape[-1])
    if kernel == "flash":
        queries, keys = q.shape[2], k.shape[2]
        dq, dk, dv = _aten._scaled_dot_product_flash_attention_backward(
            grad,
            q,
            k,
            v,
            out,
            lse_BHQ.contiguous(),
            None,
            None,
            queries,
            keys,
            0.0,
            causal,
            seed,
            seed,
            scale=scale,
        )
    else:
        mask = _bias(q, seen_QK)
        dq, dk, dv = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse_BHQ, 0.0, causal, attn_mask=mask, scale=scale
        )
    return dq[..., :narrow], dk[..., :narrow], dv[..., :width]


def _multipliable(x: Tensor) -> Tensor:
    """fp16 on a CPU is converted to fp32, as everywhere in the engine (`fp16_matmul`)."""
    return x.float() if x.dtype is torch.float16 and x.device.type == "cpu" else x


def _kernel(q: Tensor, v: Tensor, seen: Tensor | None, dropout: Tensor | None) -> str:
    # no kernel takes a dropout mask that the backward pass can reproduce
    if dropout is not None:
        return "math"
    if q.device.type == "cpu":
        return "cpu"
    if q.device.type != "cuda" or q.dtype is torch.float64:
        return "math"
    widest = max(q.shape[-1], v.shape[-1])
    half = q.dtype in (torch.float16, torch.bfloat16)
    if (
        half
        and seen is None
        and widest <= _FLASH_WIDEST
        and torch.cuda.get_device_capability(q.device) >= (8, 0)
    ):
        return "flash"
    aligned = 8 if half else 4
    return "efficient" if q.shape[-1] % aligned == v.shape[-1] % aligned == 0 else "math"


def _one_width(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Head dims padded to the same width, on CUDA a multiple of 8, as flash kernels require."""
    width = max(q.shape[-1], v.shape[-1])
    if q.device.type == "cuda":
        width += -width % 8
    return _padded(q, width), _padded(k, width), _padded(v, width)


def _padded(x: Tensor, width: int) -> Tensor:
    return x if x.shape[-1] == width else functional.pad(x, (0, width - x.shape[-1]))


def _every_head(q: Tensor, x: Tensor) -> Tensor:
    return x if x.shape[1] == q.shape[1] else x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)


def _shared_heads(grad: Tensor, x: Tensor) -> Tensor:
    """The sum over the query heads that share a key-value head."""
    return (
        grad
        if grad.shape[1] == x.shape[1]
        else torch.unflatten(grad, 1, (x.shape[1], -1)).float().sum(2)
    )


def _bias(q: Tensor, seen: Tensor | None) -> Tensor | None:
    """The mask as addend of scores, rows aligned to 16 elements as CUDA's kernel requires."""
    if seen is None:
        return None
    keys = seen.shape[1]
    rows = q.new_zeros(seen.shape[0], keys + -keys % 16)[:, :keys]
    bias = rows.masked_fill_(~seen, -math.inf)
    return bias if q.device.type == "cpu" else bias.expand(*q.shape[:2], *bias.shape)


def _math_mask(q: Tensor, causal: bool, seen: Tensor | None) -> Tensor | None:
    if not causal:
        return seen
    return torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).tril()


def _scores(q: Tensor, k: Tensor, seen: Tensor | None, scale: float) -> Tensor:
    """`[B, key-value heads, heads per group, Q, K]`."""
    grouped = torch.unflatten(q, 1, (k.shape[1], -1))
    scores = _wide(grouped) @ _wide(k).unsqueeze(2).mT * scale
    return scores if seen is None else scores.masked_fill(~seen, -math.inf)


def _math_forward(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, scale: float, dropout: Tensor | None
) -> tuple[Tensor, Tensor]:
    scores = _scores(q, k, seen, scale)
    lse = scores.logsumexp(-1)
    shares = (scores - lse.unsqueeze(-1)).exp()
    if dropout is not None:
        shares = shares * torch.unflatten(dropout, 1, (k.shape[1], -1))
    out = shares @ _wide(v).unsqueeze(2)
    return out.flatten(1, 2), lse.flatten(1, 2)


def _math_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    seen: Tensor | None,
    scale: float,
    dropout: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    groups = (k.shape[1], -1)
    grad, out = torch.unflatten(_wide(grad), 1, groups), torch.unflatten(_wide(out), 1, groups)
    shares = (_scores(q, k, seen, scale) - torch.unflatten(lse, 1, groups).unsqueeze(-1)).exp()
    dropped, d_dropped = shares, grad @ _wide(v).unsqueeze(2).mT
    if dropout is not None:
        mask = torch.unflatten(dropout, 1, groups)
        dropped, d_dropped = shares * mask, d_dropped * mask
    slope = shares * (d_dropped - (grad * out).sum(-1, keepdim=True)) * scale
    dq = (slope @ _wide(k).unsqueeze(2)).flatten(1, 2)
    dk = (slope.mT @ torch.unflatten(_wide(q), 1, groups)).sum(2)
    return dq, dk, (dropped.mT @ grad).sum(2)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype is torch.float64 else x.float()
