"""`attention` and `attention_varlen`: arguments checked, an implementation chosen with its reason,
and run.

Knows the candidates and their order; knows no kernel. Shapes: B batch, Q queries, K keys, H heads,
D head dim.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from kernels import checks, tuning
from kernels.attention.reference import reference
from kernels.attention.spec import Bounds, Form, check_dense, check_varlen, form_of, head_dim
from kernels.attention.torch_backends import cuda, flash_cpu
from kernels.attention.torch_backends.blockwise import blocks
from kernels.attention.triton_kernels import autograd
from kernels.dispatch import Candidate, choose, repeated, settle

Result = Tensor | tuple[Tensor, Tensor]
UNCAPPED = 0.0  # the very object: a call that leaves `softcap` alone is recognised by it


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: int | None = None,
    scale: float | None = None,
    softcap: float = UNCAPPED,
    return_lse: bool = False,
    backend: str | None = None,
) -> Result:
    """softmax(scale · q kᵀ, where seen) v, without the square of scores in memory (arXiv
    2205.14135, 2307.08691).

    q [B, Q, H, D], k [B, K, H_kv, D], v [B, K, H_kv, D_v]; H a multiple of H_kv, heads h of q using
    h // (H / H_kv).
    The last query stands beside the last key: query i at place i + K - Q. `causal` lets it see keys
    up to its place;
    a `window` w keeps the last w of those (place - w < j <= place) and is causal. `scale` above 0,
    1 / sqrt(D) if
    None. `softcap` c bends scores to c · tanh(score / c). A query that sees no key gets zeros.

    Gives [B, Q, H, D_v] in q's dtype, or with `return_lse` also the natural log-sum-exp [B, H, Q],
    fp32 (fp64 for
    fp64), -inf where no key is seen. `backend` forces one of own, cudnn, flash, efficient, math,
    reference.
    Raises TypeError or ValueError before any launch, BackendUnavailable for a backend that cannot.
    """
    if window is None and softcap is UNCAPPED and return_lse is False and backend is None:
        out = flash_cpu.recognised(q, k, v, causal, scale)
        if out is not None:
            return out
    options = (causal, window, scale, softcap, return_lse, backend)
    kind = None if torch.compiler.is_compiling() else _kind((q, k, v), options)
    known = repeated(kind)
    if known is None:
        checks.flag("return_lse", return_lse)
        check_dense(q, k, v)
        form = form_of(q.shape[-1], causal, window, scale, softcap)
        chosen = _choose("attention", q, k, v, None, form, return_lse, backend, kind)
    else:
        chosen, form = known
    if (
        chosen == "flash"
        and not return_lse
        and q.device.type == "cpu"
        and flash_cpu.plain(q, k, v, form)
    ):
        if known is None and backend is None:
            settle(flash_cpu.plain_kind(q, k, v, causal, scale), flash_cpu.how(q, k, form))
        return flash_cpu.front_door(q, k, v, form)
    if chosen in ("cudnn", "efficient"):
        return cuda.door(chosen, q, k, v, form)
    out, lse = _run(chosen, q, k, v, None, form)
    return (out, lse) if return_lse else out


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    causal: bool = False,
    window: int | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    return_lse: bool = False,
    backend: str | None = None,
) -> Result:
    """`attention` of each of N packed sequences with itself alone.

    q [T_q, H, D], k [T_k, H_kv, D], v [T_k, H_kv, D_v]; sequence n holds rows cu[n] to cu[n + 1] -
    1 (cu [N + 1],
    int32 or int64, from 0 to T); max_q and max_k are at least the longest. Sequences may be empty.
    Gives [T_q, H, D_v], and with `return_lse` the log-sum-exp [H, T_q]. Errors as of `attention`;
    the bounds are read
    back once for each tensor of them, except while a CUDA graph is captured.
    """
    checks.flag("return_lse", return_lse)
    cu_q, cu_k = check_varlen(q, k, v, cu_q, cu_k, max_q, max_k)
    form = form_of(q.shape[-1], causal, window, scale, softcap)
    bounds = Bounds(cu_q, cu_k, max_q, max_k)
    one = q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)
    chosen = _choose("attention_varlen", *one, bounds, form, return_lse, backend)
    out, lse = _run(chosen, *one, bounds, form)
    return (out.squeeze(0), lse.squeeze(0)) if return_lse else out.squeeze(0)


def _choose(
    op: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds: Bounds | None,
    form: Form,
    wants_lse: bool,
    backend: str | None,
    kind: tuple[object, ...] | None = None,
) -> str:
    grad = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    facts: dict[str, object] = {
        "device": q.device.type,
        "dtype": str(q.dtype).removeprefix("torch."),
        "head_dim": head_dim(q, v),
        "queries": tuning.round_up(bounds.max_q if bounds else q.shape[1]),
        "keys": tuning.round_up(bounds.max_k if bounds else k.shape[1]),
        "causal": form.causal,
        "window": form.window > 0,
        "softcap": form.softcap > 0,
        "lse": wants_lse,
        "grad": grad,
    }
    chosen = choose(op, facts, _candidates(q, k, v, bounds, form, wants_lse, grad), backend).backend
    settle(kind, (chosen, form))
    return chosen


def _kind(
    tensors: tuple[Tensor, Tensor, Tensor], options: tuple[object, ...]
) -> tuple[object, ...] | None:
    """All that checks and choice rest on; None for what is wrong. Looking at a call anew takes 40
    us on a CPU,
    recognising it 14."""
    if not all(each is None or isinstance(each, (int, float, str)) for each in options):
        return None
    grad = torch.is_grad_enabled()
    told: list[object] = [
        "attention",
        os.environ.get("KERNELS_BACKEND"),
        *options,
        *map(type, options),
    ]
    for x in tensors:
        if not isinstance(x, Tensor):
            return None
        told += (x.shape, x.stride(), x.dtype, x.device, grad and x.requires_grad, type(x))
    return tuple(told)


def _candidates(
    q: Tensor, k: Tensor, v: Tensor, bounds: Bounds | None, form: Form, wants_lse: bool, grad: bool
) -> list[Candidate]:
    """In the order that stands where nothing was measured (README: published figures of H100).

    cuDNN leads where it can; own kernels where it cannot and FlashAttention-2 is known to be
    slower: windows, packed
    sequences, forward alone; FlashAttention-2's backward leads in training.
    """
    own_ = Candidate("own", autograd.why_not(q, v))
    last = Candidate("reference")  # holds every score at once; math, before it, takes everything
    if q.device.type != "cuda":
        return [own_, Candidate("flash", _flash_off_cuda_why_not(q, form)), Candidate("math"), last]
    doors = {
        b: Candidate(b, cuda.door_why_not(b, q, k, v, bounds, form, wants_lse))
        for b in ("cudnn", "efficient")
    }
    flash = Candidate("flash", cuda.flash_why_not(q, k, v, form, wants_lse and grad))
    if bounds is not None or form.window or not grad:
        middle = [own_, flash]
    else:
        middle = [flash, own_]
    # exact fp32 products run outside the tensor cores: torch's kernel is tuned for them
    if q.dtype is torch.float32:
        middle = [doors["efficient"], *middle]
    return [doors["cudnn"], *middle, doors["efficient"], Candidate("math"), last]


def _flash_off_cuda_why_not(q: Tensor, form: Form) -> str | None:
    return (
        flash_cpu.why_not(form)
        if q.device.type == "cpu"
        else f"no kernel of torch's for {q.device.type} tensors"
    )


def _run(
    backend: str, q: Tensor, k: Tensor, v: Tensor, bounds: Bounds | None, form: Form
) -> tuple[Tensor, Tensor]:
    if backend == "own":
        return autograd.own(q, k, v, bounds, form)
    if backend == "flash" and q.device.type == "cuda":
        return cuda.flash(q, k, v, bounds, form)
    one = {"flash": flash_cpu.in_parts, "math": blocks, "reference": reference}[backend]
    return one(q, k, v, form) if bounds is None else _each(one, q, k, v, bounds, form)


def _each(
    one: Any, q: Tensor, k: Tensor, v: Tensor, bounds: Bounds, form: Form
) -> tuple[Tensor, Tensor]:
    """Sequence after sequence, joined again."""
    found = [
        one(q[:, a:b], k[:, c:d], v[:, c:d], form)
        for (a, b), (c, d) in zip(_spans(bounds.cu_q), _spans(bounds.cu_k), strict=True)
    ]
    if not found:
        return q.new_zeros(*q.shape[:3], v.shape[-1]), q.new_zeros(1, q.shape[2], 0)
    return torch.cat([out for out, _ in found], 1), torch.cat([lse for _, lse in found], 2)


def _spans(cu: Tensor) -> Iterator[tuple[int, int]]:
    ends = cu.tolist()
    return itertools.pairwise(ends)
