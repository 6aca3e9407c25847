"""Wraps a model's blocks in a plan's recomputation.

Does not depend on sharding or precision.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from workers.contracts.specs.plan import Recompute
from workers.models.decoder import Decoder
from workers.models.wrapped import wrapped, wrapper_of
from workers.training.recompute.checkpointing import Recomputed
from workers.training.recompute.selective import saves_products


def apply_recompute(decoder: Decoder, kind: Recompute) -> None:
    """Recompute blocks in the backward pass (arXiv 1604.06174), fully or except their matrix
    products.

    `auto` acts as `full` until `auto.choose_recompute` has measured and chosen.
    """
    if kind == "none":
        return
    for name, block in decoder.blocks.items():
        rule = saves_products if kind == "selective" else None
        recomputed = Recomputed(rule, save_sums=kind == "selective", before=_gather)
        decoder.blocks[name] = wrapped(block, recomputed)


def _gather(block: nn.Module) -> None:
    """Gather weights that a block does not gather itself (experts), equally in every run of the
    block.
    """
    module: Any
    for module in block.modules():
        if module is not block and hasattr(module, "unshard"):
            module.unshard()


def recomputed_blocks(decoder: Decoder) -> list[tuple[nn.Module, Recomputed]]:
    """The blocks with their `Recomputed`, in order of depth."""
    pairs = ((block, wrapper_of(block, Recomputed)) for block in decoder.blocks.values())
    return [(block, recomputed) for block, recomputed in pairs if recomputed is not None]
