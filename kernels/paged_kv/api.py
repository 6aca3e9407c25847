"""`paged_attention`: queries against keys and values in blocks of a cache.

Decode, chunked prefill and verification of drafts are one operation: a sequence's query tokens are
the last ones of its length (causal, aligned bottom right).
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels import checks, runtime
from kernels.dispatch import Candidate, cache_choice, cached_choice, call_key, choose
from kernels.paged_kv.launch import launch
from kernels.paged_kv.page_plan import PagePlan, plan_pages
from kernels.paged_kv.reference import paged_attention as reference
from kernels.paged_kv.torch_gather import gather_attention

MAX_PROGRAMS = 65_536
QUANTIZED_DTYPES = (torch.int8, torch.float8_e4m3fn)


def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    *,
    scale: float | None = None,
    num_programs: int | None = None,
    window: int | None = None,
    softcap: float = 0.0,
    cu_q: Tensor | None = None,
    max_q: int | None = None,
    scales: tuple[Tensor, Tensor] | None = None,
    return_lse: bool = False,
    plan: PagePlan | None = None,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(scale · q·Kᵀ)·V over each sequence's cached tokens, in q's dtype and shape (last dim:
    the values').

    q: `[B, H, D]` one token per sequence, `[B, S, H, D]` S tokens each, or `[T, H, D]` with `cu_q`
    [B + 1] ragged (a mixed batch of chunks and decodes). k_cache, v_cache: `[blocks, block_size,
    kv_heads, D]`; kv_heads divides H. block_table `[B, pages]` and seq_lens `[B]`: see
    `plan_pages`; lengths include this step's tokens, whose keys are already written. A query at
    position i sees keys j <= i, and with a window i - window < j. Sequences of length 0 return
    zeros. scale defaults to D ** -0.5. softcap c > 0: c · tanh(scores / c). scales: for an int8 or
    e4m3 cache, two `[blocks, block_size, kv_heads]` fp32, as written by `write_kv`. num_programs:
    programs that share the work on a GPU, chosen if None. return_lse: also returns the natural
    log-sum-exp `[…, H]` fp32. plan: from `plan_pages` of the same table and lengths; without it
    every call checks the addresses, which synchronizes with a GPU. Raises ValueError or TypeError.
    """
    key = None
    if plan is not None and backend is None:
        tensors = (q, k_cache, v_cache, *(scales or ()))
        numbers = (plan.queries, plan.tokens, plan.page, plan.blocks, len(plan.lens))
        options = (scale, num_programs, window, softcap, return_lse, plan.cu is None)
        key = call_key("paged_attention", tensors, *options, *numbers, strides=True)
    chosen = cached_choice(key)
    if chosen is None or plan is None:
        plan, scale = _check_tensors(
            q, k_cache, v_cache, block_table, seq_lens, scale, cu_q, max_q, plan
        )
        _check_options(q, k_cache, v_cache, num_programs, window, softcap, scales)
        chosen = _choose(q, k_cache, plan, return_lse, backend)
        cache_choice(key, chosen)
    else:
        plan.check_tensors(block_table, seq_lens, cu_q)
        scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    q_THD = q.reshape(-1, *q.shape[-2:])
    if chosen == "own":
        out, lse = launch(
            q_THD,
            k_cache,
            v_cache,
            plan,
            scale=scale,
            window=window,
            softcap=softcap,
            scales=scales,
            num_programs=num_programs,
            return_lse=return_lse,
        )
    elif chosen == "torch":
        out = gather_attention(
            q_THD,
            k_cache,
            v_cache,
            plan,
            values=v_cache.shape[3],
            scale=scale,
            window=window,
            softcap=softcap,
            scales=scales,
        )
        return out.view(*q.shape[:-1], v_cache.shape[3])
    else:
        wide, exact_lse = reference(
            q_THD,
            k_cache,
            v_cache,
            plan.table,
            plan.lens,
            plan.query_starts(),
            scale=scale,
            window=window,
            softcap=softcap,
            scales=scales,
        )
        out, lse = wide.to(q.dtype), exact_lse.float()
    out = out.view(*q.shape[:-1], v_cache.shape[3])
    return (out, lse.view(q.shape[:-1])) if return_lse and lse is not None else out


def _choose(
    q: Tensor, k_cache: Tensor, plan: PagePlan, return_lse: bool, backend: str | None
) -> str:
    facts: dict[str, object] = {
        "dtype": q.dtype,
        "cache": k_cache.dtype,
        "head_dim": q.shape[-1],
        "group": q.shape[-2] // k_cache.shape[2],
        "queries": "one" if plan.queries == 1 else "several",
        "device": q.device.type,
    }
    lse_only = "does not return the log-sum-exp" if return_lse else None
    own = runtime.why_not(q) or _kernel_why_not(q, k_cache)
    candidates = (Candidate("own", own), Candidate("torch", lse_only), Candidate("reference"))
    return choose("paged_attention", facts, candidates, backend).backend


