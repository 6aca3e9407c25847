"""Applies a plan's recomputation to a model's blocks by wrapping forward methods, not modules.

So parameters keep their names. Does not depend on sharding or precision.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from workers.contracts.specs.plan import Recompute
from workers.models.decoder import Decoder
from workers.training.recompute.checkpointing import Recomputed
from workers.training.recompute.selective import saves_products


def apply_recompute(decoder: Decoder, kind: Recompute) -> None:
    """Recompute blocks in the backward pass (arXiv 1604.06174), fully or except their matrix
    products.

    `auto` acts as `full` until `auto.choose_recompute` has measured and chosen.
    """
    if kind == "none":
        return
    for block in decoder.blocks.values():
        rule = saves_products if kind == "selective" else None
        before = partial(
            _gather,
            [each for each in block.modules() if each is not block and hasattr(each, "unshard")],
        )
        block.forward = Recomputed(
            block.forward, rule, save_sums=kind == "selective", before=before
        )


def _gather(sharded_apart: list[Any]) -> None:
    """Gather weights that a block does not gather itself (experts), equally in every run of the
    block.
    """
    for module in sharded_apart:
        module.unshard()


def recomputed_blocks(decoder: Decoder) -> list[Any]:
    """The blocks whose `forward` is a `Recomputed`, in order of depth."""
    return [block for block in decoder.blocks.values() if isinstance(block.forward, Recomputed)]
