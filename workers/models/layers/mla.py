"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).

Keys and values are projected from one small latent. Does not depend on caches or parallelism.
Shapes: B batch, S sequence, H heads.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from workers.contracts.specs.model import ModelSpec
from workers.models.layers.attention_math import attend
from workers.models.layers.documents import Documents
from workers.models.layers.norms import RmsNorm
from workers.models.layers.operations import KernelOperations
from workers.models.layers.rope_scaling import yarn_mscale

# epsilon of the norms of DeepSeek's latents, independent of the configuration
LATENT_EPS = 1e-6


class LatentAttention(nn.Module):
    """`[B, S, hidden]` → `[B, S, hidden]`.

    Each head's query and key have a part without position and a rotary part; all heads share the
    rotary key (decoupled RoPE). With `q_lora_rank` queries have their own latent.
    """

    attend = staticmethod(attend)  # replaceable by another implementation
    operations: type[KernelOperations] = KernelOperations

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        assert spec.mla is not None
        self.mla = mla = spec.mla
        self.window, self.dropout, self.interleaved = (
            spec.window,
            spec.dropout,
            spec.rope.interleaved,
        )
        self.scale = softmax_scale(spec)
        query_width = spec.heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
        bias = spec.bias != "none"
        if mla.q_lora_rank:
            self.q_down = nn.Linear(spec.hidden, mla.q_lora_rank, bias=bias)
            self.q_latent_norm = RmsNorm(mla.q_lora_rank, eps=LATENT_EPS)
            self.q_up = nn.Linear(mla.q_lora_rank, query_width, bias=False)
        else:
            self.q = nn.Linear(spec.hidden, query_width, bias=bias)
        self.kv_down = nn.Linear(spec.hidden, mla.kv_lora_rank + mla.qk_rope_head_dim, bias=bias)
        self.kv_latent_norm = RmsNorm(mla.kv_lora_rank, eps=LATENT_EPS)
        self.kv_up = nn.Linear(
            mla.kv_lora_rank, spec.heads * (mla.qk_nope_head_dim + mla.v_head_dim), bias=False
        )
        self.o = nn.Linear(spec.heads * mla.v_head_dim, spec.hidden, bias=spec.bias == "all")

    def forward(
        self, x: Tensor, rope: tuple[Tensor, Tensor] | None, documents: Documents | None = None
    ) -> Tensor:
        """The attention output of `x`; `rope` are the tables of its positions."""
        mla = self.mla
        q = self.q_up(self.q_latent_norm(self.q_down(x))) if mla.q_lora_rank else self.q(x)
        q = q.unflatten(-1, (-1, mla.qk_nope_head_dim + mla.qk_rope_head_dim))
        latent, rotary_key = self.kv_down(x).split((mla.kv_lora_rank, mla.qk_rope_head_dim), dim=-1)
        kv = self.kv_up(self.kv_latent_norm(latent)).unflatten(
            -1, (-1, mla.qk_nope_head_dim + mla.v_head_dim)
        )
        key, value = kv.split((mla.qk_nope_head_dim, mla.v_head_dim), dim=-1)
        rotary_key = rotary_key.unsqueeze(-2)
        if rope is not None:
            plain, rotary = q.split((mla.qk_nope_head_dim, mla.qk_rope_head_dim), dim=-1)
            rotary, rotary_key = self.operations.rotate(rotary, rotary_key, rope, self.interleaved)
            q = torch.cat((plain, rotary), dim=-1)
        key = torch.cat((key, rotary_key.expand(*key.shape[:-1], -1)), dim=-1)
        dropout = self.dropout if self.training else 0.0
        out = self.attend(
            q,
            key,
            value,
            window=self.window,
            dropout=dropout,
            scale=self.scale,
            documents=documents,
        )
        return cast(Tensor, self.o(out))


def softmax_scale(spec: ModelSpec) -> float:
    """1 / sqrt(query width), times YaRN's squared temperature with `mscale_all_dim` (DeepSeek)."""
    assert spec.mla is not None
    scale = (spec.mla.qk_nope_head_dim + spec.mla.qk_rope_head_dim) ** -0.5
    scaling = spec.rope.scaling if spec.position == "rope" else None
    if scaling is None or not scaling.mscale_all_dim:
        return float(scale)
    return float(scale * yarn_mscale(scaling.factor, scaling.mscale_all_dim) ** 2)
