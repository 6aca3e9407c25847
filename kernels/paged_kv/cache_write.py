"""`write_kv`: writes a step's keys and values to their slots in the paged cache, quantized for int8
or e4m3.

A slot is block · block_size + offset in the block. Shapes: T tokens, G kv heads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernels import checks, runtime
from kernels.dispatch import Candidate, cache_choice, cached_choice, call_key, choose
from kernels.jit import jit, next_power_of_2, tl
from kernels.paged_kv.api import QUANTIZED_DTYPES
from kernels.shipped import ShippedKernel

MAX_VALUE = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


def write_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    *,
    scales: tuple[Tensor, Tensor] | None = None,
    check: bool = True,
    backend: str | None = None,
) -> None:
    """Writes k `[T, G, D]` and v `[T, G, Dv]` (or `[B, S, …]` with slots `[B, S]`) in place.

    Caches `[blocks, block_size, G, D]`; slots `[T]` int, negative for tokens to skip (padding). An
    int8 or e4m3 cache also needs `scales` `[blocks, block_size, G]` fp32, one per token and head:
    amax / 127 or / 448. If two tokens share a slot, one of them is stored. `check=False` trusts the
    slots and never synchronizes with a GPU; a slot beyond the cache then writes wrong memory.
    Raises ValueError or TypeError.
    """
    key = None
    if backend is None and not check:
        tensors = (k, v, k_cache, v_cache, slots, *(scales or ()))
        key = call_key("write_kv", tensors, strides=True)
    chosen = cached_choice(key)
    if chosen is None:
        chosen = _choose(k, v, k_cache, v_cache, slots, scales, check, backend)
        cache_choice(key, chosen)
    k_TGD, v_TGD, slots_T = k.flatten(0, -3), v.flatten(0, -3), slots.flatten()
    if chosen == "torch":
        _write_by_torch(k_TGD, v_TGD, k_cache, v_cache, slots_T, scales)
    elif slots_T.numel():
        _launch(k_TGD, v_TGD, k_cache, v_cache, slots_T, scales)


def _choose(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    scales: tuple[Tensor, Tensor] | None,
    check: bool,
    backend: str | None,
) -> str:
    """Checks the arguments; returns the backend."""
    _check(k, v, k_cache, v_cache, slots, scales)
    if check and slots.numel() and not runtime.is_capturing(slots):
        capacity, most = k_cache.shape[0] * k_cache.shape[1], int(slots.max())
        if most >= capacity:
            raise ValueError(
                f"slots contain {most}; the cache has {capacity} slots, 0 to {capacity - 1}."
            )
    facts: dict[str, object] = {"dtype": k.dtype, "cache": k_cache.dtype, "device": k.device.type}
    own = runtime.why_not(k)
    if (
        own is None
        and k_cache.dtype == torch.float8_e4m3fn
        and not runtime.has_fp8(runtime.arch(k.device))
    ):
        own = "Triton supports e4m3 from sm_89 on"
    candidates = (Candidate("own", own), Candidate("torch"))
    return choose("write_kv", facts, candidates, backend).backend


def quantize_rows(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x `[…, D]` as int8 or e4m3, and the scale of each row `[…]` fp32: x ~ q · scale."""
    wide = x.float()
    scale = wide.abs().amax(-1).clamp_min(1e-12) / MAX_VALUE[dtype]
    scaled = (wide / scale.unsqueeze(-1)).clamp(-MAX_VALUE[dtype], MAX_VALUE[dtype])
    return (scaled.round() if dtype == torch.int8 else scaled).to(dtype), scale


