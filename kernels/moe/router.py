"""`moe_gate`: scores of the experts, the best groups, the best experts within them and their
weights, in one pass.

The gradient flows through the chosen weights only.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernels import checks, runtime
from kernels.dispatch import Candidate, choose
from kernels.jit import jit, next_power_of_2, tl
from kernels.moe import reference
from kernels.moe.reference import GateOptions
from kernels.operators import call_as_operator
from kernels.shipped import ShippedKernel

SCORINGS = ("softmax", "sigmoid")
MAX_EXPERTS = 1024


def moe_gate(
    logits: Tensor,
    top_k: int,
    *,
    scoring: str = "softmax",
    bias: Tensor | None = None,
    groups: int = 1,
    top_k_groups: int | None = None,
    renormalise: bool = False,
    scale: float = 1.0,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Weights `[T, K]` fp32 and experts `[T, K]` int64, best first, of logits `[T, E]`.

    scoring: "softmax" over the experts or "sigmoid" of each. bias `[E]` is added to the scores for
    the choice only (DeepSeek-V3, arXiv 2412.19437, eq. 16). groups: number of equal groups of
    adjacent experts; experts are chosen from the `top_k_groups` best groups (all by default),
    ranked by their best expert, or under sigmoid by the sum of their best two (section 2.1.2 there;
    arXiv 2405.04434, section 2.2.2). renormalise: weights of a token sum to one, before `scale`.
    Ties are broken arbitrarily. Raises ValueError or TypeError.
    """
    checks.dtype_in("logits", logits, (*checks.FLOATS, torch.float64))
    checks.dims("logits", logits, 2)
    experts = logits.shape[1]
    checks.one_of("scoring", scoring, SCORINGS)
    checks.integer("top_k", top_k, 1, experts)
    checks.integer("groups", groups)
    if top_k_groups is not None:
        checks.integer("top_k_groups", top_k_groups, 1, groups)
    if bias is not None:
        checks.dtype_in("bias", bias)
        checks.shape("bias", bias, (experts,), "experts")
        checks.same_device(logits=logits, bias=bias)
    checks.positive("scale", scale)
    options = GateOptions(
        top_k,
        scoring,
        groups,
        groups if top_k_groups is None else top_k_groups,
        renormalise,
        float(scale),
    )
    _check_groups(options, experts)
    facts: dict[str, object] = {
        "experts": experts,
        "top_k": top_k,
        "scoring": scoring,
        "device": logits.device.type,
    }
    if groups > 1:
        facts["groups"] = groups
    too_many = (
        f"{experts} experts; the kernel supports {MAX_EXPERTS}" if experts > MAX_EXPERTS else None
    )
    double = "fp64" if logits.dtype == torch.float64 else None
    candidates = (
        Candidate("own", runtime.why_not(logits) or too_many or double),
        Candidate("reference"),
    )
    if choose("moe_gate", facts, candidates, backend).backend == "reference":
        return reference.gate(logits, options, bias)
    result: tuple[Tensor, Tensor] = _Gate.apply(logits, bias, options)  # type: ignore[no-untyped-call]
    return result


def _check_groups(options: GateOptions, experts: int) -> None:
    if experts % options.groups:
        raise ValueError(f"groups is {options.groups}; it must divide the {experts} experts.")
    available = options.top_k_groups * experts // options.groups
    if options.top_k > available:
        raise ValueError(
            f"top_k is {options.top_k}; {options.top_k_groups} of {options.groups} groups contain "
            f"{available} experts."
        )


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, bias: Tensor | None, options: GateOptions
    ) -> tuple[Tensor, Tensor]:
        weights, chosen = call_as_operator(
            "moe_gate", (logits, bias), lambda: _launch(logits, bias, options)
        )
        ctx.save_for_backward(logits, chosen)
        ctx.options = options
        ctx.mark_non_differentiable(chosen)
        return weights, chosen

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        logits, chosen = ctx.saved_tensors
        with torch.enable_grad():  # few numbers per token: torch's formula suffices
            leaf = logits.detach().requires_grad_()
            weights = reference.compute_weights(
                reference.compute_scores(leaf, ctx.options.scoring), chosen, ctx.options
            )
        return torch.autograd.grad(weights, leaf, gradients[0])[0], None, None


