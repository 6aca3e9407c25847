"""Signs of life of an engine: a mark at every layer, so that a long prompt on a slow device does
not look like a hang.

Knows a decoder's blocks and a beacon; who looks at it is the launcher's.
"""

from __future__ import annotations

from workers.inference.engine import Engine
from workers.metrics.beacon import Beacon
from workers.models.decoder import Decoder

COMPUTES, IDLES = "forward", "idle"


def show_layers(engine: Engine, beacon: Beacon) -> None:
    """From now on; two microseconds a layer."""
    mark_layers(engine.runner.decoder, beacon)


def mark_layers(decoder: Decoder, beacon: Beacon) -> None:
    """Of whatever is computed through it, and through copies of it."""
    for block in decoder.blocks.values():
        block.register_forward_pre_hook(lambda block, given: beacon.mark(COMPUTES))
