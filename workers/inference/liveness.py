"""Liveness marks of an engine: one per layer, so a long prompt does not look like a hang.

Writes to a beacon, which the launcher watches.
"""

from __future__ import annotations

from workers.inference.engine import Engine
from workers.metrics.beacon import Beacon
from workers.models.decoder import Decoder

COMPUTES, IDLES = "forward", "idle"


def mark_engine_layers(engine: Engine, beacon: Beacon) -> None:
    """Mark every layer that the engine computes; 2 microseconds per layer."""
    mark_layers(engine.runner.decoder, beacon)


def mark_layers(decoder: Decoder, beacon: Beacon) -> None:
    """Mark every layer that this decoder, or a copy of it, computes."""
    for block in decoder.blocks.values():
        block.register_forward_pre_hook(lambda block, args: beacon.mark(COMPUTES))
