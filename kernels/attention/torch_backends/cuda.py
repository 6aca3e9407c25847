"""torch's attention on CUDA: cuDNN, memory-efficient, and FlashAttention-2, dense and ragged.

Reports why each cannot run a call, by torch's own checks where they exist. Tensors are [B, S, H,
D]; ragged batches have B = 1.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from kernels.attention.spec import AttentionSpec, Bounds

_aten = torch.ops.aten
_HALVES = (torch.float16, torch.bfloat16)
_refusals: dict[tuple[object, ...], str | None] = {}
_MAX_REFUSALS = 4096

_SDPA_BACKENDS: dict[str, tuple[SDPBackend, Callable[..., bool]]] = {
    "cudnn": (SDPBackend.CUDNN_ATTENTION, torch.backends.cuda.can_use_cudnn_attention),
    "efficient": (SDPBackend.EFFICIENT_ATTENTION, torch.backends.cuda.can_use_efficient_attention),
}


def sdpa_why_not(
    backend: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds: Bounds | None,
    spec: AttentionSpec,
    wants_lse: bool,
) -> str | None:
    """Why SDPA's "cudnn" or "efficient" cannot run this call; None if it can."""
    if q.device.type != "cuda":
        return "not a CUDA tensor"
    if bounds is not None:
        return "does not support packed sequences"
    if spec.window:
        return "does not support windows"
    if spec.softcap:
        return "does not support a softcap"
    if wants_lse:
        return "does not return the log-sum-exp"
    if spec.causal and q.shape[1] != k.shape[1]:
        return "aligns causal masks at the start"
    if q.numel() == 0 or k.numel() == 0:
        return "a dimension is empty"
    grad = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    strides = (*q.stride(), *k.stride(), *v.stride())
    key = (
        backend,
        q.dtype,
        q.shape,
        k.shape,
        v.shape[-1],
        spec.causal,
        grad,
        q.device.index,
        strides,
    )
    if key not in _refusals:
        if len(_refusals) >= _MAX_REFUSALS:
            _refusals.clear()
        _refusals[key] = _torch_refusal(
            _SDPA_BACKENDS[backend][1],
            _first(backend, q, k, v),
            q.shape[2] != k.shape[2],
            spec.causal,
        )
    return _refusals[key]


def sdpa(backend: str, q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec) -> Tensor:
    """[B, Q, H, D_v] by SDPA, restricted to one backend."""
    with sdpa_kernel(_SDPA_BACKENDS[backend][0]):
        heads_first = _first(backend, q, k, v)
        gqa = heads_first[0].shape[1] != heads_first[1].shape[1]
        return functional.scaled_dot_product_attention(
            *heads_first, is_causal=spec.causal, scale=spec.scale, enable_gqa=gqa
        ).transpose(1, 2)


