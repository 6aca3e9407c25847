"""The decoder: embeddings, pre-norm blocks, a head that may share the embedding's weight.

Does not know losses, precision, sharding or where its weights come from.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from workers.contracts.model import ModelSpec
from workers.models.attention import Attention
from workers.models.mlp import Mlp
from workers.models.rope import check_rope, rope_tables


class Block(nn.Module):
    """One pre-norm layer: attention and MLP, each added to the residual stream."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.dropout = spec.dropout
        self.attn_norm = build_norm(spec)
        self.attn = Attention(spec)
        self.mlp_norm = build_norm(spec)
        self.mlp = Mlp(spec)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor] | None) -> Tensor:
        x = x + self._drop(self.attn(self.attn_norm(x), rope))
        return x + self._drop(self.mlp(self.mlp_norm(x)))

    def _drop(self, x: Tensor) -> Tensor:
        return functional.dropout(x, self.dropout) if self.training and self.dropout else x


class Decoder(nn.Module):
    """Token ids `[B, S]` → logits `[B, S, vocab]`; S at most `spec.max_seq_len`.

    A tied head has no parameter of its own: it reads `embed.weight`, one parameter under any wrapping.
    """

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        check_supported(spec)
        self.spec = spec
        self.embed = nn.Embedding(spec.vocab, spec.hidden)
        self.positions = nn.Embedding(spec.max_seq_len, spec.hidden) if spec.position == "learned" else None
        self.blocks = nn.ModuleList(Block(spec) for _ in range(spec.layers))
        self.norm = build_norm(spec)
        self.head = None if spec.tie_embeddings else nn.Linear(spec.hidden, spec.vocab, bias=False)
        self._rope: tuple[Tensor, Tensor] | None = None

    def forward(self, tokens_BS: Tensor) -> Tensor:
        length = tokens_BS.shape[1]
        x = self.embed(tokens_BS)
        if self.positions is not None:
            x = x + self.positions(torch.arange(length, device=tokens_BS.device))
        if self.training and self.spec.dropout:
            x = functional.dropout(x, self.spec.dropout)
        rope = self._rope_for(length, tokens_BS.device)
        for block in self.blocks:
            x = block(x, rope)
        x = self.norm(x)
        logits = functional.linear(x, self.embed.weight) if self.head is None else self.head(x)
        if self.spec.logit_softcap is not None:
            logits = self.spec.logit_softcap * torch.tanh(logits / self.spec.logit_softcap)
        return logits

    def _rope_for(self, length: int, device: torch.device) -> tuple[Tensor, Tensor] | None:
        """Tables made at first use and kept: no buffer, so that meta construction and casts cannot harm them."""
        if self.spec.position != "rope":
            return None
        if self._rope is None or self._rope[0].shape[0] < length or self._rope[0].device != device:
            self._rope = rope_tables(self.spec.rope, self.spec.head_dim, length, device)
        cos, sin = self._rope
        return cos[:length], sin[:length]


def build_norm(spec: ModelSpec) -> nn.Module:
    """RMSNorm or LayerNorm over hidden; LayerNorm has a bias where `bias` is "all"."""
    if spec.norm == "rmsnorm":
        return nn.RMSNorm(spec.hidden, eps=spec.norm_eps)
    return nn.LayerNorm(spec.hidden, eps=spec.norm_eps, bias=spec.bias == "all")


def check_supported(spec: ModelSpec) -> None:
    """Raises ValueError for a shape that this decoder does not compute."""
    if spec.attention != "softmax":
        raise ValueError(
            f"this engine version runs softmax attention without experts, {spec.name} has attention {spec.attention}; "
            "try attention softmax"
        )
    if spec.moe is not None:
        raise ValueError(
            f"this engine version runs softmax attention without experts, {spec.name} has {spec.moe.experts} experts; "
            "try a dense model, or leave moe out"
        )
    if spec.position == "rope":
        check_rope(spec.rope)
