"""`moe_gate`: scores of the experts, the best of them, their weights, in one pass over a token's logits.

Knows no expert and no balance. The gradient goes through the chosen weights alone.
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
from kernels.shipped import Shipped

SCORINGS = ("softmax", "sigmoid")
MOST_EXPERTS = 1024


def moe_gate(
    logits: Tensor,
    top_k: int,
    *,
    scoring: str = "softmax",
    bias: Tensor | None = None,
    renormalise: bool = False,
    scale: float = 1.0,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Weights `[T, K]` fp32 and experts `[T, K]` int64, best first, of logits `[T, E]`.

    scoring: "softmax" over the experts or "sigmoid" of each. bias `[E]` is added to the scores for the choice alone
    (DeepSeek-V3, arXiv 2412.19437, eq. 16). renormalise: a token's weights sum to one, before `scale`. Of equal scores
    an expert's is not told which. Raises ValueError or TypeError.
    """
    checks.dtype_among("logits", logits, (*checks.FLOATS, torch.float64))
    checks.dims("logits", logits, 2)
    experts = logits.shape[1]
    checks.among("scoring", scoring, SCORINGS)
    if not 1 <= top_k <= experts:
        raise ValueError(f"top_k is {top_k}; it must lie in 1 to {experts}, the number of experts.")
    if bias is not None:
        checks.dtype_among("bias", bias)
        checks.shape("bias", bias, (experts,), "experts")
        checks.same_device(logits=logits, bias=bias)
    checks.positive("scale", scale)
    facts: dict[str, object] = {"experts": experts, "top_k": top_k, "scoring": scoring, "device": logits.device.type}
    many = f"{experts} experts; the kernel holds {MOST_EXPERTS}" if experts > MOST_EXPERTS else None
    double = "fp64" if logits.dtype == torch.float64 else None
    candidates = (Candidate("own", runtime.cannot(logits) or many or double), Candidate("reference"))
    if choose("moe_gate", facts, candidates, backend).backend == "reference":
        return reference.gate(logits, top_k, scoring, bias, renormalise, scale)
    found: tuple[Tensor, Tensor] = _Gate.apply(logits, top_k, scoring, bias, renormalise, scale)  # type: ignore[no-untyped-call]
    return found


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, top_k: int, scoring: str, bias: Tensor | None, renormalise: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        tokens, experts = logits.shape
        weights = torch.empty(tokens, top_k, dtype=torch.float32, device=logits.device)
        chosen = torch.empty(tokens, top_k, dtype=torch.int64, device=logits.device)
        block_t = 4 if runtime.INTERPRET else max(1, 512 // next_power_of_2(experts))
        if tokens:
            with runtime.on(logits):
                gate[(-(-tokens // block_t),)](
                    logits, None if bias is None else bias.contiguous(), weights, chosen, tokens, experts, scale,
                    *logits.stride(), K=top_k, BLOCK_T=block_t, BLOCK_E=next_power_of_2(experts),
                    SIGMOID=scoring == "sigmoid", BIASED=bias is not None, RENORMALISE=renormalise,
                )  # fmt: skip
        ctx.save_for_backward(logits, chosen)
        ctx.how = scoring, renormalise, scale
        ctx.mark_non_differentiable(chosen)
        return weights, chosen

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        logits, chosen = ctx.saved_tensors
        scoring, renormalise, scale = ctx.how
        with torch.enable_grad():  # a few numbers a token: torch's own formula is enough
            again = logits.detach().requires_grad_()
            weights = reference.weights_of(reference.scores_of(again, scoring), chosen, renormalise, scale)
        return torch.autograd.grad(weights, again, gradients[0])[0], None, None, None, None, None


@jit
def gate(
    LOGITS, BIAS, WEIGHTS, CHOSEN, tokens, experts, scale, l_t, l_e,
    K: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr,
    SIGMOID: tl.constexpr, BIASED: tl.constexpr, RENORMALISE: tl.constexpr,
):  # fmt: skip
    """BLOCK_T tokens; the best expert is taken K times."""
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
    wanted = scores
    if BIASED:
        wanted = scores + tl.load(BIAS + e, mask=e < experts, other=0.0).to(tl.float32)[None, :]
    wanted = tl.where((e < experts)[None, :], wanted, float("-inf"))
    total = tl.zeros([BLOCK_T], tl.float32)
    for k in tl.static_range(K):
        best = tl.argmax(wanted, 1)
        mine = e[None, :] == best[:, None]
        weight = tl.sum(tl.where(mine, scores, 0.0), 1)
        total += weight
        tl.store(WEIGHTS + t.to(tl.int64) * K + k, weight * scale, mask=t < tokens)
        tl.store(CHOSEN + t.to(tl.int64) * K + k, best.to(tl.int64), mask=t < tokens)
        wanted = tl.where(mine, float("-inf"), wanted)
    if RENORMALISE:
        tl.debug_barrier()
        for k in tl.static_range(K):
            weight = tl.load(WEIGHTS + t.to(tl.int64) * K + k, mask=t < tokens, other=0.0)
            tl.store(WEIGHTS + t.to(tl.int64) * K + k, weight / (total + 1e-20), mask=t < tokens)


def shipped(arch: str) -> list[Shipped]:
    """8 of 256 by sigmoid with a bias, 2 of 8 by softmax."""
    found = []
    for top_k, experts, sigmoid in ((8, 256, True), (2, 8, False)):
        signature = {"LOGITS": "*fp32", "WEIGHTS": "*fp32", "CHOSEN": "*i64", "tokens": "i32", "experts": "i32"}
        signature |= {"scale": "fp32", "l_t": "i32", "l_e": "i32"}
        constants: dict[str, Any] = {"K": top_k, "BLOCK_T": 512 // experts, "BLOCK_E": experts}
        constants |= {"SIGMOID": sigmoid, "BIASED": sigmoid, "RENORMALISE": True}
        if sigmoid:
            signature["BIAS"] = "*fp32"
        else:
            constants["BIAS"] = None
        found.append(Shipped("moe_gate", f"{top_k}-of-{experts}", gate, signature, constants))
    return found
