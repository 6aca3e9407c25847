"""Latent attention over a paged cache of its latents, in the absorbed form (DeepSeek-V2, arXiv
2405.04434, 2.1.2).

In place of a `LatentAttention`'s own forward. Knows no requests. Shapes: T query tokens of all
sequences, H heads, R
the latent's width, P the rotary key's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from kernels import mla_decode
from kernels.decode.torch_gather import gathered
from workers.models.layers.documents import Documents
from workers.models.layers.mla import LatentAttention

if TYPE_CHECKING:
    from workers.inference.kv_cache.paged_cache import PagedCache


class PagedLatentAttention:
    """A token leaves its latent and rotary key in the cache, `R + P` numbers for all heads. The
    keys' up-projection is
    multiplied into the query, the values' into what attention gives: nothing rises from the latents
    of the past.
    """

    def __init__(self, attention: LatentAttention, cache: PagedCache, layer: int) -> None:
        self.attention, self.cache, self.layer = attention, cache, layer
        mla, rise = attention.mla, attention.kv_up
        weight = (
            rise.weight
            if type(rise) is nn.Linear
            else _weight_of(rise, mla.kv_lora_rank, cache.keys[0])
        )
        of_heads = weight.detach().view(-1, mla.qk_nope_head_dim + mla.v_head_dim, mla.kv_lora_rank)
        self._keys_HNR = of_heads[:, : mla.qk_nope_head_dim]
        self._values_HRV = of_heads[:, mla.qk_nope_head_dim :].transpose(1, 2)

    def __call__(
        self, x: Tensor, rope: tuple[Tensor, Tensor] | None, documents: Documents | None = None
    ) -> Tensor:
        attention, mla, step = self.attention, self.attention.mla, self.cache.step
        assert step is not None and documents is None
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
            rotary, turned = attention.operations.rotate(
                rotary, rotary_key.unsqueeze(-2), rope, attention.interleaved
            )
            rotary_key = turned.squeeze(-2)
        entry = torch.cat((attention.kv_latent_norm(latent), rotary_key), dim=-1)[0]
        held = self.cache.keys[self.layer]
        held.view(-1, held.shape[-1]).index_copy_(0, step.slots_T, entry)
        absorbed_THR = torch.einsum("thn,hnr->thr", plain[0], self._keys_HNR)
        out_THR = self._attended(absorbed_THR, rotary[0], held)
        out = torch.einsum("thr,hrv->thv", out_THR, self._values_HRV).flatten(1).unsqueeze(0)
        return cast(Tensor, attention.o(out))

    def _attended(self, q_THR: Tensor, q_THP: Tensor, held: Tensor) -> Tensor:
        """The kernel where each sequence has one token and sees all before it; else latents are
        gathered.
        """
        step, scale, window = self.cache.step, self.attention.scale, self.attention.window
        assert step is not None
        if step.cu is None and window is None:
            found = mla_decode(
                q_THR, q_THP, held.squeeze(2), step.table, step.lens, scale=scale, plan=step.plan
            )
            assert isinstance(found, Tensor)
            return found
        q = torch.cat((q_THR, q_THP), dim=-1)
        return gathered(
            q,
            held,
            None,
            step.plan,
            values=q_THR.shape[-1],
            scale=scale,
            window=window,
            softcap=0.0,
            scales=None,
        )


def _weight_of(rise: nn.Module, width: int, like: Tensor) -> Tensor:
    """The matrix that a layer without bias multiplies by, however it keeps it (quantised)."""
    found = rise(torch.eye(width, dtype=like.dtype, device=like.device))
    return cast(Tensor, found).t().contiguous()
