"""Rotary position embedding in Triton: queries and keys in one launch, optionally with the cache
write.

Backward is the inverse rotation. Shapes: T tokens, H query heads, G key heads, D head dim, R pairs.
Does not depend on autograd.
"""

from __future__ import annotations

from typing import Any

import torch

from kernels import runtime, tuning
from kernels.jit import cdiv, jit, next_power_of_2, tl
from kernels.shipped import ShippedKernel

Cache = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@jit
def rotate_pairs(
    X,
    OUT,
    cos,
    sin,
    h,
    heads,
    x_h,
    o_h,
    R: tl.constexpr,
    D: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_REST: tl.constexpr,
):
    """Heads h [BLOCK_H] of one token, whose first element X and OUT point to; unrotated dims are
    copied.
    """
    kind = OUT.dtype.element_ty
    if INTERLEAVED:  # loads full pairs: every second number alone would be narrow loads
        d = tl.arange(0, 2 * BLOCK_R)
        known = (h < heads)[:, None] & (d < 2 * R)[None, :]
        x = tl.load(X + h[:, None] * x_h + d[None, :], mask=known, other=0.0).to(tl.float32)
        a, b = tl.split(tl.reshape(x, (BLOCK_H, BLOCK_R, 2)))
        y = tl.interleave(a * cos[None, :] - b * sin[None, :], b * cos[None, :] + a * sin[None, :])
        tl.store(OUT + h[:, None] * o_h + d[None, :], y.to(kind), mask=known)
    else:
        r = tl.arange(0, BLOCK_R)
        known = (h < heads)[:, None] & (r < R)[None, :]
        a = tl.load(X + h[:, None] * x_h + r[None, :], mask=known, other=0.0).to(tl.float32)
        b = tl.load(X + h[:, None] * x_h + R + r[None, :], mask=known, other=0.0).to(tl.float32)
        tl.store(
            OUT + h[:, None] * o_h + r[None, :],
            (a * cos[None, :] - b * sin[None, :]).to(kind),
            mask=known,
        )
        tl.store(
            OUT + h[:, None] * o_h + R + r[None, :],
            (b * cos[None, :] + a * sin[None, :]).to(kind),
            mask=known,
        )
    if D > 2 * R:
        d = 2 * R + tl.arange(0, BLOCK_REST)
        known = (h < heads)[:, None] & (d < D)[None, :]
        rest = tl.load(X + h[:, None] * x_h + d[None, :], mask=known)
        tl.store(OUT + h[:, None] * o_h + d[None, :], rest, mask=known)


