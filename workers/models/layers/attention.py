"""Softmax attention with a key-value head per query head, per group, or for all (MHA, GQA, MQA).

Does not depend on caches or parallelism. Shapes: B batch, S sequence, H heads, D head_dim.
"""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor, nn

from workers.contracts.specs.model import ModelSpec
from workers.models.adapters.prefix import attend_with_prefix
from workers.models.layers.attention_math import attend
from workers.models.layers.documents import Documents
from workers.models.layers.norms import RmsNorm
from workers.models.layers.operations import KernelOperations


class AttentionBase(nn.Module):
    """Attention after the projections: QK norm, rotation, softmax attention, output projection."""

    o: nn.Linear
    q_norm: RmsNorm | None
    k_norm: RmsNorm | None
    window: int | None
    dropout: float
    interleaved: bool
    # trained keys and values before the text's, `[kv width, n]`
    prefix_k: nn.Parameter | None
    prefix_v: nn.Parameter | None
    adapter_off = False  # attend to the text alone (`adapters.disable_adapter`)
    attend = staticmethod(attend)  # replaceable by another implementation
    operations: type[KernelOperations] = KernelOperations

    def __init__(self) -> None:
        super().__init__()
        self.register_parameter("prefix_k", None)
        self.register_parameter("prefix_v", None)

    def attend_heads(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        rope: tuple[Tensor, Tensor] | None,
        documents: Documents | None,
    ) -> Tensor:
        """q, k and v `[B, S, H, D]` → `[B, S, hidden]`; k and v may have fewer heads."""
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        dropout = self.dropout if self.training else 0.0
        how: dict[str, Any] = {
            "window": self.window,
            "dropout": dropout,
            "documents": documents,
        }
        if rope is not None and getattr(self.attend, "rotates", False):
            how |= {"rope": rope, "interleaved": self.interleaved}
        elif rope is not None:
            q, k = self.operations.rotate(q, k, rope, self.interleaved)
        if self.prefix_k is not None and self.prefix_v is not None and not self.adapter_off:
            out = attend_with_prefix(q, k, v, (self.prefix_k, self.prefix_v), **how)
        else:
            out = self.attend(q, k, v, **how)
        return cast(Tensor, self.o(out))


class Attention(AttentionBase):
    """`[B, S, hidden]` → `[B, S, hidden]`; optional QK norm (Qwen3), biases, sliding window."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.head_dim = spec.head_dim
        self.window, self.dropout, self.interleaved = (
            spec.window,
            spec.dropout,
            spec.rope.interleaved,
        )
        qkv_bias = spec.bias != "none"
        self.q = nn.Linear(spec.hidden, spec.heads * spec.head_dim, bias=qkv_bias)
        self.k = nn.Linear(spec.hidden, spec.kv_heads * spec.head_dim, bias=qkv_bias)
        self.v = nn.Linear(spec.hidden, spec.kv_heads * spec.head_dim, bias=qkv_bias)
        self.o = nn.Linear(spec.heads * spec.head_dim, spec.hidden, bias=spec.bias == "all")
        self.q_norm = RmsNorm(spec.head_dim, eps=spec.norm_eps) if spec.qk_norm else None
        self.k_norm = RmsNorm(spec.head_dim, eps=spec.norm_eps) if spec.qk_norm else None

    def forward(
        self, x: Tensor, rope: tuple[Tensor, Tensor] | None, documents: Documents | None = None
    ) -> Tensor:
        """The attention output of `x`; `rope` are the tables of its positions."""
        q = self.q(x).unflatten(-1, (-1, self.head_dim))
        k = self.k(x).unflatten(-1, (-1, self.head_dim))
        v = self.v(x).unflatten(-1, (-1, self.head_dim))
        return self.attend_heads(q, k, v, rope, documents)
