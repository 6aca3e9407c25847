"""The decoder: embeddings, pre-norm blocks, a head that may share the embedding's weight.

Does not know losses, precision, sharding or where its weights come from.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from workers.contracts.specs.model import ModelSpec
from workers.models.layers.attention import Attention
from workers.models.layers.documents import Documents
from workers.models.layers.head import Head, losses
from workers.models.layers.mfa import FactorisedAttention
from workers.models.layers.mla import LatentAttention
from workers.models.layers.mlp import Mlp
from workers.models.layers.norms import LayerNorm, RmsNorm
from workers.models.layers.rope import rope_tables
from workers.models.moe.layer import RoutedMlp

# tokens at hand and their device → the whole sequence's length, and which of its positions they are
Placement = Callable[[int, torch.device], tuple[int, slice | Tensor]]
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

    def forward(
        self, x: Tensor, rope: tuple[Tensor, Tensor] | None, documents: Documents | None = None
    ) -> Tensor:
        x = x + self._drop(self.attn(self.attn_norm(x), rope, documents))
        # a routed layer's capacity counts by document
        fed = (documents,) if isinstance(self.mlp, RoutedMlp) else ()
        return x + self._drop(self.mlp(self.mlp_norm(x), *fed))

    def _drop(self, x: Tensor) -> Tensor:
        return functional.dropout(x, self.dropout) if self.training and self.dropout else x


@dataclass(frozen=True, slots=True)
class Part:
    """Consecutive layers of a model, and whether the embedding comes before them and the head after
    them.
    """

    layers: range
    first: bool = True
    last: bool = True


class Decoder(nn.Module):
    """Token ids `[B, S]` → logits `[B, S, vocab]`, with targets losses (`losses`); S at most
    `spec.max_seq_len`.

    Of `documents` packed into the sequences each is computed as if it stood alone: attention keeps
    to it and learned
    positions begin anew, a routed layer's capacity counts by document. Rotary positions run on,
    since only distances
    count; dynamic scaling of theirs turns by the sequence's length.

    A tied head has no parameter of its own: it reads `embed.weight`, one parameter under any
    wrapping. A `part` of the
    model takes and gives hidden states `[B, S, hidden]` where it is not first and last; its
    parameters keep the names
    that they have in the whole, and a last part with a tied head holds the embedding's weight too.
    """

    def __init__(self, spec: ModelSpec, part: Part | None = None) -> None:
        super().__init__()
        check_supported(spec)
        self.spec = spec
        self.part = part = part or Part(range(spec.layers))
        tied = spec.tie_embeddings
        self.embed = (
            nn.Embedding(spec.vocab, spec.hidden) if part.first or (part.last and tied) else None
        )
        learned = spec.position == "learned" and part.first
        self.positions = nn.Embedding(spec.max_seq_len, spec.hidden) if learned else None
        self.blocks = nn.ModuleDict({str(layer): Block(spec, layer) for layer in part.layers})
        self.norm = build_norm(spec) if part.last else None
        self.head = Head(spec) if part.last and not tied else None
        self.placement: Placement = whole_sequence  # settable: for a part of the sequence
        self._rope: tuple[Tensor, Tensor] | None = None

    def forward(
        self,
        x: Tensor,
        documents: Documents | None = None,
        targets: Tensor | None = None,
        each: bool = False,
    ) -> Tensor:
        x = self.through(x, documents)
        if not self.part.last:
            return x
        return self.logits(x) if targets is None else self.losses(x, targets, each)

    def through(self, x: Tensor, documents: Documents | None = None) -> Tensor:
        """`[B, S, hidden]`, all but norm and head: for those who want the logits of some tokens
        alone.
        """
        if self.part.first:
            x = self.embedded(x, documents)
        rope = self._rope_for(x.shape[1], x.device)
        for block in self.blocks.values():
            x = block(x, rope, documents)
        return x

    def embedded(self, tokens_BS: Tensor, documents: Documents | None = None) -> Tensor:
        """`[B, S, hidden]`."""
        assert self.embed is not None
        x = cast(Tensor, self.embed(tokens_BS))
        if self.positions is not None:
            length, held = self.placement(tokens_BS.shape[1], tokens_BS.device)
            every = (
                torch.arange(length, device=tokens_BS.device)
                if documents is None
                else documents.positions()
            )
            x = x + self.positions(every[..., held])
        return (
            functional.dropout(x, self.spec.dropout) if self.training and self.spec.dropout else x
        )

    def logits(self, x: Tensor) -> Tensor:
        """`[B, S, vocab]` of the last block's output."""
        assert self.norm is not None
        x = self.norm(x)
        if self.head is not None:
            logits = cast(Tensor, self.head(x))
        else:
            assert self.embed is not None
            logits = functional.linear(x, self.embed.weight)
        if self.spec.logit_softcap is not None:
            logits = self.spec.logit_softcap * torch.tanh(logits / self.spec.logit_softcap)
        return logits

    def losses(self, x: Tensor, targets_BS: Tensor, each: bool) -> Tensor:
        """Cross-entropy of the last block's output without whole logits: the sum, or `[B, S]` with
        `each`; fp32.
        """
        assert self.norm is not None
        x = self.norm(x)
        # its own forward pass, around which its weight is gathered where it lies in shards
        if self.head is not None:
            return cast(Tensor, self.head(x, targets_BS, each))
        assert self.embed is not None
        return losses(x, self.embed.weight, targets_BS, softcap=self.spec.logit_softcap, each=each)

    def _rope_for(self, tokens: int, device: torch.device) -> tuple[Tensor, Tensor] | None:
        """Tables made at first use and kept: no buffer, so that meta construction and casts cannot
        harm them.
        """
        spec, kept = self.spec, self._rope
        if spec.position != "rope":
            return None
        length, held = self.placement(tokens, device)
        # dynamic scaling turns by the sequence's length, so a longer table's beginning is not a
        # shorter one
        dynamic = spec.rope.scaling is not None and spec.rope.scaling.name == "dynamic"
        fits = kept is not None and (
            kept[0].shape[0] == length if dynamic else kept[0].shape[0] >= length
        )
        if kept is None or not fits or kept[0].device != device:
            kept = rope_tables(
                spec.rope, spec.rotary_dim, length, device, max_seq_len=spec.max_seq_len
            )
            self._rope = kept
        return kept[0][held], kept[1][held]


def whole_sequence(tokens: int, device: torch.device) -> tuple[int, slice]:
    """The placement of a sequence that is all at hand."""
    return tokens, slice(tokens)


def build_norm(spec: ModelSpec) -> nn.Module:
    """RMSNorm or LayerNorm over hidden; LayerNorm has a bias where `bias` is "all"."""
    if spec.norm == "rmsnorm":
        return RmsNorm(spec.hidden, eps=spec.norm_eps)
    return LayerNorm(spec.hidden, eps=spec.norm_eps, bias=spec.bias == "all")


def check_supported(spec: ModelSpec) -> None:
    """Raises ValueError for a shape that this decoder does not compute."""
    if spec.attention == "mla" and spec.qk_norm:
        raise ValueError(
            f"latent attention norms its latents, {spec.name} asks for qk_norm too; try qk_norm "
            "false"
        )