def _launch(logits: Tensor, bias: Tensor | None, options: GateOptions) -> list[Tensor]:
    tokens, experts = logits.shape
    weights = torch.empty(tokens, options.top_k, dtype=torch.float32, device=logits.device)
    chosen = torch.empty(tokens, options.top_k, dtype=torch.int64, device=logits.device)
    block_t = 4 if runtime.INTERPRET else max(1, 512 // next_power_of_2(experts))
    best = 2 if options.scoring == "sigmoid" and experts > options.groups else 1
    if tokens:
        with runtime.device_guard(logits):
            moe_gate_kernel[(-(-tokens // block_t),)](
                logits,
                None if bias is None else bias.contiguous(),
                weights,
                chosen,
                tokens,
                experts,
                options.scale,
                *logits.stride(),
                K=options.top_k,
                BLOCK_T=block_t,
                BLOCK_E=next_power_of_2(experts),
                SIGMOID=options.scoring == "sigmoid",
                BIASED=bias is not None,
                RENORMALISE=options.renormalise,
                GROUPS=options.groups,
                TOP_K_GROUPS=options.top_k_groups,
                BEST=best,
                BLOCK_G=next_power_of_2(options.groups),
            )
    return [weights, chosen]


@jit
def moe_gate_kernel(
    LOGITS,
    BIAS,
    WEIGHTS,
    CHOSEN,
    tokens,
    experts,
    scale,
    l_t,
    l_e,
    K: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    SIGMOID: tl.constexpr,
    BIASED: tl.constexpr,
    RENORMALISE: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_K_GROUPS: tl.constexpr,
    BEST: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    """BLOCK_T tokens: the TOP_K_GROUPS best groups, by their BEST best experts; then K experts."""
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    e = tl.arange(0, BLOCK_E)
    inside = (t < tokens)[:, None] & (e < experts)[None, :]
    at = LOGITS + t.to(tl.int64)[:, None] * l_t + e[None, :] * l_e
    x = tl.load(at, mask=inside, other=float("-inf")).to(tl.float32)
    x = tl.where(t[:, None] < tokens, x, 0.0)
    if SIGMOID:
        scores = 1.0 / (1.0 + tl.exp2(x * -1.4426950408889634))
    else:
        p = tl.exp2((x - tl.max(x, 1)[:, None]) * 1.4426950408889634)
        scores = p / tl.sum(p, 1)[:, None]
    ranking = scores
    if BIASED:
        ranking = scores + tl.load(BIAS + e, mask=e < experts, other=0.0).to(tl.float32)[None, :]
    ranking = tl.where((e < experts)[None, :], ranking, float("-inf"))
    if TOP_K_GROUPS < GROUPS:
        group = e // (experts // GROUPS)
        g = tl.arange(0, BLOCK_G)
        group_scores = tl.full([BLOCK_T, BLOCK_G], float("-inf"), tl.float32)
        for i in tl.static_range(GROUPS):
            within = tl.where((group == i)[None, :], ranking, float("-inf"))
            value = tl.max(within, 1)
            if BEST == 2:
                first = e[None, :] == tl.argmax(within, 1)[:, None]
                value += tl.max(tl.where(first, float("-inf"), within), 1)
            group_scores = tl.where((g == i)[None, :], value[:, None], group_scores)
        chosen_groups = tl.zeros([BLOCK_T, BLOCK_E], tl.int32)
        for _ in tl.static_range(TOP_K_GROUPS):
            best = tl.argmax(group_scores, 1)
            chosen_groups = tl.where(group[None, :] == best[:, None], 1, chosen_groups)
            group_scores = tl.where(g[None, :] == best[:, None], float("-inf"), group_scores)
        ranking = tl.where(chosen_groups > 0, ranking, float("-inf"))
    total = tl.zeros([BLOCK_T], tl.float32)
    for k in tl.static_range(K):
        # NaN scores may give an index past the last
        best = tl.minimum(tl.argmax(ranking, 1), experts - 1)
        is_best = e[None, :] == best[:, None]
        weight = tl.sum(tl.where(is_best, scores, 0.0), 1)
        total += weight
        tl.store(WEIGHTS + t.to(tl.int64) * K + k, weight * scale, mask=t < tokens)
        tl.store(CHOSEN + t.to(tl.int64) * K + k, best.to(tl.int64), mask=t < tokens)
        ranking = tl.where(is_best, float("-inf"), ranking)
    if RENORMALISE:
        tl.debug_barrier()
        for k in tl.static_range(K):
            weight = tl.load(WEIGHTS + t.to(tl.int64) * K + k, mask=t < tokens, other=0.0)
            tl.store(WEIGHTS + t.to(tl.int64) * K + k, weight / (total + 1e-20), mask=t < tokens)


def shipped(arch: str) -> list[ShippedKernel]:
    """8 of 256 by sigmoid with a bias, from 4 of 8 groups; 2 of 8 by softmax."""
    kernels = []
    for top_k, experts, sigmoid in ((8, 256, True), (2, 8, False)):
        groups = 8 if sigmoid else 1
        signature = {
            "LOGITS": "*fp32",
            "WEIGHTS": "*fp32",
            "CHOSEN": "*i64",
            "tokens": "i32",
            "experts": "i32",
        }
        signature |= {"scale": "fp32", "l_t": "i32", "l_e": "i32"}
        constants: dict[str, Any] = {"K": top_k, "BLOCK_T": 512 // experts, "BLOCK_E": experts}
        constants |= {"SIGMOID": sigmoid, "BIASED": sigmoid, "RENORMALISE": True}
        constants |= {
            "GROUPS": groups,
            "TOP_K_GROUPS": max(1, groups // 2),
            "BEST": 1 + sigmoid,
            "BLOCK_G": groups,
        }
        if sigmoid:
            signature["BIAS"] = "*fp32"
        else:
            constants["BIAS"] = None
        kernels.append(
            ShippedKernel(
                "moe_gate", f"{top_k}-of-{experts}", moe_gate_kernel, signature, constants
            )
        )
    return kernels
