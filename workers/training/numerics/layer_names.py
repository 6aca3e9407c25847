"""Maps parameter names to layers, and layers to their names in metrics."""

from __future__ import annotations

import re

_BLOCK = re.compile(r"^blocks\.(\d+)\.")


def layer_of(name: str) -> int | None:
    """The block of a parameter; None for embeddings, the last norm and the head."""
    match = _BLOCK.match(name)
    return int(match[1]) if match else None


def layer_name(layer: int, layers: int) -> str:
    """`layer_07`: padded to the last layer's digits, so that names sort by depth."""
    return f"layer_{layer:0{len(str(layers - 1))}}"


def group_names(layers: int) -> list[str]:
    """Groups of parameters by depth: embedding, layers, head with the norm before it."""
    return ["embedding", *(layer_name(layer, layers) for layer in range(layers)), "head"]


def group_of(name: str, layers: int) -> int:
    """A parameter's index in `group_names`; a tied weight belongs to the embedding."""
    layer = layer_of(name)
    if layer is not None:
        return 1 + layer
    return 0 if name.startswith(("embed.", "positions.")) else 1 + layers