def _kernel_why_not(q: Tensor, k_cache: Tensor) -> str | None:
    if max(q.shape[-1], k_cache.shape[-1]) > 256:
        return "a head dim above 256"
    if k_cache.dtype == torch.float8_e4m3fn and runtime.arch(q.device) in (
        "sm_75",
        "sm_80",
        "sm_86",
    ):
        return f"no e4m3 on {runtime.arch(q.device)}"
    return None


def _check_tensors(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    scale: float | None,
    cu_q: Tensor | None,
    max_q: int | None,
    plan: PagePlan | None,
) -> tuple[PagePlan, float]:
    checks.dtype_in("q", q, (*checks.FLOATS, torch.float64))
    checks.dims("q", q, 3, 4)
    checks.dims("k_cache", k_cache, 4)
    checks.dims("v_cache", v_cache, 4)
    checks.shape(
        "v_cache",
        v_cache,
        (*k_cache.shape[:3], None),
        "blocks, block_size, kv_heads of k_cache, any",
    )
    checks.same_device(
        q=q, k_cache=k_cache, v_cache=v_cache, block_table=block_table, seq_lens=seq_lens
    )
    checks.contiguous_last("q", q)
    checks.contiguous_last("k_cache", k_cache)
    checks.contiguous_last("v_cache", v_cache)
    checks.non_empty("v_cache", v_cache, 3)
    heads, width = q.shape[-2:]
    if k_cache.shape[3] != width:
        raise ValueError(
            f"q has head dim {width} and k_cache {k_cache.shape[3]}; they must be equal."
        )
    if k_cache.shape[2] < 1 or heads < 1 or heads % k_cache.shape[2]:
        raise ValueError(
            f"q has {heads} heads and the cache {k_cache.shape[2]}; the cache's must divide q's."
        )
    if cu_q is not None and q.dim() != 3:
        raise ValueError(
            f"with cu_q, q must be [tokens, heads, head_dim]; it has shape {tuple(q.shape)}."
        )
    queries = q.shape[1] if q.dim() == 4 else 1
    if plan is None:
        plan = plan_pages(
            block_table,
            seq_lens,
            blocks=k_cache.shape[0],
            block_size=k_cache.shape[1],
            queries=max(queries, 1),
            cu_q=cu_q,
            max_q=max_q,
        )
    else:
        plan.check_tensors(block_table, seq_lens, cu_q)
        plan.check_cache(k_cache.shape[0], k_cache.shape[1])
    tokens = q.shape[0] if q.dim() == 3 else q.shape[0] * q.shape[1]
    if plan.cu is None and (
        q.shape[0] != block_table.shape[0] or (plan.queries != queries and tokens)
    ):
        raise ValueError(
            f"q has shape {tuple(q.shape)}; {block_table.shape[0]} sequences of {plan.queries} "
            "tokens each require "
            f"({block_table.shape[0]}, {plan.queries}, heads, head_dim)."
        )
    if plan.cu is not None and plan.tokens not in (-1, tokens):
        raise ValueError(f"cu_q ends at {plan.tokens} and q has {tokens} tokens.")
    if scale is None:
        scale = width**-0.5
    checks.positive("scale", scale)
    return plan, float(scale)


def _check_options(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    num_programs: int | None,
    window: int | None,
    softcap: float,
    scales: tuple[Tensor, Tensor] | None,
) -> None:
    checks.window(window)
    checks.softcap(softcap)
    if num_programs is not None:
        checks.integer("num_programs", num_programs, 1, MAX_PROGRAMS)
    if scales is None:
        checks.same_dtype(q=q, k_cache=k_cache, v_cache=v_cache)
        return
    checks.dtype_in("k_cache", k_cache, QUANTIZED_DTYPES)
    checks.same_dtype(k_cache=k_cache, v_cache=v_cache)
    checks.pair("scales", scales)
    for name, x in zip(("scales[0]", "scales[1]"), scales, strict=True):
        checks.dtype_in(name, x, (torch.float32,))
        checks.shape(name, x, tuple(k_cache.shape[:3]), "blocks, block_size, kv_heads")
        checks.contiguous_last(name, x)
        checks.same_device(q=q, **{name: x})
    if scales[0].stride() != scales[1].stride():
        raise ValueError(
            "the two scales must have the same strides; allocate them in the same way."
        )
