"""Input statistics of each linear on calibration text, which give the error of any weight change.

A decoder is walked block by block: each block sees the outputs of the blocks already changed.
Does not depend on a quantization method. Shapes: K inputs of a linear, N outputs.
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
class InputStats:
    """Of one linear, fp32: `gram [K, K]` is XᵀX; `abs_sum [K]` and `abs_max [K]` of |x| over
    `rows` tokens.
    """

    gram: Tensor
    abs_sum: Tensor
    abs_max: Tensor
    rows: int = 0

    def add(self, x: Tensor) -> None:
        """Add inputs `[..., K]`."""
        flat = x.reshape(-1, x.shape[-1]).float()
        self.gram += flat.T @ flat
        self.abs_sum += flat.abs().sum(0)
        self.abs_max = torch.maximum(self.abs_max, flat.abs().amax(0))
        self.rows += len(flat)

    @property
    def mean(self) -> Tensor:
        """`[K]`: the mean magnitude of each input."""
        return self.abs_sum / max(1, self.rows)

    def error(self, change_NK: Tensor) -> float:
        """The sum over tokens and outputs of (change · x)²: tr(change · gram · changeᵀ)."""
        change = change_NK.float()
        return float(((change @ self.gram) * change).sum())


@dataclass(slots=True)
class BlockWalk:
    """Walks the blocks of a decoder on calibration windows."""

    decoder: Decoder
    ids: list[Tensor]  # each [1, S]
    hidden: list[Tensor] = field(default_factory=list)

    @torch.no_grad()
    def blocks(self) -> Iterator[tuple[str, Block, dict[str, InputStats]]]:
        """Each block's name, module and input statistics by the linear's name in the block.

        The caller changes the block before it takes the next one.
        """
        self.hidden = [self.decoder.embedded(window) for window in self.ids]
        for number, block in self.decoder.blocks.items():
            assert isinstance(block, Block)
            yield number, block, self._inputs(block)
            self.hidden = [self._through(block, x) for x in self.hidden]

    def _through(self, block: Block, x: Tensor) -> Tensor:
        out: Tensor = block(x, self.decoder._rope_for(x.shape[1], x.device))
        return out

    def _inputs(self, block: Block) -> dict[str, InputStats]:
        stats: dict[str, InputStats] = {}
        hooks = []
        same = (
            _SAME
            if isinstance(block.attn, Attention) and isinstance(block.mlp, Mlp) and block.mlp.gate
            else {}
        )
        for name, module in block.named_modules():
            if name in same:
                stats[name] = stats[same[name]]
            elif isinstance(module, nn.Linear):
                width = module.in_features
                device = module.weight.device
                stats[name] = InputStats(
                    torch.zeros(width, width, device=device),
                    torch.zeros(width, device=device),
                    torch.zeros(width, device=device),
                )
                hooks.append(module.register_forward_pre_hook(partial(_record_inputs, stats[name])))
        try:
            for x in self.hidden:
                self._through(block, x)
        finally:
            for hook in hooks:
                hook.remove()
        return stats


_SAME = {"attn.k": "attn.q", "attn.v": "attn.q", "mlp.up": "mlp.gate"}  # layers of the same input


def _record_inputs(inputs: InputStats, module: nn.Module, args: tuple[Any, ...]) -> None:
    inputs.add(args[0])


def damped(gram: Tensor, share: float = 0.01) -> Tensor:
    """Add `share` of the mean diagonal, so that inputs that never occurred do not make the matrix
    singular.
    """
    return gram + torch.eye(len(gram), device=gram.device) * (
        share * float(gram.diagonal().mean()) + 1e-8
    )


Rounding = Callable[[Tensor], Tensor]  # a weight [N, K] to its rounded values
