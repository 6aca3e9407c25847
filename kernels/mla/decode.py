"""`mla_decode`: absorbed queries against a paged cache of latents; checks, choice and launch.

The surrounding projections are the caller's: the query's up-projection is absorbed before, the
value's after.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from kernels import checks, runtime, tuning
from kernels.dispatch import Candidate, choose
from kernels.jit import UPCAST, cdiv, next_power_of_2
from kernels.mla.kernel import mla_decode_kernel
from kernels.mla.splits import choose_splits, combine_parts, mla_decode_combine_kernel
from kernels.paged_kv.page_plan import PagePlan, plan_pages
from kernels.paged_kv.reference import paged_attention
from kernels.paged_kv.torch_gather import gather_attention
from kernels.shipped import ShippedKernel


def mla_decode(
    q_nope: Tensor,
    q_rope: Tensor,
    latent_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    num_splits: int | None = None,
    return_lse: bool = False,
    plan: PagePlan | None = None,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(scale · (q_nope·c + q_rope·k))·c over each sequence's cached latents c and rotary
    keys k (eq. 41-47).

    q_nope `[B, H, R]` (or `[B, S, H, R]`: a sequence's last S tokens, causal) is the query already
    multiplied by the keys' up-projection; q_rope `[…, H, P]`; latent_cache `[blocks, block_size, R
    + P]`; block_table `[B, pages]` and seq_lens `[B]` as in `plan_pages`. scale is the model's,
    (nope + rope head dim) ** -0.5 with any further factors. Returns `[…, H, R]`, to be multiplied
    by the values' up-projection, and with `return_lse` the log-sum-exp `[…, H]` fp32. To write the
    cache, pass `write_kv` the two parts as one head each: `cache[..., :R].unsqueeze(2)` and `[...,
    R:]` likewise. Raises ValueError or TypeError.
    """
    plan = _check(q_nope, q_rope, latent_cache, block_table, seq_lens, scale, num_splits, plan)
    width, rotary = q_nope.shape[-1], q_rope.shape[-1]
    facts: dict[str, object] = {
        "dtype": q_nope.dtype,
        "heads": q_nope.shape[-2],
        "latent": width,
        "queries": "one" if plan.queries == 1 else "several",
        "device": q_nope.device.type,
    }
    wide = f"a latent of {width} and a rotary part of {rotary}; the kernel supports 512 and 128"
    own = runtime.why_not(q_nope) or (wide if width > 512 or rotary > 128 else None)
    lse_only = "does not return the log-sum-exp" if return_lse else None
    candidates = (Candidate("own", own), Candidate("torch", lse_only), Candidate("reference"))
    chosen = choose("mla_decode", facts, candidates, backend).backend
    q_THR, q_THP = q_nope.flatten(0, -3), q_rope.flatten(0, -3)
    if chosen == "own":
        out, lse = _launch(q_THR, q_THP, latent_cache, plan, scale, num_splits)
    else:
        q, keys = torch.cat((q_THR, q_THP), dim=-1), latent_cache.unsqueeze(2)
        if chosen == "torch":
            out = gather_attention(
                q,
                keys,
                None,
                plan,
                values=width,
                scale=scale,
                window=None,
                softcap=0.0,
                scales=None,
            )
            return out.view(q_nope.shape)
        exact, lse = paged_attention(
            q, keys, keys[..., :width], plan.table, plan.lens, plan.query_starts(), scale=scale
        )
        out, lse = exact.to(q.dtype), lse.float()
    out = out.view(q_nope.shape)
    return (out, lse.view(q_nope.shape[:-1])) if return_lse else out


def _check(
    q_nope: Tensor,
    q_rope: Tensor,
    latent_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    scale: float,
    num_splits: int | None,
    plan: PagePlan | None,
) -> PagePlan:
    checks.dtype_in("q_nope", q_nope, (*checks.FLOATS, torch.float64))
    checks.dims("q_nope", q_nope, 3, 4)
    checks.shape("q_rope", q_rope, (*q_nope.shape[:-1], None), "as q_nope, rotary width")
    width = q_nope.shape[-1] + q_rope.shape[-1]
    checks.shape(
        "latent_cache",
        latent_cache,
        (None, None, width),
        "blocks, block_size, latent + rotary width",
    )
    checks.same_dtype(q_nope=q_nope, q_rope=q_rope, latent_cache=latent_cache)
    checks.same_device(
        q_nope=q_nope,
        q_rope=q_rope,
        latent_cache=latent_cache,
        block_table=block_table,
        seq_lens=seq_lens,
    )
    for name, x in (("q_nope", q_nope), ("q_rope", q_rope), ("latent_cache", latent_cache)):
        checks.contiguous_last(name, x)
    checks.positive("scale", scale)
    checks.splits(num_splits)
    queries = q_nope.shape[1] if q_nope.dim() == 4 else 1
    blocks, page = latent_cache.shape[:2]
    if plan is None:
        plan = plan_pages(
            block_table, seq_lens, blocks=blocks, block_size=page, queries=max(1, queries)
        )
    elif plan.table is not block_table or plan.lens is not seq_lens or plan.cu is not None:
        raise ValueError(
            "plan was made from another block_table or seq_lens, or for cu_q; call plan_pages "
            "again."
        )
    else:
        plan.check_cache(blocks, page)
    if q_nope.shape[0] != block_table.shape[0] or plan.queries != queries:
        raise ValueError(
            f"q_nope has shape {tuple(q_nope.shape)}; {block_table.shape[0]} sequences of "
            f"{plan.queries} tokens each "
            f"require ({block_table.shape[0]}, {plan.queries}, heads, latent)."
        )
    return plan


