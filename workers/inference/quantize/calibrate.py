"""What the inputs of each linear are like on a text: sums of products, by which any change of a
weight has its error.

A decoder is walked block by block: each block's inputs are what the blocks before it give as they
are by then. Knows no
way of quantising. Shapes: K inputs of a linear, N outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from workers.models.decoder import Block, Decoder
from workers.models.layers.attention import Attention
from workers.models.layers.mlp import Mlp


@dataclass(slots=True)
class Inputs:
    """Of one linear: `gram [K, K]` is XᵀX, `size [K]` the sum of |x| over `rows` tokens, `most` its largest; fp32."""

    gram: Tensor
    size: Tensor
    most: Tensor
    rows: int = 0

    def add(self, x: Tensor) -> None:
        flat = x.reshape(-1, x.shape[-1]).float()
        self.gram += flat.T @ flat
        self.size += flat.abs().sum(0)
        self.most = torch.maximum(self.most, flat.abs().amax(0))
        self.rows += len(flat)

    @property
    def mean(self) -> Tensor:
        """`[K]`: the mean magnitude of each input."""
        return self.size / max(1, self.rows)

    def error(self, change_NK: Tensor) -> float:
        """The sum over tokens and outputs of (change · x)², exactly: tr(change · gram · changeᵀ)."""
        change = change_NK.float()
        return float(((change @ self.gram) * change).sum())


@dataclass(slots=True)
class Walk:
    """Blocks in turn. In `with` of each, `inputs` has its linears' by their name in the block."""

    decoder: Decoder
    ids: list[Tensor]  # each [1, S]
    hidden: list[Tensor] = field(default_factory=list)

    @torch.no_grad()
    def blocks(self) -> Iterator[tuple[str, Block, dict[str, Inputs]]]:
        """The caller changes the block before it asks for the next."""
        self.hidden = [self.decoder.embedded(each) for each in self.ids]
        for number, block in self.decoder.blocks.items():
            assert isinstance(block, Block)
            yield number, block, self._inputs(block)
            self.hidden = [self._through(block, each) for each in self.hidden]

    def _through(self, block: Block, x: Tensor) -> Tensor:
        out: Tensor = block(x, self.decoder._rope_for(x.shape[1], x.device))
        return out

    def _inputs(self, block: Block) -> dict[str, Inputs]:
        found: dict[str, Inputs] = {}
        hooks = []
        same = (
            _SAME
            if isinstance(block.attn, Attention) and isinstance(block.mlp, Mlp) and block.mlp.gate
            else {}
        )
        for name, module in block.named_modules():
            if name in same:
                found[name] = found[same[name]]
            elif isinstance(module, nn.Linear):
                width = module.in_features
                device = module.weight.device
                found[name] = Inputs(
                    torch.zeros(width, width, device=device),
                    torch.zeros(width, device=device),
                    torch.zeros(width, device=device),
                )
                hooks.append(module.register_forward_pre_hook(partial(_taken, found[name])))
        try:
            for each in self.hidden:
                self._through(block, each)
        finally:
            for hook in hooks:
                hook.remove()
        return found


_SAME = {"attn.k": "attn.q", "attn.v": "attn.q", "mlp.up": "mlp.gate"}  # layers of the same input


def _taken(inputs: Inputs, module: nn.Module, given: tuple[Any, ...]) -> None:
    inputs.add(given[0])


def damped(gram: Tensor, share: float = 0.01) -> Tensor:
    """With `share` of the mean diagonal added, so that inputs that never occurred do not make it
    singular.
    """
    return gram + torch.eye(len(gram), device=gram.device) * (
        share * float(gram.diagonal().mean()) + 1e-8
    )


Rounding = Callable[[Tensor], Tensor]  # a weight [N, K] to what it becomes
