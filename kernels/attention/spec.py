"""The arguments of an attention call and their checks, before any launch.

Does not depend on any implementation.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels import checks, runtime

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
NO_WINDOW = 0
_CHECKED = "_orrery_spans"  # tensor attribute: (version, summary of the bounds)


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """The computed function: softmax(cap(q · k * scale) where visible) · v.

    `window` 0: none. A window is causal. `softcap` 0: none. The `shift` of a pair of sequences is
    keys minus queries: query i has position i + shift among the keys (aligned at the end).
    """

    causal: bool
    window: int
    scale: float
    softcap: float


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bounds of packed sequences, int32 [N + 1], and the length of the longest."""

    cu_q: Tensor
    cu_k: Tensor
    max_q: int
    max_k: int


def head_dim(q: Tensor, v: Tensor) -> str:
    """ "128", or "192/128" if the head dims of keys and values differ."""
    d, dv = q.shape[-1], v.shape[-1]
    return str(d) if d == dv else f"{d}/{dv}"


def make_spec(
    head_dim: int, causal: object, window: object, scale: object, softcap: object
) -> AttentionSpec:
    """Checks the options; `scale` defaults to 1 / sqrt(head_dim). Raises TypeError or
    ValueError.
    """
    checks.boolean("causal", causal)
    checks.window(window)  # type: ignore[arg-type]
    width = NO_WINDOW if window is None else min(int(window), 1 << 30)  # type: ignore[call-overload]
    if scale is None:
        scale = head_dim**-0.5
    checks.positive("scale", scale)  # type: ignore[arg-type]
    cap = 0.0 if softcap is None else softcap
    checks.softcap(cap)  # type: ignore[arg-type]
    return AttentionSpec(causal or width > 0, width, float(scale), float(cap))  # type: ignore[arg-type]


def check_dense(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Checks q [B, Q, H, D], k [B, K, H_kv, D], v [B, K, H_kv, D_v], with H a multiple of H_kv.

    Raises TypeError or ValueError.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        checks.dims(name, x, 4)
    _check_heads(q, k, v)
    if k.shape[0] != q.shape[0]:
        raise ValueError(
            f"k has a batch of {k.shape[0]} and q of {q.shape[0]}; they must be equal."
        )


def check_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int
) -> tuple[Tensor, Tensor]:
    """Checks q [T_q, H, D], k [T_k, H_kv, D], v [T_k, H_kv, D_v] and cu_* [N + 1] int, 0 to T_*,
    not decreasing.

    Returns cu_q and cu_k as int32. The bounds are read back once per tensor version (one GPU
    synchronization), except during CUDA graph capture; there the kernels clamp them to the tensors.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        checks.dims(name, x, 3)
    _check_heads(q, k, v)
    checks.same_device(q=q, cu_q=cu_q, cu_k=cu_k)
    bounds = []
    for name, cu, total, longest in (
        ("q", cu_q, q.shape[0], max_q),
        ("k", cu_k, k.shape[0], max_k),
    ):
        checks.integer_dtype(f"cu_{name}", cu)
        checks.dims(f"cu_{name}", cu, 1)
        if isinstance(longest, bool) or not isinstance(longest, int):
            raise TypeError(f"max_{name} must be an integer, not {longest!r}.")
        if cu.shape[0] < 1:
            raise ValueError(
                f"cu_{name} is empty; it must hold one bound more than there are sequences."
            )
        _check_bounds(name, cu, total, longest)
        bounds.append(
            cu
            if cu.dtype is torch.int32 and cu.is_contiguous()
            else cu.to(torch.int32).contiguous()
        )
    if cu_q.shape[0] != cu_k.shape[0]:
        raise ValueError(
            f"cu_q has {cu_q.shape[0] - 1} sequences and cu_k {cu_k.shape[0] - 1}; they must be "
            "equal."
        )
    return bounds[0], bounds[1]


def mark_bounds_checked(cu: Tensor, ends: Sequence[int]) -> None:
    """Stores the contents of a bounds tensor, given by its creator, so that it need not be read
    back from a GPU.
    """
    spans = [after - before for before, after in itertools.pairwise(ends)]
    version = 0 if cu.is_inference() else cu._version
    setattr(
        cu,
        _CHECKED,
        (version, ends[0], all(span >= 0 for span in spans), ends[-1], max(spans, default=0)),
    )


def _check_heads(q: Tensor, k: Tensor, v: Tensor) -> None:
    checks.dtype_in("q", q, DTYPES)
    if k.dtype != q.dtype or v.dtype != q.dtype:
        checks.same_dtype(q=q, k=k, v=v)
    if k.device != q.device or v.device != q.device:
        checks.same_device(q=q, k=k, v=v)
    if k.shape[:-1] != v.shape[:-1]:
        raise ValueError(
            f"k has shape {tuple(k.shape)} and v {tuple(v.shape)}; all but the last must be equal."
        )
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"q has head dim {q.shape[-1]} and k {k.shape[-1]}; they must be equal.")
    if min(q.shape[-1], v.shape[-1]) < 1:
        raise ValueError(f"head dims are {q.shape[-1]} and {v.shape[-1]}; they must be at least 1.")
    heads, kv_heads = q.shape[-2], k.shape[-2]
    if kv_heads < 1 or heads < 1 or heads % kv_heads:
        raise ValueError(
            f"q has {heads} heads and k {kv_heads}; q's must be a multiple of k's, both at least 1."
        )


def _check_bounds(name: str, cu: Tensor, total: int, longest: int) -> None:
    if runtime.is_capturing(cu):
        return
    summary = getattr(cu, _CHECKED, None)
    version = 0 if cu.is_inference() else cu._version
    if summary is None or summary[0] != version or cu.is_inference():
        values = cu.detach().to("cpu", torch.int64)
        spans = values.diff()
        non_decreasing = bool((spans >= 0).all())
        summary = (
            version,
            int(values[0]),
            non_decreasing,
            int(values[-1]),
            int(spans.max()) if len(spans) else 0,
        )
        setattr(cu, _CHECKED, summary)
    _, first, non_decreasing, last, widest = summary
    if first != 0 or not non_decreasing:
        raise ValueError(
            f"cu_{name} must start at 0 and not decrease; it holds the bounds of packed sequences."
        )
    if last != total:
        raise ValueError(
            f"cu_{name} ends at {last}, and the tensor has {total} rows; they must be equal."
        )
    if widest > longest:
        raise ValueError(
            f"max_{name} is {longest}, and a sequence of cu_{name} has length {widest}; increase "
            f"max_{name}."
        )