@tuning.rule("mla_decode")
def _rule(arch: str, facts: dict[str, Any]) -> tuning.Config:
    if arch == "interpret":
        return {"BLOCK_M": 16, "BLOCK_N": 16, "num_warps": 4, "num_stages": 1}
    # exact products do not use tensor cores; their operands are in registers
    if facts["dtype"] == torch.float32:
        return {"BLOCK_M": 16, "BLOCK_N": 16, "num_warps": 8, "num_stages": 2}
    small = arch in ("sm_80", "sm_86", "sm_89")
    if int(facts["rows"]) > 32 and not small:  # wgmma requires 64 rows
        return {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 8, "num_stages": 2}
    return {"BLOCK_M": 16, "BLOCK_N": 32, "num_warps": 4, "num_stages": 2}


@tuning.candidates("mla_decode")
def _candidates(arch: str, facts: dict[str, Any]) -> list[tuning.Config]:
    choices = tuning.combinations(BLOCK_N=(32, 64, 16), num_warps=(4, 8), num_stages=(2, 1, 3))
    return tuning.changes(_rule(arch, facts), *choices)


def _launch(
    q: Tensor, q_rope: Tensor, cache: Tensor, plan: PagePlan, scale: float, num_splits: int | None
) -> tuple[Tensor, Tensor]:
    tokens, heads, width = q.shape
    rotary, sequences = q_rope.shape[2], plan.table.shape[0]
    out = torch.empty(tokens, heads, width, dtype=q.dtype, device=q.device)
    lse = torch.full((tokens, heads), float("-inf"), dtype=torch.float32, device=q.device)
    if not tokens or not heads:
        return out, lse
    rows = heads * plan.queries
    config = tuning.config("mla_decode", dtype=q.dtype, latent=width, rows=tuning.round_up(rows))
    programs = cdiv(rows, config["BLOCK_M"]) * sequences
    # a program fills a multiprocessor's shared memory: one each
    splits = num_splits or choose_splits(2 * programs, plan.longest, runtime.sm_count(q.device))
    parts, part_lses = out.unsqueeze(0), lse.unsqueeze(0)
    if splits > 1:
        parts = torch.empty(splits, tokens, heads, width, dtype=torch.float32, device=q.device)
        part_lses = torch.empty(splits, tokens, heads, dtype=torch.float32, device=q.device)
    with runtime.device_guard(q):
        mla_decode_kernel[(programs * splits,)](
            q,
            q_rope,
            cache,
            parts,
            part_lses,
            plan.table,
            plan.lens,
            scale * math.log2(math.e),
            plan.queries,
            heads,
            splits,
            *q.stride()[:2],
            *q_rope.stride()[:2],
            *cache.stride()[:2],
            *parts.stride()[:3],
            *part_lses.stride()[:2],
            plan.table.stride(0),
            R=width,
            P=rotary,
            PAGE=plan.page,
            BLOCK_R=max(16, next_power_of_2(width)),
            BLOCK_P=max(16, next_power_of_2(rotary)),
            UPCAST=UPCAST,
            **config,
        )
        if splits > 1:
            combine_parts(parts, part_lses, out, lse, num_warps=4)
    return out, lse


def shipped(arch: str) -> list[ShippedKernel]:
    """DeepSeek's latent of 512 and rotary part of 64: with 16 heads (a shard) and with 128; and the
    combine kernel.
    """
    kernels = []
    for heads in (16, 128):
        config = _rule(arch, {"dtype": None, "rows": heads})
        signature = dict.fromkeys(("Q", "QR", "C"), "*bf16") | {"OUT": "*fp32", "LSE": "*fp32"}
        signature |= {"TABLE": "*i32", "LENS": "*i32", "scale": "fp32"}
        signature |= dict.fromkeys(("queries", "heads", "splits", "l_p", "l_t", "table_b"), "i32")
        signature |= dict.fromkeys(
            ("q_t", "q_h", "r_t", "r_h", "c_b", "c_s", "o_p", "o_t", "o_h"), "i32:16"
        )
        constants = {"R": 512, "P": 64, "PAGE": 64, "BLOCK_R": 512, "BLOCK_P": 64, "UPCAST": False}
        constants |= {"BLOCK_M": config["BLOCK_M"], "BLOCK_N": config["BLOCK_N"]}
        wide = config["BLOCK_M"] >= 64
        kernels.append(
            ShippedKernel(
                "mla_decode",
                f"heads-{heads}",
                mla_decode_kernel,
                signature,
                constants,
                config["num_warps"],
                config["num_stages"],
                ("wgmma",) if wide else ("mma.sync",),
                "32 bytes once per program, after the loop, for the stores of rows"
                if wide
                else None,
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
    constants = {"DV": 512, "BLOCK_V": 512, "BLOCK_P": 16}
    kernels.append(
        ShippedKernel(
            "mla_decode", "combine-512", mla_decode_combine_kernel, signature, constants, 4, 1
        )
    )
    return kernels
