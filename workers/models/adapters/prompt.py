"""Virtual tokens before the text: prompt tuning, and P-tuning with its encoder.

Shapes: B batch, S sequence, n virtual tokens. Does not depend on the attention's masks.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from workers.contracts.specs.finetuning.adapters import AdapterSpec
from workers.models.initialize import local_part

ENCODER = ("0", "2", "4")  # the linear layers; ReLU in between


class Prompt(nn.Module):
    """`n` embeddings that are trained (arXiv 2104.08691); of P-tuning, an MLP's outputs of them.

    P-tuning (arXiv 2103.10385): three linear layers of the model's width with ReLU in between.
    """

    def __init__(self, adapter: AdapterSpec, hidden: int) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.empty(adapter.size, hidden))
        self.initial = adapter.init
        self.encoder: nn.Sequential | None = None
        if adapter.method == "p_tuning":
            layers = [nn.Linear(hidden, hidden) for _ in ENCODER]
            self.encoder = nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2])

    def forward(self, x: Tensor) -> Tensor:
        """The embeddings `[B, S, hidden]` of tokens with the virtual ones before: n + S."""
        tokens = self.embedding if self.encoder is None else self.encoder(self.embedding)
        return torch.cat([tokens.to(x.dtype).expand(x.shape[0], -1, -1), x], dim=1)

    @torch.no_grad()
    def take(self, table: Tensor) -> None:
        """Begin with embeddings of real tokens: evenly spaced rows of the base's full table.

        Random ones often do not learn (arXiv 2104.08691, section 3.2).
        """
        if self.initial == "random":
            return
        local, place = local_part(self.embedding)
        count, vocab = self.embedding.shape[0], table.shape[0]
        rows = table[torch.arange(count) * vocab // count]
        local.copy_(rows[place])


@torch.no_grad()
def encoded(tensors: Mapping[str, Tensor]) -> Tensor:
    """The virtual tokens `[n, hidden]` that the parameters of a `Prompt` give."""
    x = tensors["prompt.embedding"].detach().cpu()
    for name in ENCODER:
        weight = tensors.get(f"prompt.encoder.{name}.weight")
        if weight is not None:
            x = functional.linear(x, weight.cpu(), tensors[f"prompt.encoder.{name}.bias"].cpu())
            x = functional.relu(x) if name != ENCODER[-1] else x
    return x.contiguous()
