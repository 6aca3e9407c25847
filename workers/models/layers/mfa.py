"""Multi-matrix factorization attention (arXiv 2412.19255): low-rank queries, one key-value head.

Does not depend on caches or parallelism. Shapes: B batch, S sequence, H heads, D head_dim.
"""

from __future__ import annotations

from torch import Tensor, nn

from workers.contracts.specs.model import ModelSpec
from workers.models.layers.attention import AttentionBase
from workers.models.layers.documents import Documents
from workers.models.layers.norms import RmsNorm


class FactorisedAttention(AttentionBase):
    """`[B, S, hidden]` → `[B, S, hidden]`, with a norm on the query latent."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        assert spec.mfa is not None
        mfa, bias = spec.mfa, spec.bias != "none"
        self.head_dim = mfa.head_dim
        self.window, self.dropout, self.interleaved = (
            spec.window,
            spec.dropout,
            spec.rope.interleaved,
        )
        self.q_down = nn.Linear(spec.hidden, mfa.qk_rank, bias=bias)
        self.q_latent_norm = RmsNorm(mfa.qk_rank, eps=spec.norm_eps)
        self.q_up = nn.Linear(mfa.qk_rank, mfa.heads * mfa.head_dim, bias=False)
        self.k = nn.Linear(spec.hidden, mfa.head_dim, bias=bias)
        self.v = nn.Linear(spec.hidden, mfa.head_dim, bias=bias)
        self.o = nn.Linear(mfa.heads * mfa.head_dim, spec.hidden, bias=spec.bias == "all")
        self.q_norm = RmsNorm(mfa.head_dim, eps=spec.norm_eps) if spec.qk_norm else None
        self.k_norm = RmsNorm(mfa.head_dim, eps=spec.norm_eps) if spec.qk_norm else None

    def forward(
        self, x: Tensor, rope: tuple[Tensor, Tensor] | None, documents: Documents | None = None
    ) -> Tensor:
        """The attention output of `x`; `rope` are the tables of its positions."""
        q = self.q_up(self.q_latent_norm(self.q_down(x))).unflatten(-1, (-1, self.head_dim))
        k, v = self.k(x).unsqueeze(-2), self.v(x).unsqueeze(-2)
        return self.attend_heads(q, k, v, rope, documents)
