"""Plain decoder blocks in torch without a kernel library, to measure what autograd saves of them.

A `Style` selects the implementation; sizes are those of a ModelSpec. Does not depend on the
planner.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from workers.contracts.specs.model import ModelSpec, Rope
from workers.models.layers.mlp import ACTIVATIONS
from workers.models.layers.rope import apply_rope, rope_tables

Rotary = tuple[Tensor, Tensor] | None


@dataclass(frozen=True)
class Style:
    """`norm`: torch (in steps on a CPU), hugging_face (in steps), kernel. `core`: sdpa (what torch
    chooses on a CPU),
    flash and efficient (its GPU kernels), eager (fp32 softmax), fused_softmax (16-bit). `swiglu`:
    steps or kernel.
    `byte_masks`: dropout as on a GPU."""

    norm: str = "torch"
    core: str = "sdpa"
    swiglu: str = "steps"
    repeat_kv: bool = False
    byte_masks: bool = False


class NormKernel(torch.autograd.Function):
    """RMSNorm as GPU kernels have it (`aten::_fused_rms_norm`): keeps its input and a reciprocal
    root a row.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        root = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-5)
        ctx.save_for_backward(x, weight, root)
        return (x.float() * root * weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, root = ctx.saved_tensors
        unit, grad = x.float() * root, grads[0].float()
        scaled = grad * weight
        to_x = root * (scaled - unit * (scaled * unit).mean(-1, keepdim=True))
        return to_x.to(x.dtype), (grad * unit).flatten(0, -2).sum(0).to(weight.dtype)


class SwigluKernel(torch.autograd.Function):
    """silu(gate) x up as one kernel: keeps gate and up."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return functional.silu(gate) * up

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        share = torch.sigmoid(gate)
        return grads[0] * up * share * (1 + gate * (1 - share)), grads[0] * gate * share


class RmsNorm(nn.Module):
    def __init__(self, width: int, style: Style) -> None:
        super().__init__()
        self.weight, self.style = nn.Parameter(torch.ones(width)), style.norm

    def forward(self, x: Tensor) -> Tensor:
        if self.style == "kernel":
            return cast(Tensor, NormKernel.apply(x, self.weight))
        if self.style == "torch":
            return functional.rms_norm(x, x.shape[-1:], self.weight, 1e-5)
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return self.weight * wide.to(x.dtype)


def norm(spec: ModelSpec, style: Style) -> nn.Module:
    return RmsNorm(spec.hidden, style) if spec.norm == "rmsnorm" else nn.LayerNorm(spec.hidden)


class Core(nn.Module):
    """Queries `[B, H, S, D]`, keys and values `[B, G, S, D]` → `[B, S, H x D]`: scores, softmax,
    dropout, values.
    """

    def __init__(self, spec: ModelSpec, style: Style) -> None:
        super().__init__()
        self.dropout, self.style, self.window = spec.dropout, style, spec.window

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.style.repeat_kv or (self.style.core != "sdpa" and k.shape[1] < q.shape[1]):
            times = q.shape[1] // k.shape[1]
            k, v = k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)
        return self._attend(q, k, v).transpose(1, 2).flatten(-2)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.style.core == "sdpa":
            gqa = k.shape[1] < q.shape[1]
            return functional.scaled_dot_product_attention(
                q, k, v, dropout_p=self.dropout, is_causal=True, enable_gqa=gqa
            )
        if self.style.core == "flash":
            return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, self.dropout, True)[
                0
            ]
        if self.style.core == "efficient":
            return torch.ops.aten._scaled_dot_product_efficient_attention(
                q, k, v, None, True, self.dropout, True
            )[0]
        length = q.shape[2]
        ahead = torch.full((length, length), -math.inf, dtype=q.dtype, device=q.device).triu(1)
        scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[-1]) + ahead
        if self.style.core == "eager":
            shares = functional.softmax(scores, -1, dtype=torch.float32).to(q.dtype)
        else:
            shares = functional.softmax(scores, -1)
        return drop(shares, self.dropout, self.style) @ v


def drop(x: Tensor, rate: float, style: Style) -> Tensor:
    if not rate:
        return x
    return (
        torch.native_dropout(x, rate, True)[0] if style.byte_masks else functional.dropout(x, rate)
    )


class Attention(nn.Module):
    """MHA, GQA and MQA, with QK norms where the spec has them."""

    def __init__(self, spec: ModelSpec, style: Style) -> None:
        super().__init__()
        self.spec, self.width = spec, spec.head_dim
        biased = spec.bias != "none"
        self.q = nn.Linear(spec.hidden, spec.heads * spec.head_dim, bias=biased)
        self.k = nn.Linear(spec.hidden, spec.kv_heads * spec.head_dim, bias=biased)
        self.v = nn.Linear(spec.hidden, spec.kv_heads * spec.head_dim, bias=biased)
        self.o = nn.Linear(spec.heads * spec.head_dim, spec.hidden, bias=spec.bias == "all")
        self.core = Core(spec, style)
        self.norms = nn.ModuleList(RmsNorm(spec.head_dim, style) for _ in range(2 * spec.qk_norm))

    def forward(self, x: Tensor, rope: Rotary) -> Tensor:
        q, k, v = (each(x).unflatten(-1, (-1, self.width)) for each in (self.q, self.k, self.v))
        if self.norms:
            q, k = self.norms[0](q), self.norms[1](k)
        if rope is not None:
            q, k = apply_rope(q, *rope, False), apply_rope(k, *rope, False)
        return cast(
            Tensor, self.o(self.core(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)))
        )


class Mlp(nn.Module):
    """Gated or plain, `width` wide."""

    def __init__(self, spec: ModelSpec, style: Style, width: int) -> None:
        super().__init__()
        self.act, self.kernel = ACTIVATIONS[spec.activation], style.swiglu == "kernel"
        biased = spec.bias == "all"
        self.gate = nn.Linear(spec.hidden, width, bias=biased) if spec.gated_mlp else None
        self.up = nn.Linear(spec.hidden, width, bias=biased)
        self.down = nn.Linear(width, spec.hidden, bias=biased)

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is None:
            return cast(Tensor, self.down(self.act(self.up(x))))
        if self.kernel:
            return cast(Tensor, self.down(SwigluKernel.apply(self.gate(x), self.up(x))))
        return cast(Tensor, self.down(self.act(self.gate(x)) * self.up(x)))


class Block(nn.Module):
    """Pre-norm attention and MLP, each added to the residual stream."""

    def __init__(self, spec: ModelSpec, style: Style, attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.dropout, self.style = spec.dropout, style
        self.attn_norm, self.mlp_norm = norm(spec, style), norm(spec, style)
        self.attn, self.mlp = attention, mlp

    def forward(self, x: Tensor, rope: Rotary) -> Tensor:
        x = x + drop(self.attn(self.attn_norm(x), rope), self.dropout, self.style)
        return x + drop(self.mlp(self.mlp_norm(x)), self.dropout, self.style)


def rotary(spec: ModelSpec, length: int) -> Rotary:
    """Tables for every block; scaling changes angles, not shapes."""
    return rope_tables(Rope(), spec.rotary_dim, length, "cpu") if spec.position == "rope" else None
