"""Launch of paged attention: programs, tiles, memory of partial results; shipped configurations."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from kernels import runtime, tuning
from kernels.jit import UPCAST, cdiv, next_power_of_2
from kernels.paged_kv.kernel import paged_attention_kernel, paged_attention_merge_kernel
from kernels.paged_kv.page_plan import PagePlan
from kernels.paged_kv.work_partition import MIN_KEYS, Rows, launches, work_table
from kernels.shipped import ShippedKernel

FEW_ROWS = 16
"""Query rows of a sequence that fill one small tile: decodes and short verifications."""

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


@tuning.candidates("paged_attention")
def _candidates(arch: str, facts: dict[str, Any]) -> list[tuning.Config]:
    if facts["dtype"] == torch.float32:
        choices = tuning.combinations(BLOCK_N=(16, 32), num_warps=(4, 8), num_stages=(1, 2))
    else:
        choices = tuning.combinations(BLOCK_N=(64, 128, 32), num_warps=(4, 8), num_stages=(3, 5, 2))
    return tuning.changes(_rule(arch, facts), *choices)


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
    num_programs: int | None,
    return_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    """Output `[T, H, Dv]` and, if it is wanted, log-sum-exp `[T, H]` fp32."""
    tokens, heads, _ = q_THD.shape
    values = v_cache.shape[3]
    # ragged: query tokens that belong to no sequence stay zero
    make = torch.zeros if plan.cu is not None else torch.empty
    out = make(tokens, heads, values, dtype=q_THD.dtype, device=q_THD.device)
    lse = None
    if return_lse:
        lse = torch.full((tokens, heads), float("-inf"), dtype=torch.float32, device=q_THD.device)
    if tokens and len(plan.lens) and plan.queries:
        with runtime.device_guard(q_THD):
            for rows in launches(plan, heads // k_cache.shape[2], FEW_ROWS):
                _launch_rows(
                    q_THD,
                    k_cache,
                    v_cache,
                    out,
                    lse,
                    plan,
                    rows,
                    scale=scale,
                    window=window,
                    softcap=softcap,
                    scales=scales,
                    num_programs=num_programs,
                )
    return out, lse


def _launch_rows(
    q_THD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    out: Tensor,
    lse: Tensor | None,
    plan: PagePlan,
    rows: Rows,
    *,
    scale: float,
    window: int | None,
    softcap: float,
    scales: tuple[Tensor, Tensor] | None,
    num_programs: int | None,
) -> None:
    """Attention of the sequences of `rows`: their shares, then the items in parts."""
    width, kv_heads, values = q_THD.shape[2], k_cache.shape[2], v_cache.shape[3]
    config = tuning.config(
        "paged_attention",
        dtype=q_THD.dtype,
        head_dim=max(width, values),
        rows=tuning.round_up(rows.up_to),
    )
    block_m, block_n = config["BLOCK_M"], config["BLOCK_N"]
    work = work_table(plan, rows, block_m=block_m, block_n=block_n, window=window)
    min_blocks = 1 if num_programs else cdiv(MIN_KEYS, block_n)
    programs = num_programs or count_programs(
        work.most_blocks * kv_heads, min_blocks, runtime.sm_count(q_THD.device)
    )
    block_v = max(16, next_power_of_2(values))
    parts = torch.empty(2 * programs, block_m, block_v, dtype=torch.float32, device=out.device)
    part_lses = torch.empty(2 * programs, block_m, dtype=torch.float32, device=out.device)
    # With a cap the exponent of tanh's exp2 contains 2 · log2(e) / cap, and the cap log2(e): one
    # product each.
    score_scale = scale * LOG2_E if not softcap else 2.0 * LOG2_E * scale / softcap
    k_scales, v_scales = scales if scales is not None else (None, None)
    lse_stride = 0 if lse is None else lse.stride(0)
    paged_attention_kernel[(programs,)](
        q_THD,
        k_cache,
        v_cache,
        out,
        lse,
        parts,
        part_lses,
        work.sequences,
        work.tiles,
        work.ends,
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
        work.items,
        min_blocks,
        plan.capacity,
        max(plan.blocks - 1, 0),
        *q_THD.stride()[:2],
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        *out.stride()[:2],
        lse_stride,
        plan.table.stride(0),
        *(k_scales.stride()[:2] if k_scales is not None else (0, 0)),
        GROUP=rows.group,
        D=width,
        DV=values,
        PAGE=plan.page,
        BLOCK_D=max(16, next_power_of_2(width)),
        BLOCK_V=block_v,
        RAGGED=plan.cu is not None,
        WINDOWED=window is not None,
        CAPPED=bool(softcap),
        QUANTIZED=scales is not None,
        RETURN_LSE=lse is not None,
        UPCAST=UPCAST,
        **config,
    )
    if programs == 1:
        return
    paged_attention_merge_kernel[(work.items * kv_heads,)](
        parts,
        part_lses,
        out,
        lse,
        work.sequences,
        work.tiles,
        work.ends,
        plan.cu,
        plan.queries,
        kv_heads,
        work.items,
        min_blocks,
        programs,
        *out.stride()[:2],
        lse_stride,
        GROUP=rows.group,
        DV=values,
        BLOCK_M=block_m,
        BLOCK_V=block_v,
        RAGGED=plan.cu is not None,
        RETURN_LSE=lse is not None,
        num_warps=2 if block_m <= 16 else 4,
    )


def count_programs(most_blocks: int, min_blocks: int, sm_count: int) -> int:
    """Two programs per multiprocessor, fewer if each would have less than `min_blocks` blocks."""
    return max(1, min(2 * sm_count, cdiv(most_blocks, min_blocks)))


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
        quantized = kind == "*i8"
        signature = {"Q": "*bf16", "K": kind, "V": kind, "OUT": "*bf16"}
        signature |= dict.fromkeys(("PARTS", "PART_LSES"), "*fp32")
        signature |= dict.fromkeys(("SEQUENCES", "TILES", "ENDS", "TABLE", "LENS", "CU"), "*i32")
        signature |= {"scale": "fp32", "softcap": "fp32"}
        counts = ("window", "queries", "kv_heads", "items", "min_blocks", "capacity", "last_block")
        signature |= dict.fromkeys((*counts, "l_t", "table_b", "s_b", "s_s"), "i32")
        strides = ("q_t", "q_h", "k_b", "k_s", "k_h", "v_b", "v_s", "v_h", "o_t", "o_h")
        signature |= dict.fromkeys(strides, "i32:16")
        constants: dict[str, Any] = {
            "LSE": None,
            "GROUP": group,
            "D": width,
            "DV": width,
            "PAGE": 16,
            "BLOCK_D": width,
            "BLOCK_V": width,
            "RAGGED": queries > 1,
            "WINDOWED": False,
            "CAPPED": False,
            "QUANTIZED": quantized,
            "RETURN_LSE": False,
            "UPCAST": False,
            "BLOCK_M": config["BLOCK_M"],
            "BLOCK_N": config["BLOCK_N"],
        }
        if quantized:
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
    for name, block_m, ragged in (("merge-decode", 16, False), ("merge-mixed", 64, True)):
        signature = {"PARTS": "*fp32", "PART_LSES": "*fp32", "OUT": "*bf16"}
        signature |= dict.fromkeys(("SEQUENCES", "TILES", "ENDS", "CU"), "*i32")
        numbers = ("queries", "kv_heads", "items", "min_blocks", "programs", "l_t")
        signature |= dict.fromkeys(numbers, "i32") | dict.fromkeys(("o_t", "o_h"), "i32:16")
        constants = {"LSE": None, "GROUP": 4, "DV": 128, "BLOCK_M": block_m, "BLOCK_V": 128}
        constants |= {"RAGGED": ragged, "RETURN_LSE": False}
        kernels.append(
            ShippedKernel(
                "paged_attention",
                name,
                paged_attention_merge_kernel,
                signature,
                constants,
                2 if block_m <= 16 else 4,
                1,
            )
        )
    return kernels