@jit
def rope_kernel(
    Q,
    K,
    V,
    COS,
    SIN,
    POSITIONS,
    Q_OUT,
    K_OUT,
    V_OUT,
    SLOTS,
    length,
    H,
    G,
    q_t,
    q_h,
    k_t,
    k_h,
    v_t,
    v_h,
    c_t,
    qo_t,
    qo_h,
    ko_b,
    ko_t,
    ko_h,
    vo_b,
    vo_t,
    vo_h,
    R: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    INVERSE: tl.constexpr,
    CACHED: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_REST: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """One token and BLOCK_H heads per program: blocks of queries, then of keys, then (CACHED) of
    values.

    POSITIONS [T], or None: a token's index in its sequence of `length`. CACHED: writes keys and
    values to their slots.
    """
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    q_parts = tl.cdiv(H, BLOCK_H)
    kv_parts = tl.cdiv(G, BLOCK_H)
    if POSITIONS is None:
        position = token % length
    else:
        position = tl.load(POSITIONS + token).to(tl.int64)
    r = tl.arange(0, BLOCK_R)
    cos = tl.load(COS + position * c_t + r, mask=r < R, other=0.0).to(tl.float32)
    sin = tl.load(SIN + position * c_t + r, mask=r < R, other=0.0).to(tl.float32)
    if INVERSE:
        sin = -sin
    if part < q_parts:
        h = part * BLOCK_H + tl.arange(0, BLOCK_H)
        rotate_pairs(
            Q + token * q_t,
            Q_OUT + token * qo_t,
            cos,
            sin,
            h,
            H,
            q_h,
            qo_h,
            R,
            D,
            INTERLEAVED,
            BLOCK_H,
            BLOCK_R,
            BLOCK_REST,
        )
    else:
        if CACHED:
            slot = tl.load(SLOTS + token).to(tl.int64)
            k_at = (slot // PAGE) * ko_b + (slot % PAGE) * ko_t
            v_at = (slot // PAGE) * vo_b + (slot % PAGE) * vo_t
            heads = tl.where(slot < 0, 0, G)  # a negative slot is padding: nothing is written
        else:
            k_at = token * ko_t
            v_at = k_at
            heads = G
        if part < q_parts + kv_parts:
            h = (part - q_parts) * BLOCK_H + tl.arange(0, BLOCK_H)
            rotate_pairs(
                K + token * k_t,
                K_OUT + k_at,
                cos,
                sin,
                h,
                heads,
                k_h,
                ko_h,
                R,
                D,
                INTERLEAVED,
                BLOCK_H,
                BLOCK_R,
                BLOCK_REST,
            )
        elif CACHED:
            h = (part - q_parts - kv_parts) * BLOCK_H + tl.arange(0, BLOCK_H)
            d = tl.arange(0, BLOCK_V)
            known = (h < heads)[:, None] & (d < DV)[None, :]
            v = tl.load(V + token * v_t + h[:, None] * v_h + d[None, :], mask=known)
            tl.store(V_OUT + v_at + h[:, None] * vo_h + d[None, :], v, mask=known)


@tuning.rule("apply_rope")
def _config(arch: str, facts: dict[str, Any]) -> tuning.Config:
    """Enough heads per program for about 2048 pairs, so that a token's angles are read few
    times.
    """
    if arch == "interpret":
        return {"block_h": 2, "num_warps": 4}
    most = max(1, 2048 // max(16, next_power_of_2(facts["pairs"])))
    block_h = min(most, next_power_of_2(facts["heads"]))
    return {"block_h": block_h, "num_warps": 4}


@tuning.candidates("apply_rope")
def _other_configs(arch: str, facts: dict[str, Any]) -> list[tuning.Config]:
    most = next_power_of_2(facts["heads"])
    return [
        {"block_h": min(most, h), "num_warps": warps} for h in (4, 8, 16, 32) for warps in (2, 4, 8)
    ]


def launch(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    positions: torch.Tensor | None,
    length: int,
    interleaved: bool,
    inverse: bool = False,
    cache: Cache | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(q', k') of q [T, H, D] and k [T, G, D] with contiguous rows; with a cache None replaces k',
    because the cache contains it.
    """
    (tokens, heads, dim), kv_heads, pairs = q.shape, k.shape[1], cos.shape[1]
    c = tuning.config("apply_rope", heads=heads, pairs=pairs, dtype=q.dtype)
    q_out = torch.empty((tokens, heads, dim), dtype=q.dtype, device=q.device)
    parts = cdiv(heads, c["block_h"]) + (2 if cache else 1) * cdiv(kv_heads, c["block_h"])
    if cache is None:
        k_out = torch.empty((tokens, kv_heads, dim), dtype=k.dtype, device=q.device)
        v, v_out, slots = None, None, None
        strides = (0, 0, cos.stride(0), *q_out.stride()[:2], 0, *k_out.stride()[:2], 0, 0, 0)
    else:
        v, k_out, v_out, slots = cache
        strides = (
            *v.stride()[:2],
            cos.stride(0),
            *q_out.stride()[:2],
            *k_out.stride()[:3],
            *v_out.stride()[:3],
        )
    dim_v = v.shape[-1] if v is not None else 0
    with runtime.device_guard(q):
        rope_kernel[(tokens, parts)](
            q,
            k,
            v,
            cos,
            sin,
            positions,
            q_out,
            k_out,
            v_out,
            slots,
            length,
            heads,
            kv_heads,
            *q.stride()[:2],
            *k.stride()[:2],
            *strides,
            R=pairs,
            D=dim,
            DV=dim_v,
            INTERLEAVED=interleaved,
            INVERSE=inverse,
            CACHED=cache is not None,
            PAGE=k_out.shape[1] if cache else 1,
            BLOCK_H=c["block_h"],
            BLOCK_R=max(8, next_power_of_2(pairs)),
            BLOCK_REST=max(8, next_power_of_2(dim - 2 * pairs)) if dim > 2 * pairs else 8,
            BLOCK_V=max(8, next_power_of_2(max(dim_v, 1))),
            num_warps=c["num_warps"],
        )
    return q_out, None if cache else k_out


def shipped(arch: str) -> list[ShippedKernel]:
    """32 query and 8 key heads of 128: forward, backward of interleaved pairs, and with the cache
    write.
    """
    c = _config(arch, {"pairs": 64, "heads": 32})
    signature = dict.fromkeys(("Q", "K", "V", "Q_OUT", "K_OUT", "V_OUT"), "*bf16")
    signature |= {"COS": "*fp32", "SIN": "*fp32", "POSITIONS": "*i64", "SLOTS": "*i64"}
    signature |= {"length": "i32", "H": "i32:16", "G": "i32"}
    steps = [
        "q_t",
        "q_h",
        "k_t",
        "k_h",
        "v_t",
        "v_h",
        "c_t",
        "qo_t",
        "qo_h",
        "ko_b",
        "ko_t",
        "ko_h",
        "vo_b",
        "vo_t",
        "vo_h",
    ]
    signature |= dict.fromkeys(steps, "i32:16")
    sizes = {
        "R": 64,
        "D": 128,
        "DV": 128,
        "PAGE": 16,
        "BLOCK_H": c["block_h"],
        "BLOCK_R": 64,
        "BLOCK_REST": 8,
    }
    sizes["BLOCK_V"] = 128
    none = dict.fromkeys(("V", "V_OUT", "SLOTS"))

    def configuration(name: str, **flags: Any) -> ShippedKernel:
        return ShippedKernel(
            "apply_rope",
            name,
            rope_kernel,
            signature,
            sizes | flags,
            c["num_warps"],
            expects=("ld.global.v4",),
        )

    return [
        configuration(
            "forward", INTERLEAVED=False, INVERSE=False, CACHED=False, POSITIONS=None, **none
        ),
        configuration("backward interleaved", INTERLEAVED=True, INVERSE=True, CACHED=False, **none),
        configuration("forward into a cache", INTERLEAVED=False, INVERSE=False, CACHED=True),
    ]
