"""The decoder: embeddings, pre-norm blocks, a head that may share the embedding's weight.

Does not know losses, precision, sharding or where its weights come from.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from workers.contracts.model import ModelSpec
from workers.models.attention import Attention
from workers.models.mfa import FactorisedAttention
from workers.models.mla import LatentAttention
from workers.models.mlp import Mlp
from workers.models.moe import RoutedMlp
from workers.models.rope import rope_tables

ATTENTION = {"softmax": Attention, "mla": LatentAttention, "mfa": FactorisedAttention}


class Block(nn.Module):
    """One pre-norm layer: attention and MLP, dense or routed, each added to the residual stream."""

    def __init__(self, spec: ModelSpec, layer: int = 0) -> None:
        super().__init__()
        self.dropout = spec.dropout
        self.attn_norm = build_norm(spec)
        self.attn = ATTENTION[spec.attention](spec)
        self.mlp_norm = build_norm(spec)
        self.mlp = RoutedMlp(spec, spec.moe) if spec.moe and spec.is_moe_layer(layer) else Mlp(spec)

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
        self.blocks = nn.ModuleList(Block(spec, layer) for layer in range(spec.layers))
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
        spec, kept = self.spec, self._rope
        if spec.position != "rope":
            return None
        # dynamic scaling turns by the sequence's length, so a longer table's beginning is not a shorter one
        dynamic = spec.rope.scaling is not None and spec.rope.scaling.name == "dynamic"
        fits = kept is not None and (kept[0].shape[0] == length if dynamic else kept[0].shape[0] >= length)
        if kept is None or not fits or kept[0].device != device:
            kept = rope_tables(spec.rope, spec.rotary_dim, length, device, max_seq_len=spec.max_seq_len)
            self._rope = kept
        return kept[0][:length], kept[1][:length]


def build_norm(spec: ModelSpec) -> nn.Module:
    """RMSNorm or LayerNorm over hidden; LayerNorm has a bias where `bias` is "all"."""
    if spec.norm == "rmsnorm":
        return nn.RMSNorm(spec.hidden, eps=spec.norm_eps)
    return nn.LayerNorm(spec.hidden, eps=spec.norm_eps, bias=spec.bias == "all")


def check_supported(spec: ModelSpec) -> None:
    """Raises ValueError for a shape that this decoder does not compute."""
    if spec.attention == "mla" and spec.qk_norm:
        raise ValueError(f"latent attention norms its latents, {spec.name} asks for qk_norm too; try qk_norm false")
