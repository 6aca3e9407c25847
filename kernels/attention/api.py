"""`attention` and `attention_varlen`: checks arguments, chooses an implementation and runs it.

Shapes: B batch, Q queries, K keys, H heads, D head dim.
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
from kernels.attention.spec import (
    AttentionSpec,
    Bounds,
    check_dense,
    check_varlen,
    head_dim,
    make_spec,
)
from kernels.attention.torch_backends import cuda, flash_cpu
from kernels.attention.torch_backends.blockwise import blockwise
from kernels.attention.triton_kernels import autograd
from kernels.dispatch import Candidate, cache_choice, cached_choice, choose

Result = Tensor | tuple[Tensor, Tensor]
UNCAPPED = 0.0  # compared by identity, to recognize calls that leave `softcap` unset


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
    """softmax(scale · q kᵀ, masked) v without the Q x K scores in memory (arXiv 2205.14135,
    2307.08691).

    q [B, Q, H, D], k [B, K, H_kv, D], v [B, K, H_kv, D_v]; H is a multiple of H_kv, and head h of q
    uses head h // (H / H_kv). The last query aligns with the last key: query i has position i + K -
    Q. `causal` lets it see keys up to its position; a `window` w keeps the last w of those
    (position - w < j <= position) and is causal. `scale` is positive, by default 1 / sqrt(D).
    `softcap` c replaces scores by c · tanh(score / c). A query that sees no key gets zeros.

    Returns [B, Q, H, D_v] in q's dtype, and with `return_lse` also the natural log-sum-exp [B, H,
    Q] in fp32 (fp64 for fp64), -inf if no key is seen. `backend` forces one of own, cudnn, flash,
    efficient, math, reference. Raises TypeError or ValueError before any launch, BackendUnavailable
    if the backend cannot run.
    """
    if window is None and softcap is UNCAPPED and return_lse is False and backend is None:
        out = flash_cpu.run_cached(q, k, v, causal, scale)
        if out is not None:
            return out
    options = (causal, window, scale, softcap, return_lse, backend)
    key = None if torch.compiler.is_compiling() else _call_key((q, k, v), options)
    cached = cached_choice(key)
    if cached is None:
        checks.boolean("return_lse", return_lse)
        check_dense(q, k, v)
        spec = make_spec(q.shape[-1], causal, window, scale, softcap)
        chosen = _choose("attention", q, k, v, None, spec, return_lse, backend, key)
    else:
        chosen, spec = cached
    if (
        chosen == "flash"
        and not return_lse
        and q.device.type == "cpu"
        and flash_cpu.is_plain(q, k, v, spec)
    ):
        if cached is None and backend is None:
            cache_choice(
                flash_cpu.plain_call_key(q, k, v, causal, scale), flash_cpu.sdpa_options(q, k, spec)
            )
        return flash_cpu.sdpa(q, k, v, spec)
    if chosen in ("cudnn", "efficient"):
        return cuda.sdpa(chosen, q, k, v, spec)
    out, lse = _run(chosen, q, k, v, None, spec)
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
    """`attention` within each of N packed sequences.

    q [T_q, H, D], k [T_k, H_kv, D], v [T_k, H_kv, D_v]; sequence n holds rows cu[n] to cu[n + 1] -
    1 (cu [N + 1], int32 or int64, from 0 to T); max_q and max_k are at least the longest. Sequences
    may be empty. Returns [T_q, H, D_v], and with `return_lse` the log-sum-exp [H, T_q]. Errors as
    in `attention`. Each bounds tensor is read back once, except during CUDA graph capture.
    """
    checks.boolean("return_lse", return_lse)
    cu_q, cu_k = check_varlen(q, k, v, cu_q, cu_k, max_q, max_k)
    spec = make_spec(q.shape[-1], causal, window, scale, softcap)
    bounds = Bounds(cu_q, cu_k, max_q, max_k)
    batch = q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)
    chosen = _choose("attention_varlen", *batch, bounds, spec, return_lse, backend)
    out, lse = _run(chosen, *batch, bounds, spec)
    return (out.squeeze(0), lse.squeeze(0)) if return_lse else out.squeeze(0)


def _choose(
    op: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds: Bounds | None,
    spec: AttentionSpec,
    wants_lse: bool,
    backend: str | None,
    key: tuple[object, ...] | None = None,
) -> str:
    grad = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
    facts: dict[str, object] = {
        "device": q.device.type,
        "dtype": str(q.dtype).removeprefix("torch."),
        "head_dim": head_dim(q, v),
        "queries": tuning.round_up(bounds.max_q if bounds else q.shape[1]),
        "keys": tuning.round_up(bounds.max_k if bounds else k.shape[1]),
        "causal": spec.causal,
        "window": spec.window > 0,
        "softcap": spec.softcap > 0,
        "lse": wants_lse,
        "grad": grad,
    }
    chosen = choose(op, facts, _candidates(q, k, v, bounds, spec, wants_lse, grad), backend).backend
    cache_choice(key, (chosen, spec))
    return chosen


def _call_key(
    tensors: tuple[Tensor, Tensor, Tensor], options: tuple[object, ...]
) -> tuple[object, ...] | None:
    """Everything that checks and choice depend on; None for invalid arguments. Checking a call
    again costs 40 us on a CPU, a cached choice 14.
    """
    if not all(option is None or isinstance(option, (int, float, str)) for option in options):
        return None
    grad = torch.is_grad_enabled()
    key: list[object] = [
        "attention",
        os.environ.get("KERNELS_BACKEND"),
        *options,
        *map(type, options),
    ]
    for x in tensors:
        if not isinstance(x, Tensor):
            return None
        key += (x.shape, x.stride(), x.dtype, x.device, grad and x.requires_grad, type(x))
    return tuple(key)


def _candidates(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds: Bounds | None,
    spec: AttentionSpec,
    wants_lse: bool,
    grad: bool,
) -> list[Candidate]:
    """The default order if nothing was measured (README: published figures of H100).

    cuDNN leads if it can run. FlashAttention-2 follows in training, where its backward pass is
    faster; own kernels follow without gradients.
    """
    own_candidate = Candidate("own", autograd.why_not(q, v))
    reference_candidate = Candidate(
        "reference"
    )  # holds every score at once; math, listed before it, runs every call
    if q.device.type != "cuda":
        return [
            own_candidate,
            Candidate("flash", _flash_off_cuda_why_not(q, spec)),
            Candidate("math"),
            reference_candidate,
        ]
    sdpa = {
        b: Candidate(b, cuda.sdpa_why_not(b, q, k, v, bounds, spec, wants_lse))
        for b in ("cudnn", "efficient")
    }
    flash = Candidate("flash", cuda.flash_why_not(q, k, v, spec, wants_lse and grad))
    preferred = [flash, own_candidate] if grad else [own_candidate, flash]
    # Exact fp32 products do not use tensor cores; torch's kernel is tuned for them.
    if q.dtype is torch.float32:
        preferred = [sdpa["efficient"], *preferred]
    return [sdpa["cudnn"], *preferred, sdpa["efficient"], Candidate("math"), reference_candidate]


def _flash_off_cuda_why_not(q: Tensor, spec: AttentionSpec) -> str | None:
    return (
        flash_cpu.why_not(spec)
        if q.device.type == "cpu"
        else f"torch has no kernel for {q.device.type} tensors"
    )


def _run(
    backend: str, q: Tensor, k: Tensor, v: Tensor, bounds: Bounds | None, spec: AttentionSpec
) -> tuple[Tensor, Tensor]:
    if backend == "own":
        return autograd.triton_attention(q, k, v, bounds, spec)
    if backend == "flash" and q.device.type == "cuda":
        return cuda.flash(q, k, v, bounds, spec)
    attend = {"flash": flash_cpu.chunked, "math": blockwise, "reference": reference}[backend]
    return attend(q, k, v, spec) if bounds is None else _per_sequence(attend, q, k, v, bounds, spec)


def _per_sequence(
    attend: Any, q: Tensor, k: Tensor, v: Tensor, bounds: Bounds, spec: AttentionSpec
) -> tuple[Tensor, Tensor]:
    """Runs each sequence separately and concatenates the results."""
    results = [
        attend(q[:, a:b], k[:, c:d], v[:, c:d], spec)
        for (a, b), (c, d) in zip(_spans(bounds.cu_q), _spans(bounds.cu_k), strict=True)
    ]
    if not results:
        return q.new_zeros(*q.shape[:3], v.shape[-1]), q.new_zeros(1, q.shape[2], 0)
    return torch.cat([out for out, _ in results], 1), torch.cat([lse for _, lse in results], 2)


def _spans(cu: Tensor) -> Iterator[tuple[int, int]]:
    ends = cu.tolist()
    return itertools.pairwise(ends)
