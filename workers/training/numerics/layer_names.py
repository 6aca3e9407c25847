"""Which layer of the model a parameter belongs to, and what layers are called in metrics.

Knows names alone.
"""

from __future__ import annotations

import re

_BLOCK = re.compile(r"^blocks\.(\d+)\.")


def layer_of(name: str) -> int | None:
    """The block that holds a parameter; None of embeddings, the last norm and the head."""
    found = _BLOCK.match(name)
    return int(found[1]) if found else None


def layer_name(layer: int, layers: int) -> str:
    """`layer_07`: as many digits as the last layer has, so that names sort as layers lie."""
    return f"layer_{layer:0{len(str(layers - 1))}}"


def group_names(layers: int) -> list[str]:
    """Everything a model is made of, in order of depth: the embedding, its layers, the head with
    the norm before it.
    """
    return ["embedding", *(layer_name(layer, layers) for layer in range(layers)), "head"]


def group_of(name: str, layers: int) -> int:
    """A parameter's place in `group_names`.

    A weight that embedding and head share is the embedding's.
    """
    layer = layer_of(name)
    if layer is not None:
        return 1 + layer
    return 0 if name.startswith(("embed.", "positions.")) else 1 + layers
