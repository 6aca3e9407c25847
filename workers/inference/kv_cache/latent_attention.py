"""Latent attention over a paged cache of latents, in absorbed form.

DeepSeek-V2, arXiv 2405.04434, section 2.1.2. Replaces the forward of a `LatentAttention`; does not
depend on requests. Shapes: T query tokens of all sequences, H heads, N width of a key without
rotary part, R width of the latent, P width of the rotary key, V width of a value.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from kernels import mla_decode
from kernels.paged_kv.torch_gather import gather_attention
from workers.models.layers.documents import Documents
from workers.models.layers.mla import LatentAttention

if TYPE_CHECKING:
    from workers.inference.kv_cache.paged_cache import PagedCache


class PagedLatentAttention:
    """A token stores its latent and rotary key, `R + P` numbers for all heads.

    The up-projection of keys is applied to the query, that of values to the attention output, so
    past latents are never projected up.
    """

    def __init__(self, attention: LatentAttention, cache: PagedCache, layer: int) -> None:
        self.attention, self.cache, self.layer = attention, cache, layer
        mla, up = attention.mla, attention.kv_up
        weight = (
            up.weight
            if type(up) is nn.Linear
            else _extract_weight(up, mla.kv_lora_rank, cache.keys[0])
        )
        by_head = weight.detach().view(-1, mla.qk_nope_head_dim + mla.v_head_dim, mla.kv_lora_rank)
        self._keys_HNR = by_head[:, : mla.qk_nope_head_dim]
        self._values_HRV = by_head[:, mla.qk_nope_head_dim :].transpose(1, 2)

    def __call__(
        self, x: Tensor, rope: tuple[Tensor, Tensor] | None, documents: Documents | None = None
    ) -> Tensor:
        """The attention layer's output for `x` `[1, T, hidden]`."""
        attention, mla = self.attention, self.attention.mla
        metadata = self.cache.metadata
        assert metadata is not None and documents is None
        q = (
            attention.q_up(attention.q_latent_norm(attention.q_down(x)))
            if mla.q_lora_rank
            else attention.q(x)
        )
        q = q.unflatten(-1, (-1, mla.qk_nope_head_dim + mla.qk_rope_head_dim))
        plain, rotary = q.split((mla.qk_nope_head_dim, mla.qk_rope_head_dim), dim=-1)
        latent, rotary_key = attention.kv_down(x).split(
            (mla.kv_lora_rank, mla.qk_rope_head_dim), dim=-1
        )
        if rope is not None:
            rotary, rotated = attention.operations.rotate(
                rotary, rotary_key.unsqueeze(-2), rope, attention.interleaved
            )
            rotary_key = rotated.squeeze(-2)
        entry = torch.cat((attention.kv_latent_norm(latent), rotary_key), dim=-1)[0]
        cached = self.cache.keys[self.layer]
        cached.view(-1, cached.shape[-1]).index_copy_(0, metadata.slots_T, entry)
        absorbed_THR = torch.einsum("thn,hnr->thr", plain[0], self._keys_HNR)
        out_THR = self._attend(absorbed_THR, rotary[0], cached)
        out = torch.einsum("thr,hrv->thv", out_THR, self._values_HRV).flatten(1).unsqueeze(0)
        return cast(Tensor, attention.o(out))

    def _attend(self, q_THR: Tensor, q_THP: Tensor, cached: Tensor) -> Tensor:
        """Decode kernel for one query token per sequence and no window; else gather latents."""
        metadata, attention = self.cache.metadata, self.attention
        assert metadata is not None
        if metadata.cu is None and attention.window is None:
            out_THR = mla_decode(
                q_THR,
                q_THP,
                cached.squeeze(2),
                metadata.table,
                metadata.lens,
                scale=attention.scale,
                plan=metadata.plan,
            )
            assert isinstance(out_THR, Tensor)
            return out_THR
        q = torch.cat((q_THR, q_THP), dim=-1)
        return gather_attention(
            q,
            cached,
            None,
            metadata.plan,
            values=q_THR.shape[-1],
            scale=attention.scale,
            window=attention.window,
            softcap=0.0,
            scales=None,
        )


def _extract_weight(linear: nn.Module, width: int, like: Tensor) -> Tensor:
    """The weight of a linear layer without bias in any format (quantized ones too)."""
    product = linear(torch.eye(width, dtype=like.dtype, device=like.device))
    return cast(Tensor, product).t().contiguous()