def check_places(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """Shapes, devices and layout of a write to the cache: one slot per token of k, room for k's
    and v's heads. Raises TypeError for dtypes, else ValueError.
    """
    checks.shape("v", v, (*k.shape[:-1], None), "as k, any")
    checks.integer_dtype("slots", slots)
    checks.shape("slots", slots, tuple(k.shape[:-2]), "tokens as in k")
    checks.shape(
        "k_cache", k_cache, (None, None, *k.shape[-2:]), "blocks, block_size, kv_heads, head_dim"
    )
    checks.shape(
        "v_cache",
        v_cache,
        (*k_cache.shape[:2], *v.shape[-2:]),
        "blocks, block_size, kv_heads, head_dim",
    )
    checks.same_device(k=k, v=v, k_cache=k_cache, v_cache=v_cache, slots=slots)
    for name, x in (("k_cache", k_cache), ("v_cache", v_cache)):
        checks.contiguous_last(name, x)
        checks.not_expanded(name, x)


def _check(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    scales: tuple[Tensor, Tensor] | None,
) -> None:
    checks.dtype_in("k", k, (*checks.FLOATS, torch.float64))
    checks.same_dtype(k=k, v=v)
    checks.dims("k", k, 3, 4)
    checks.dims("k_cache", k_cache, 4)
    check_places(k, v, k_cache, v_cache, slots)
    checks.contiguous_last("k", k)
    checks.contiguous_last("v", v)
    if scales is None:
        checks.same_dtype(k=k, k_cache=k_cache, v_cache=v_cache)
        return
    checks.dtype_in("k_cache", k_cache, QUANTIZED_DTYPES)
    checks.same_dtype(k_cache=k_cache, v_cache=v_cache)
    checks.pair("scales", scales)
    for name, x in zip(("scales[0]", "scales[1]"), scales, strict=True):
        checks.dtype_in(name, x, (torch.float32,))
        checks.shape(name, x, tuple(k_cache.shape[:3]), "blocks, block_size, kv_heads")
        checks.same_device(k=k, **{name: x})
        checks.contiguous(name, x)


def _write_by_torch(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    scales: tuple[Tensor, Tensor] | None,
) -> None:
    slots = slots.long()
    if slots.numel() and int(slots.min()) < 0:
        stored = (slots >= 0).nonzero().squeeze(1)
        slots, k, v = slots[stored], k[stored], v[stored]
    if scales is not None:
        k, k_scales = quantize_rows(k, k_cache.dtype)
        v, v_scales = quantize_rows(v, v_cache.dtype)
        scales[0].view(-1, k.shape[1]).index_copy_(0, slots, k_scales)
        scales[1].view(-1, v.shape[1]).index_copy_(0, slots, v_scales)
    for x, cache in ((k, k_cache), (v, v_cache)):
        if cache.is_contiguous() and cache.dtype != torch.float8_e4m3fn:
            cache.view(-1, *cache.shape[2:]).index_copy_(0, slots, x)
        elif cache.dtype == torch.float8_e4m3fn:  # torch indexes bytes, not e4m3
            cache.view(torch.uint8)[slots // cache.shape[1], slots % cache.shape[1]] = x.view(
                torch.uint8
            )
        else:
            cache[slots // cache.shape[1], slots % cache.shape[1]] = x


@jit
def write_kv_kernel(
    X,
    CACHE,
    SLOTS,
    SCALES,
    heads,
    x_t,
    x_h,
    c_b,
    c_s,
    c_h,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MAX_VALUE: tl.constexpr,
):
    """One token, BLOCK_H of its heads. MAX_VALUE: 0 for a plain cache, else the largest quantized
    value.
    """
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(SLOTS + token).to(tl.int64)
    if slot < 0:
        return
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    d = tl.arange(0, BLOCK_D)
    inside = (h < heads)[:, None] & (d < D)[None, :]
    x = tl.load(X + token * x_t + h[:, None] * x_h + d[None, :], mask=inside, other=0.0)
    at = CACHE + (slot // PAGE) * c_b + (slot % PAGE) * c_s + h[:, None] * c_h + d[None, :]
    if MAX_VALUE == 0:
        tl.store(at, x, mask=inside)
    else:
        wide = x.to(tl.float32)
        scale = tl.maximum(tl.max(tl.abs(wide), 1), 1e-12) / MAX_VALUE
        q = tl.clamp(wide / scale[:, None], -MAX_VALUE, MAX_VALUE)
        if MAX_VALUE == 127:
            q = tl.floor(tl.abs(q) + 0.5) * tl.where(q < 0, -1.0, 1.0)  # halves away from zero
        tl.store(at, q.to(CACHE.dtype.element_ty), mask=inside)
        tl.store(SCALES + slot * heads + h, scale, mask=h < heads)


def _launch(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    scales: tuple[Tensor, Tensor] | None,
) -> None:
    pair = scales if scales is not None else (None, None)
    with runtime.device_guard(k):
        for x, cache, scale in ((k, k_cache, pair[0]), (v, v_cache, pair[1])):
            heads, width = x.shape[1:]
            block_d = max(16, next_power_of_2(width))
            block_h = max(1, min(next_power_of_2(heads), 2048 // block_d))
            write_kv_kernel[(x.shape[0], -(-heads // block_h))](
                x,
                cache,
                slots,
                scale,
                heads,
                *x.stride()[:2],
                *cache.stride()[:3],
                D=width,
                PAGE=cache.shape[1],
                BLOCK_H=block_h,
                BLOCK_D=block_d,
                MAX_VALUE=0 if scale is None else int(MAX_VALUE[cache.dtype]),
            )


def shipped(arch: str) -> list[ShippedKernel]:
    """Eight heads of 128 into a bf16 and into an int8 cache."""
    kernels = []
    for name, dtype, most in (("bf16", "*bf16", 0), ("int8", "*i8", 127)):
        signature = {"X": "*bf16", "CACHE": dtype, "SLOTS": "*i64", "heads": "i32"}
        signature |= dict.fromkeys(("x_t", "x_h", "c_b", "c_s", "c_h"), "i32:16")
        constants: dict[str, Any] = {
            "D": 128,
            "PAGE": 16,
            "BLOCK_H": 8,
            "BLOCK_D": 128,
            "MAX_VALUE": most,
        }
        if most:
            signature["SCALES"] = "*fp32"
        else:
            constants["SCALES"] = None
        kernels.append(ShippedKernel("write_kv", name, write_kv_kernel, signature, constants))
    return kernels