def _first(backend: str, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[B, H, S, D]; the memory-efficient kernel has no groups, so each query head gets its own keys
    and values.
    """
    if backend == "efficient" and q.shape[2] != k.shape[2]:
        group = q.shape[2] // k.shape[2]
        k, v = k.repeat_interleave(group, dim=2), v.repeat_interleave(group, dim=2)
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


def _torch_refusal(
    can: Callable[..., bool], tensors: tuple[Tensor, Tensor, Tensor], gqa: bool, causal: bool
) -> str | None:
    gqa = gqa and tensors[0].shape[1] != tensors[1].shape[1]
    params = torch.backends.cuda.SDPAParams(*tensors, None, 0.0, causal, gqa)
    if can(params, False):
        return None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        can(params, True)
    reason = (
        str(caught[0].message).partition(" (Triggered")[0].strip() if caught else "these tensors"
    )
    return f"torch rejects the call: {reason}"


def flash_why_not(
    q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, lse_grad: bool
) -> str | None:
    """Why FlashAttention-2 cannot run this call; None if it can.

    It supports windows, groups, ragged batches and masks aligned at the end.
    """
    if q.device.type != "cuda" or torch.version.cuda is None:
        return "not a CUDA tensor"
    if not torch.backends.cuda.is_flash_attention_available():
        return "torch was built without it"
    if q.dtype not in _HALVES:
        return "supports fp16 and bf16 only"
    if spec.softcap:
        return "torch's build does not support a softcap"
    if max(q.shape[-1], v.shape[-1]) > 256:
        return "head dims above 256"
    if torch.cuda.get_device_capability(q.device) < (8, 0):
        return "requires an Ampere GPU or later"
    if lse_grad:
        return "does not differentiate the log-sum-exp"
    if q.numel() == 0 or k.numel() == 0:
        return "a dimension is empty"
    return None


def flash(
    q: Tensor, k: Tensor, v: Tensor, bounds: Bounds | None, spec: AttentionSpec
) -> tuple[Tensor, Tensor]:
    """(out [B, Q, H, D_v], log-sum-exp [B, H, Q]); out has gradients."""
    out, lse = _Flash.apply(q, k, v, bounds, spec)
    # It returns +inf for a query that sees no key.
    if bounds is not None or (spec.causal and q.shape[1] > k.shape[1]):
        lse = lse.masked_fill(lse == torch.inf, -torch.inf)
    return out, lse


class _Flash(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, bounds: Bounds | None, spec: AttentionSpec
    ) -> tuple[Tensor, Tensor]:
        width = max(q.shape[-1], v.shape[-1])
        width += -width % 8
        wide = [_packed(x, width, bounds is not None) for x in (q, k, v)]
        ends, longest = _spans(q, k, bounds)
        out, lse, rng, unused, _ = _aten._flash_attention_forward(
            *wide, *ends, *longest, 0.0, spec.causal, False, scale=spec.scale, **_window(spec)
        )
        ctx.save_for_backward(
            *wide, out, lse, rng, unused, *((bounds.cu_q, bounds.cu_k) if bounds else ())
        )
        ctx.longest, ctx.spec, ctx.widths = longest, spec, (q.shape[-1], k.shape[-1], v.shape[-1])
        ctx.ragged = bounds is not None
        out = out[..., : v.shape[-1]]
        if bounds is not None:
            out, lse = out.unsqueeze(0), lse.unsqueeze(0)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, rng, unused, *ends = ctx.saved_tensors
        grad = _packed(grad, out.shape[-1], ctx.ragged)
        gradients = _aten._flash_attention_backward(
            grad,
            q,
            k,
            v,
            out,
            lse,
            *(ends or (None, None)),
            *ctx.longest,
            0.0,
            ctx.spec.causal,
            rng,
            unused,
            scale=ctx.spec.scale,
            **_window(ctx.spec),
        )
        shaped = (g[..., :width] for g, width in zip(gradients, ctx.widths, strict=True))
        return *(g.unsqueeze(0) if ctx.ragged else g for g in shaped), None, None


def _spans(
    q: Tensor, k: Tensor, bounds: Bounds | None
) -> tuple[tuple[Tensor, Tensor] | tuple[None, None], tuple[int, int]]:
    if bounds is None:
        return (None, None), (q.shape[1], k.shape[1])
    return (bounds.cu_q, bounds.cu_k), (bounds.max_q, bounds.max_k)


def _packed(x: Tensor, width: int, ragged: bool) -> Tensor:
    """Converts to the kernel's layout: one width, a multiple of 8; contiguous columns; no batch
    dimension if ragged.
    """
    x = x if x.shape[-1] == width else functional.pad(x, (0, width - x.shape[-1]))
    x = x if x.stride(-1) == 1 else x.contiguous()
    return x.squeeze(0) if ragged else x


def _window(spec: AttentionSpec) -> dict[str, int]:
    """FlashAttention counts the keys left of a query's own."""
    return {"window_size_left": spec.window - 1, "window_size_right": 0} if spec.window else {}
