"""Launch of the split-K kernel: number of splits, blocks, memory of partial results; shipped
configurations.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from kernels import runtime, tuning
from kernels.jit import UPCAST, cdiv, next_power_of_2
from kernels.paged_kv.kernel import paged_attention_combine_kernel, paged_attention_kernel
from kernels.paged_kv.page_plan import PagePlan
from kernels.shipped import ShippedKernel

MAX_SPLITS = 64
KEYS_PER_SPLIT = 256
"""A split with fewer keys costs more to combine than it saves."""

LOG2_E = math.log2(math.e)


@tuning.rule("paged_attention")
def _rule(arch: str, facts: dict[str, Any]) -> tuning.Config:
    if arch == "interpret":
        return {"BLOCK_M": 16, "BLOCK_N": 16, "num_warps": 4, "num_stages": 1}
    wide = int(facts["head_dim"]) > 128
    # exact products do not use tensor cores; their operands are in registers
    if facts["dtype"] == torch.float32:
        return {
            "BLOCK_M": 16,
            "BLOCK_N": 32 if int(facts["head_dim"]) <= 64 else 16,
            "num_warps": 4,
            "num_stages": 2,
        }
    warps = 8 if arch == "sm_80" and (wide or int(facts["rows"]) > 32) else 4
    if int(facts["rows"]) > 16:  # prefill and verification: limited by products
        block_m = 64 if int(facts["rows"]) > 32 else 32
        return {
            "BLOCK_M": block_m,
            "BLOCK_N": 32 if wide else 64,
            "num_warps": warps,
            "num_stages": 2 if wide else 3,
        }
    # two of five stages hold keys and values; the others wait for table entries
    return {"BLOCK_M": 16, "BLOCK_N": 32 if wide else 64, "num_warps": warps, "num_stages": 5}


def choose_splits(programs: int, longest: int, sm_count: int) -> int:
    """Splits of each sequence: two programs per multiprocessor, at least KEYS_PER_SPLIT keys
    each.
    """
    target = cdiv(2 * sm_count, max(1, programs))
    return max(1, min(target, cdiv(longest, KEYS_PER_SPLIT), MAX_SPLITS))


def launch(
    q_THD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    plan: PagePlan,
    *,
    scale: float,
    window: int | None,
    softcap: float,
    scales: tuple[Tensor, Tensor] | None,
    num_splits: int | None,
) -> tuple[Tensor, Tensor]:
    """Output `[T, H, Dv]` and log-sum-exp `[T, H]` fp32."""
    tokens, heads, width = q_THD.shape
    kv_heads, values = k_cache.shape[2], v_cache.shape[3]
    group, sequences = heads // kv_heads, plan.table.shape[0]
    facts = {
        "dtype": q_THD.dtype,
        "head_dim": max(width, values),
        "rows": tuning.round_up(group * plan.queries),
    }
    config = tuning.config("paged_attention", **facts)
    # ragged: query tokens that belong to no sequence stay zero
    make = torch.zeros if plan.cu is not None else torch.empty
    out = make(tokens, heads, values, dtype=q_THD.dtype, device=q_THD.device)
    lse = torch.full((tokens, heads), float("-inf"), dtype=torch.float32, device=q_THD.device)
    if not tokens or not sequences or not plan.queries:
        return out, lse
    programs = cdiv(group * plan.queries, config["BLOCK_M"]) * kv_heads * sequences
    keys = plan.longest if window is None else min(plan.longest, window + plan.queries)
    splits = num_splits or choose_splits(programs, keys, runtime.sm_count(q_THD.device))
    parts, part_lses = out.unsqueeze(0), lse.unsqueeze(0)
    if splits > 1:
        parts = torch.empty(splits, tokens, heads, values, dtype=torch.float32, device=q_THD.device)
        part_lses = torch.full(
            (splits, tokens, heads), float("-inf"), dtype=torch.float32, device=q_THD.device
        )
    # With a cap the exponent of tanh's exp2 contains 2 · log2(e) / cap, and the cap log2(e): one
    # product each.
    score_scale = scale * LOG2_E if not softcap else 2.0 * LOG2_E * scale / softcap
    k_scales, v_scales = scales if scales is not None else (None, None)
    with runtime.device_guard(q_THD):
        paged_attention_kernel[(programs * splits,)](
            q_THD,
            k_cache,
            v_cache,
            parts,
            part_lses,
            plan.table,
            plan.lens,
            plan.cu,
            k_scales,
            v_scales,
            score_scale,
            softcap * LOG2_E,
            window or 0,
            plan.queries,
            kv_heads,
            splits,
            *q_THD.stride()[:2],
            *k_cache.stride()[:3],
            *v_cache.stride()[:3],
            *parts.stride()[:3],
            *part_lses.stride()[:2],
            plan.table.stride(0),
            *(k_scales.stride()[:2] if k_scales is not None else (0, 0)),
            GROUP=group,
            D=width,
            DV=values,
            PAGE=plan.page,
            BLOCK_D=max(16, next_power_of_2(width)),
            BLOCK_V=max(16, next_power_of_2(values)),
            RAGGED=plan.cu is not None,
            WINDOWED=window is not None,
            CAPPED=bool(softcap),
            QUANTIZED=scales is not None,
            UPCAST=UPCAST,
            **config,
        )
        if splits > 1:
            combine_parts(parts, part_lses, out, lse, num_warps=2)
    return out, lse


def combine_parts(
    parts: Tensor, part_lses: Tensor, out: Tensor, lse: Tensor, *, num_warps: int
) -> None:
    """Merges attention of parts [splits, tokens, heads, D_v] and their log-sum-exp into `out` and
    `lse`.
    """
    splits, tokens, heads, values = parts.shape
    paged_attention_combine_kernel[(tokens * heads,)](
        parts,
        part_lses,
        out,
        lse,
        heads,
        splits,
        *parts.stride()[:3],
        *part_lses.stride()[:2],
        *out.stride()[:2],
        DV=values,
        BLOCK_V=max(16, next_power_of_2(values)),
        BLOCK_P=next_power_of_2(splits),
        num_warps=num_warps,
    )


def shipped(arch: str) -> list[ShippedKernel]:
    """Decode and prefill of bf16 at 128 and 64, a quantized cache, a wide head; and the combine
    kernel.
    """
    kernels = []
    for name, width, group, queries, kind in (
        ("decode-128", 128, 4, 1, "*bf16"),
        ("decode-64", 64, 8, 1, "*bf16"),
        ("decode-256", 256, 4, 1, "*bf16"),
        ("decode-128-int8", 128, 4, 1, "*i8"),
        ("prefill-128", 128, 4, 256, "*bf16"),
    ):
        config = _rule(
            arch, {"dtype": None, "head_dim": width, "rows": tuning.round_up(group * queries)}
        )
        quantised = kind == "*i8"
        signature = {
            "Q": "*bf16",
            "K": kind,
            "V": kind,
            "OUT": "*fp32",
            "LSE": "*fp32",
            "TABLE": "*i32",
            "LENS": "*i32",
        }
        signature |= {"CU": "*i32", "scale": "fp32", "softcap": "fp32"}
        signature |= dict.fromkeys(
            ("window", "queries", "kv_heads", "splits", "l_p", "l_t", "table_b", "s_b", "s_s"),
            "i32",
        )
        strides = ("q_t", "q_h", "k_b", "k_s", "k_h", "v_b", "v_s", "v_h", "o_p", "o_t", "o_h")
        signature |= dict.fromkeys(strides, "i32:16")
        constants: dict[str, Any] = {
            "GROUP": group,
            "D": width,
            "DV": width,
            "PAGE": 16,
            "BLOCK_D": width,
            "BLOCK_V": width,
            "RAGGED": queries > 1,
            "WINDOWED": False,
            "CAPPED": False,
            "QUANTIZED": quantised,
            "UPCAST": False,
            "BLOCK_M": config["BLOCK_M"],
            "BLOCK_N": config["BLOCK_N"],
        }
        if quantised:
            signature |= {"K_SCALES": "*fp32", "V_SCALES": "*fp32"}
        else:
            constants |= {"K_SCALES": None, "V_SCALES": None}
        expects = ("wgmma",) if arch == "sm_90" and config["BLOCK_M"] >= 64 else ("mma.sync",)
        kernels.append(
            ShippedKernel(
                "paged_attention",
                name,
                paged_attention_kernel,
                signature,
                constants,
                config["num_warps"],
                config["num_stages"],
                expects,
            )
        )
    signature = {
        "PARTS": "*fp32",
        "LSES": "*fp32",
        "OUT": "*bf16",
        "LSE": "*fp32",
        "heads": "i32",
        "splits": "i32",
    }
    signature |= dict.fromkeys(("p_p", "p_t", "p_h", "o_t", "o_h"), "i32:16") | {
        "l_p": "i32",
        "l_t": "i32",
    }
    constants = {"DV": 128, "BLOCK_V": 128, "BLOCK_P": 32}
    kernels.append(
        ShippedKernel(
            "paged_attention",
            "combine-128",
            paged_attention_combine_kernel,
            signature,
            constants,
            2,
            1,
        )
    )
    return kernels
