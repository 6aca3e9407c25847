"""A plan's recomputation put on the blocks of a model: the forward method is wrapped, not the
module.

So parameters keep their names. Does not know shards or precision: what a block's forward is by
then, is run again.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from workers.contracts.specs.plan import Recompute
from workers.models.decoder import Decoder
from workers.training.recompute.checkpointing import Recomputed
from workers.training.recompute.selective import keeps_products


def apply_recompute(decoder: Decoder, kind: Recompute) -> None:
    """Run blocks again in the backward pass (arXiv 1604.06174), whole or but for their products.

    `auto` is `full` until `auto.choose_recompute` has measured what is worth keeping.
    """
    if kind == "none":
        return
    for block in decoder.blocks.values():
        rule = keeps_products if kind == "selective" else None
        before = partial(
            _gather,
            [each for each in block.modules() if each is not block and hasattr(each, "unshard")],
        )
        block.forward = Recomputed(block.forward, rule, sums=kind == "selective", before=before)


def _gather(sharded_apart: list[Any]) -> None:
    """Weights that a block does not gather itself, those of experts: some runs of it find them
    whole, others do not.
    """
    for module in sharded_apart:
        module.unshard()


def recomputed_blocks(decoder: Decoder) -> list[Any]:
    """The blocks whose `forward` is a `Recomputed`, in order of depth."""
    return [block for block in decoder.blocks.values() if isinstance(block.forward, Recomputed)]
