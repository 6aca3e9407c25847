"""Dropout masks by seed, sample and layer: the same under any number of ranks, stages and resumes.

Heads of tensor-parallel ranks draw their own masks, which depend on the number of ranks.
"""

from __future__ import annotations

from typing import Any

import torch

from workers.models.decoder import Decoder
from workers.models.initialize import derived_seed


class Dropout:
    """Seeds the generator before each layer's forward pass.

    `sample` is the first sample of the current micro-batch. `place` distinguishes ranks that hold
    other positions of the same sequences.
    """

    def __init__(self, parts: list[Decoder], *, seed: int, place: int = 0) -> None:
        self.seed, self.place, self.sample = seed, place, 0
        for part in parts:
            if part.spec.dropout:
                part.register_forward_pre_hook(self._hook("embedding"))
                for layer, block in part.blocks.items():
                    block.register_forward_pre_hook(self._hook(layer))

    def _hook(self, layer: str) -> Any:
        def before(module: Any, args: Any) -> None:
            if module.training:
                place = (self.place,) if self.place else ()
                torch.manual_seed(derived_seed(self.seed, "dropout", self.sample, layer, *place))

        return before
