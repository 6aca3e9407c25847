"""The operations of a block that kernels do better than torch: chosen by what can run here, or
plain torch.

Modules have a class attribute `operations`, settable by instance. What is chosen, and why,
`kernels.explain` tells.
Does not know modules. Shapes: `[..., N]` unless named.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

import kernels
from kernels import runtime
from kernels.dispatch import Candidate, cache_choice, cached_choice, choose, record_choice
from workers.contracts.specs.model import Moe
from workers.models.layers.attention_math import attend, plain_attend
from workers.models.layers.rope import apply_rope

if TYPE_CHECKING:
    from kernels.moe import Permutation

Activation = Callable[[Tensor], Tensor]
_COMPILED = "torch.compile makes kernels of its own of it"


class Chosen:
    """By `kernels` where it has what runs on the tensors' device, else torch's own operator."""

    attend = staticmethod(attend)

    @staticmethod
    def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Root mean square norm over the last dimension (arXiv 1910.07467, eq. 4)."""
        if _is_torchs("rms_norm", x, weight):
            return functional.rms_norm(x, (x.shape[-1],), weight, eps)
        found = kernels.rms_norm(x, weight, eps)
        assert isinstance(found, Tensor)
        return found

    @staticmethod
    def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        """Layer norm over the last dimension (arXiv 1607.06450, eq. 4)."""
        if _is_torchs("layer_norm", x, weight, bias):
            return functional.layer_norm(x, (x.shape[-1],), weight, bias, eps)
        return kernels.layer_norm(x, weight, bias, eps)

    @staticmethod
    def rotate(
        q: Tensor, k: Tensor, rope: tuple[Tensor, Tensor], interleaved: bool
    ) -> tuple[Tensor, Tensor]:
        """Queries and keys `[B, S, H, D]`, each with its own number of heads, turned by their
        positions' angles.
        """
        if _is_torchs("apply_rope", q, k, *rope):
            return apply_rope(q, *rope, interleaved), apply_rope(k, *rope, interleaved)
        found = kernels.apply_rope(q, k, *rope, interleaved=interleaved)
        assert isinstance(found, tuple)
        return found

    @staticmethod
    def gated(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
        """`activation(gate) * up` (arXiv 2002.05202)."""
        if activation is not functional.silu or _is_torchs("swiglu", gate, up):
            return activation(gate) * up
        found = kernels.swiglu(gate, up=up)
        assert isinstance(found, Tensor)
        return found

    @staticmethod
    def routed(logits: Tensor, moe: Moe, bias_E: Tensor | None) -> tuple[Tensor, Tensor] | None:
        """Weights `[..., K]` fp32 and experts `[..., K]` of a router's logits `[..., E]`; None
        where torch is meant.
        """
        if _is_torchs("moe_gate", logits, bias_E):
            return None
        from kernels.moe import moe_gate

        weights, chosen = moe_gate(
            logits.flatten(0, -2),
            moe.top_k,
            scoring=moe.scoring,
            bias=bias_E,
            groups=moe.groups or 1,
            groups_kept=moe.groups_per_token,
            renormalise=moe.renormalise,
            scale=moe.routed_scale,
        )
        shape = (*logits.shape[:-1], moe.top_k)
        return weights.view(shape), chosen.view(shape)

    @staticmethod
    def permuted(x_T: Tensor, chosen_TK: Tensor, experts: int) -> tuple[Tensor, Permutation] | None:
        """`[T · K, hidden]` by expert, what was dropped (expert E) last; None where torch is meant."""
        if _is_torchs("moe_permute", x_T):
            return None
        from kernels.moe import moe_permute

        return moe_permute(x_T, chosen_TK, experts, check=False)

    @staticmethod
    def unpermuted(sorted_out: Tensor, way: Permutation, weights_TK: Tensor) -> Tensor:
        """The way back of `permuted`: `[T, hidden]`, weighted and summed."""
        from kernels.moe import moe_unpermute

        return moe_unpermute(sorted_out, way, weights_TK)

    @staticmethod
    def at_once(rows: Tensor, weight_ENK: Tensor) -> bool:
        """Whether one product takes the rows of all experts (`grouped`), or each expert's piece is
        for itself.
        """
        return not _is_torchs("grouped_matmul", rows, weight_ENK)

    @staticmethod
    def grouped(rows: Tensor, weight_ENK: Tensor, counts_E: Tensor) -> Tensor:
        """`[A, N]`: each expert's rows, `counts_E` of them, times its weight; zeros for the rows
        behind them.
        """
        from kernels.moe import grouped_matmul

        return grouped_matmul(rows, weight_ENK, counts_E, check=False)


class Plain(Chosen):
    """As the formulas are written, step by step in torch: what the other is measured against."""

    attend = staticmethod(plain_attend)

    @staticmethod
    def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight

    @staticmethod
    def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        wide = x.float()
        apart = wide - wide.mean(-1, keepdim=True)
        normed = (apart * torch.rsqrt(apart.square().mean(-1, keepdim=True) + eps)).to(
            x.dtype
        ) * weight
        return normed if bias is None else normed + bias

    @staticmethod
    def rotate(
        q: Tensor, k: Tensor, rope: tuple[Tensor, Tensor], interleaved: bool
    ) -> tuple[Tensor, Tensor]:
        return apply_rope(q, *rope, interleaved), apply_rope(k, *rope, interleaved)

    @staticmethod
    def gated(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
        return activation(gate) * up

    @staticmethod
    def routed(logits: Tensor, moe: Moe, bias_E: Tensor | None) -> None:
        return None

    @staticmethod
    def permuted(x_T: Tensor, chosen_TK: Tensor, experts: int) -> None:
        return None

    @staticmethod
    def at_once(rows: Tensor, weight_ENK: Tensor) -> bool:
        return False


def make_plain(model: nn.Module) -> None:
    """Every module of `model` computes by `Plain`.

    Before attention is given other ways: pages, a ring.
    """
    for each in model.modules():
        if hasattr(type(each), "operations"):
            each.operations = Plain  # type: ignore[assignment]
        if hasattr(type(each), "attend"):
            each.attend = Plain.attend  # type: ignore[assignment]


def _is_torchs(op: str, x: Tensor, *others: Tensor | None) -> bool:
    """Whether torch's own operator runs, told as every choice is; else `kernels` is to be called,
    which tells it.

    Looked at once for each kind of tensor: on a CPU a step of a small model would else spend a
    tenth of its time here.
    """
    if torch.compiler.is_compiling():
        record_choice(op, {"dtype": x.dtype}, "torch", _COMPILED)
        return True
    grad = torch.is_grad_enabled()
    kind = (op, x.dtype, x.device, x.shape[-1], type(x), grad)
    if cached_choice(kind):
        return True
    why = runtime.why_not(x, *others)
    if why is None or os.environ.get("KERNELS_BACKEND"):
        return False
    choose(
        op,
        {"dtype": x.dtype, "n": x.shape[-1], "grad": grad},
        [Candidate("own", why), Candidate("torch")],
    )
    cache_choice(kind, True)
    return True
