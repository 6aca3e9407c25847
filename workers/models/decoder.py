"""The decoder: embeddings, pre-norm blocks, a head that may share the embedding's weight.

Does not depend on precision, sharding or the source of its weights.
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

# local tokens and device → length of the full sequence, and positions of the tokens in it
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
        """`[B, S, hidden]` → `[B, S, hidden]`."""
        x = x + self._drop(self.attn(self.attn_norm(x), rope, documents))
        # a routed layer's capacity counts per document
        extra = (documents,) if isinstance(self.mlp, RoutedMlp) else ()
        return x + self._drop(self.mlp(self.mlp_norm(x), *extra))

    def _drop(self, x: Tensor) -> Tensor:
        return functional.dropout(x, self.dropout) if self.training and self.dropout else x


@dataclass(frozen=True, slots=True)
class Part:
    """Consecutive layers of a model, with the embedding if `first` and the head if `last`."""

    layers: range
    first: bool = True
    last: bool = True


class Decoder(nn.Module):
    """Token ids `[B, S]` → logits `[B, S, vocab]`, or losses; S at most `spec.max_seq_len`.

    Packed `documents` are independent: attention stays within a document, learned positions restart
    and a routed layer's capacity counts per document. Rotary positions continue, since only
    distances matter; their dynamic scaling depends on the sequence's length.

    A tied head has no parameter: it uses `embed.weight`. A `part` of the model has hidden states
    `[B, S, hidden]` as input if not first and as output if not last; its parameters have the same
    names as in the full model, and a last part with a tied head has the embedding's weight too.
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
        self.placement: Placement = whole_sequence  # replaceable, for a part of the sequence
        self._rope: tuple[Tensor, Tensor] | None = None

    def forward(
        self,
        x: Tensor,
        documents: Documents | None = None,
        targets: Tensor | None = None,
        each: bool = False,
    ) -> Tensor:
        """Logits, or losses with `targets`; hidden states if this is not the last part."""
        x = self.through(x, documents)
        if not self.part.last:
            return x
        return self.logits(x) if targets is None else self.losses(x, targets, each)

    def through(self, x: Tensor, documents: Documents | None = None) -> Tensor:
        """`[B, S, hidden]` without norm and head, e.g. for logits of some tokens only."""
        if self.part.first:
            x = self.embedded(x, documents)
        rope = self._rope_for(x.shape[1], x.device)
        for block in self.blocks.values():
            x = block(x, rope, documents)
        return x

    def embedded(self, tokens_BS: Tensor, documents: Documents | None = None) -> Tensor:
        """Embeddings `[B, S, hidden]` of tokens."""
        assert self.embed is not None
        x = cast(Tensor, self.embed(tokens_BS))
        if self.positions is not None:
            length, local = self.placement(tokens_BS.shape[1], tokens_BS.device)
            every = (
                torch.arange(length, device=tokens_BS.device)
                if documents is None
                else documents.positions()
            )
            x = x + self.positions(every[..., local])
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
        """Cross-entropy of the last block's output in fp32: the sum, or `[B, S]` with `each`."""
        assert self.norm is not None
        x = self.norm(x)
        # through its forward pass, around which a sharded weight is gathered
        if self.head is not None:
            return cast(Tensor, self.head(x, targets_BS, each))
        assert self.embed is not None
        return losses(x, self.embed.weight, targets_BS, softcap=self.spec.logit_softcap, each=each)

    def _rope_for(self, tokens: int, device: torch.device) -> tuple[Tensor, Tensor] | None:
        """Cached tables; not a buffer, so that meta construction and casts do not affect them."""
        spec, tables = self.spec, self._rope
        if spec.position != "rope":
            return None
        length, local = self.placement(tokens, device)
        # dynamic scaling depends on the sequence's length, so a longer table has other values
        dynamic = spec.rope.scaling is not None and spec.rope.scaling.name == "dynamic"
        fits = tables is not None and (
            tables[0].shape[0] == length if dynamic else tables[0].shape[0] >= length
        )
        if tables is None or not fits or tables[0].device != device:
            tables = rope_tables(
                spec.rope, spec.rotary_dim, length, device, max_seq_len=spec.max_seq_len
            )
            self._rope = tables
        return tables[0][local], tables[1][local]


def whole_sequence(tokens: int, device: torch.device) -> tuple[int, slice]:
    """The placement of a sequence that is completely local."""
    return tokens, slice(tokens)


def build_norm(spec: ModelSpec) -> nn.Module:
    """RMSNorm or LayerNorm over hidden; LayerNorm has a bias if `bias` is "all"."""
    if spec.norm == "rmsnorm":
        return RmsNorm(spec.hidden, eps=spec.norm_eps)
    return LayerNorm(spec.hidden, eps=spec.norm_eps, bias=spec.bias == "all")


def check_supported(spec: ModelSpec) -> None:
    """Raises ValueError for a shape that this decoder does not compute."""
    if spec.attention == "mla" and spec.qk_norm:
        raise ValueError(
            f"latent attention normalises its latents, {spec.name} has qk_norm too; try qk_norm "
            "false"
        )
