"""Operations of a block with own kernels, chosen by what can run here, or plain torch.

Modules have a class attribute `operations`, replaceable per instance. `kernels.explain` lists the
choices and their reasons. Shapes: `[..., N]` unless named.
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
from workers.models.layers.cpu_operations import frozen_rms_norm, is_plain_cpu
from workers.models.layers.cpu_operations import rotate as cpu_rotate
from workers.models.layers.rope import apply_rope

if TYPE_CHECKING:
    from kernels.moe import Permutation

Activation = Callable[[Tensor], Tensor]
_COMPILED = "torch.compile generates its own kernels"


class KernelOperations:
    """Kernels of `kernels` if one runs on the tensors' device, else torch's own operators."""

    attend = staticmethod(attend)

    @staticmethod
    def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Root mean square norm over the last dimension (arXiv 1910.07467, eq. 4)."""
        if _use_torch("rms_norm", x, weight):
            if not weight.requires_grad and is_plain_cpu(x, weight):
                return frozen_rms_norm(x, weight, eps)
            return functional.rms_norm(x, (x.shape[-1],), weight, eps)
        result = kernels.rms_norm(x, weight, eps)
        assert isinstance(result, Tensor)
        return result

    @staticmethod
    def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        """Layer norm over the last dimension (arXiv 1607.06450, eq. 4)."""
        if _use_torch("layer_norm", x, weight, bias):
            return functional.layer_norm(x, (x.shape[-1],), weight, bias, eps)
        return kernels.layer_norm(x, weight, bias, eps)

    @staticmethod
    def rotate(
        q: Tensor, k: Tensor, rope: tuple[Tensor, Tensor], interleaved: bool
    ) -> tuple[Tensor, Tensor]:
        """Queries and keys `[B, S, H, D]`, rotated by their positions' angles; H may differ."""
        if _use_torch("apply_rope", q, k, *rope):
            if not interleaved and is_plain_cpu(q, k, *rope):
                return cpu_rotate(q, *rope), cpu_rotate(k, *rope)
            return apply_rope(q, *rope, interleaved), apply_rope(k, *rope, interleaved)
        result = kernels.apply_rope(q, k, *rope, interleaved=interleaved)
        assert isinstance(result, tuple)
        return result

    @staticmethod
    def gated(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
        """`activation(gate) * up` (arXiv 2002.05202)."""
        if activation is not functional.silu or _use_torch("swiglu", gate, up):
            return activation(gate) * up
        result = kernels.swiglu(gate, up=up)
        assert isinstance(result, Tensor)
        return result

    @staticmethod
    def routed(logits: Tensor, moe: Moe, bias_E: Tensor | None) -> tuple[Tensor, Tensor] | None:
        """fp32 weights and experts `[..., K]` of logits `[..., E]`; None: torch computes them."""
        if _use_torch("moe_gate", logits, bias_E):
            return None
        from kernels.moe import moe_gate

        weights, chosen = moe_gate(
            logits.flatten(0, -2),
            moe.top_k,
            scoring=moe.scoring,
            bias=bias_E,
            groups=moe.groups or 1,
            top_k_groups=moe.groups_per_token,
            renormalise=moe.renormalise,
            scale=moe.routed_scale,
        )
        shape = (*logits.shape[:-1], moe.top_k)
        return weights.view(shape), chosen.view(shape)

    @staticmethod
    def permuted(x_T: Tensor, chosen_TK: Tensor, experts: int) -> tuple[Tensor, Permutation] | None:
        """`[T · K, hidden]` by expert, dropped tokens (expert E) last; None: torch permutes."""
        if _use_torch("moe_permute", x_T):
            return None
        from kernels.moe import moe_permute

        return moe_permute(x_T, chosen_TK, experts, check=False)

    @staticmethod
    def unpermuted(sorted_out: Tensor, permutation: Permutation, weights_TK: Tensor) -> Tensor:
        """The inverse of `permuted`: `[T, hidden]`, weighted and summed."""
        from kernels.moe import moe_unpermute

        return moe_unpermute(sorted_out, permutation, weights_TK)

    @staticmethod
    def at_once(rows: Tensor, weight_ENK: Tensor) -> bool:
        """Whether one grouped product computes all experts, instead of one product per expert."""
        return not _use_torch("grouped_matmul", rows, weight_ENK)

    @staticmethod
    def grouped(rows: Tensor, weight_ENK: Tensor, counts_E: Tensor) -> Tensor:
        """`[A, N]`: each expert's `counts_E` rows times its weight; zeros for later rows."""
        from kernels.moe import grouped_matmul

        return grouped_matmul(rows, weight_ENK, counts_E, check=False)


class PlainOperations(KernelOperations):
    """The formulas in plain torch operations, the reference of the kernels."""

    attend = staticmethod(plain_attend)

    @staticmethod
    def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `KernelOperations.rms_norm`."""
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight

    @staticmethod
    def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        """See `KernelOperations.layer_norm`."""
        wide = x.float()
        centered = wide - wide.mean(-1, keepdim=True)
        normed = (centered * torch.rsqrt(centered.square().mean(-1, keepdim=True) + eps)).to(
            x.dtype
        ) * weight
        return normed if bias is None else normed + bias

    @staticmethod
    def rotate(
        q: Tensor, k: Tensor, rope: tuple[Tensor, Tensor], interleaved: bool
    ) -> tuple[Tensor, Tensor]:
        """See `KernelOperations.rotate`."""
        return apply_rope(q, *rope, interleaved), apply_rope(k, *rope, interleaved)

    @staticmethod
    def gated(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
        """See `KernelOperations.gated`."""
        return activation(gate) * up

    @staticmethod
    def routed(logits: Tensor, moe: Moe, bias_E: Tensor | None) -> None:
        """See `KernelOperations.routed`."""
        return None

    @staticmethod
    def permuted(x_T: Tensor, chosen_TK: Tensor, experts: int) -> None:
        """See `KernelOperations.permuted`."""
        return None

    @staticmethod
    def at_once(rows: Tensor, weight_ENK: Tensor) -> bool:
        """See `KernelOperations.at_once`."""
        return False


def make_plain(model: nn.Module) -> None:
    """Make every module of `model` compute with `PlainOperations`.

    Call it before other attention implementations (paged, ring) are set.
    """
    for module in model.modules():
        if hasattr(type(module), "operations"):
            module.operations = PlainOperations  # type: ignore[assignment]
        if hasattr(type(module), "attend"):
            module.attend = PlainOperations.attend  # type: ignore[assignment]


def _use_torch(op: str, x: Tensor, *others: Tensor | None) -> bool:
    """Whether torch's own operator runs, recorded as a choice; otherwise `kernels` records its own.

    Cached per kind of tensor: otherwise a step of a small model on a CPU would spend a tenth of its
    time here.
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
