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
from workers.models.adapters.prompt import Prompt
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

    adapter_off = False  # compute without bottlenecks (`adapters.disable_adapter`)

    def __init__(self, spec: ModelSpec, layer: int = 0) -> None:
        super().__init__()
        self.dropout = spec.dropout
        self.attn_norm = build_norm(spec)
        self.attn = ATTENTION[spec.attention](spec)
        self.mlp_norm = build_norm(spec)
        # bottleneck adapters after attention and MLP
        self.attn_adapter: nn.Module | None = None
        self.mlp_adapter: nn.Module | None = None
        self.mlp = RoutedMlp(spec, spec.moe) if spec.moe and spec.is_moe_layer(layer) else Mlp(spec)

    def forward(
        self, x: Tensor, rope: tuple[Tensor, Tensor] | None, documents: Documents | None = None
    ) -> Tensor:
        """`[B, S, hidden]` → `[B, S, hidden]`."""
        attended = self.attn(self.attn_norm(x), rope, documents)
        if self.attn_adapter is not None and not self.adapter_off:
            attended = self.attn_adapter(attended)
        x = x + self._drop(attended)
        # a routed layer's capacity counts per document
        extra = (documents,) if isinstance(self.mlp, RoutedMlp) else ()
        inner = self.mlp(self.mlp_norm(x), *extra)
        if self.mlp_adapter is not None and not self.adapter_off:
            inner = self.mlp_adapter(inner)
        return x + self._drop(inner)

    def _drop(self, x: Tensor) -> Tensor:
        return functional.dropout(x, self.dropout) if self.training and self.dropout else x


@dataclass(frozen=True, slots=True)
class ModelPart:
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
    names as in the full model, and a last part with a tied head has the embedding's weight too. A
    scalar head gives scores `[B, S, 1]`.
    """

    def __init__(self, spec: ModelSpec, part: ModelPart | None = None) -> None:
        super().__init__()
        check_supported(spec)
        self.spec = spec
        self.part = part = part or ModelPart(range(spec.layers))
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
        # ranks that share a block's hidden states, while attention sees all their tokens
        self.sequence_shards = 1
        # whether the embedding's output needs a gradient even if its weight is frozen
        self.input_gradients = False
        # virtual tokens before the text: as embeddings, or as `prefixed` positions of attention
        self.prompt: Prompt | None = None
        self.prefixed = 0
        self._rope: tuple[Tensor, Tensor] | None = None

    def forward(
        self,
        x: Tensor,
        documents: Documents | None = None,
        targets: Tensor | None = None,
        each: bool = False,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Logits, or losses with `targets`; hidden states if this is not the last part.

        `positions` `[R]` of the flattened `[B · S]`: logits of these alone, `[1, R, vocab]`.
        """
        x = self.through(x, documents)
        if self.prompt is not None:
            x = x[:, self.prompt.embedding.shape[0] :]
        if not self.part.last:
            return x
        if positions is not None:
            x = x.flatten(0, 1).index_select(0, positions).unsqueeze(0)
        return self.logits(x) if targets is None else self.losses(x, targets, each)

    def through(self, x: Tensor, documents: Documents | None = None) -> Tensor:
        """`[B, S, hidden]` without norm and head, e.g. for logits of some tokens only."""
        if self.part.first:
            if self.prompt is not None and documents is not None:
                documents = documents.after(self.prompt.embedding.shape[0])
            x = self.embedded(x, documents)
        rope = self._rope_for(x.shape[1] * self.sequence_shards, x.device)
        for block in self.blocks.values():
            x = block(x, rope, documents)
        return x

    def embedded(self, tokens_BS: Tensor, documents: Documents | None = None) -> Tensor:
        """Embeddings `[B, S, hidden]` of tokens."""
        assert self.embed is not None
        x, tokens = cast(Tensor, self.embed(tokens_BS)), tokens_BS.shape[1]
        if self.prompt is not None:
            x, tokens = self.prompt(x), tokens + self.prompt.embedding.shape[0]
        if self.positions is not None:
            # counted in tokens: with sequence shards, `x` has a part of them
            length, local = self.placement(tokens, tokens_BS.device)
            every = (
                torch.arange(length, device=tokens_BS.device)
                if documents is None
                else documents.positions()
            )
            x = x + self.positions(every[..., local] + self.prefixed)
        if self.input_gradients and torch.is_grad_enabled() and not x.requires_grad:
            x.requires_grad_()
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
        length += self.prefixed
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
        cosine, sine = tables[0][self.prefixed :], tables[1][self.prefixed :]
        return cosine[local], sine[local]


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
            f"latent attention normalizes its latents, {spec.name} has qk_norm too. Use qk_norm "
            "false."
        )
