"""Computes a model without its adapter for a while: the reference of preference optimization.

Does not depend on which method the adapter is, nor on how parameters are sharded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from workers.models.adapters.linear import AdaptedLinear
from workers.models.decoder import Block, Decoder
from workers.models.layers.attention import AttentionBase

_SWITCHED = (AdaptedLinear, AttentionBase, Block)


@contextmanager
def disable_adapter(parts: Sequence[Decoder]) -> Iterator[None]:
    """Within it, the parts compute what their frozen weights alone give.

    Of weights that are trained in place (BitFit, saved modules) the current values are used.
    """
    switched: list[Any] = [
        module for part in parts for module in part.modules() if isinstance(module, _SWITCHED)
    ]
    tokens = [(part, part.prompt, part.prefixed) for part in parts]
    for module in switched:
        module.adapter_off = True
    for part, _, _ in tokens:
        part.prompt, part.prefixed = None, 0
    try:
        yield
    finally:
        for module in switched:
            del module.adapter_off
        for part, prompt, prefixed in tokens:
            part.prompt, part.prefixed = prompt, prefixed
