"""The feed-forward network of a routing layer: router, routed and shared experts, load balancing.

Does not depend on parallelism. Shapes: B batch, S sequence.
"""

from __future__ import annotations

from torch import Tensor, nn

from workers.contracts.specs.model import ModelSpec, Moe
from workers.models.layers.documents import Documents
from workers.models.layers.mlp import Mlp
from workers.models.moe.experts import Experts, drop_beyond_capacity, most_assignments
from workers.models.moe.load_balance import LoadBalance
from workers.models.moe.router import Router


class RoutedMlp(nn.Module):
    """`[B, S, hidden]` → `[B, S, hidden]`: the sum of each token's `top_k` experts and of the
    shared ones.

    A capacity applies only in training; otherwise no token is dropped.
    """

    # replaceable, for a part of each sequence
    drop_beyond_capacity = staticmethod(drop_beyond_capacity)

    def __init__(self, spec: ModelSpec, moe: Moe) -> None:
        super().__init__()
        self.moe = moe
        self.router = Router(spec.hidden, moe)
        self.experts = Experts(spec, moe)
        self.shared = Mlp(spec, moe.shared_width) if moe.shared_experts else None
        self.balance = LoadBalance(moe)

    def forward(self, x: Tensor, documents: Documents | None = None) -> Tensor:
        """The output of `x`; a capacity counts per document."""
        weights, chosen, scores = self.router(x)
        assigned, most = chosen, None
        if self.training and self.moe.capacity is not None:
            experts, capacity = self.moe.experts, self.moe.capacity
            assigned = self.drop_beyond_capacity(
                chosen, experts=experts, capacity=capacity, documents=documents
            )
            complete = self.drop_beyond_capacity is drop_beyond_capacity
            if complete and (documents is None or documents.whole):
                batch, length, top_k = chosen.shape
                most = most_assignments(
                    batch, length, top_k=top_k, experts=experts, capacity=capacity
                )
        flat = (each.flatten(0, 1) for each in (x, weights, assigned))
        out = self.experts(*flat, most).view_as(x)
        if self.shared is not None:
            out = out + self.shared(x)
        balanced: Tensor = self.balance(out, scores, chosen)
        return balanced
