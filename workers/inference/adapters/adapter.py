"""An adapter that a server has loaded: its name, its files, and where its factors are.

State only; `store` changes it. Does not depend on requests.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from workers.models.adapters.peft_files import LowRank

_NUMBERS = itertools.count(1)


@dataclass(eq=False, slots=True)
class Adapter:
    """`number` is never used again, also not for the same name loaded again.

    `updates` are its factors in host memory by the linears' full names, None while they are on
    disk only; `digest` is of its file of tensors. `slot` is its place in the model's memory.
    """

    name: str
    folder: Path
    rank: int
    digest: str
    updates: Mapping[str, LowRank] | None
    quantized: str | None = None  # how its base was stored while it was trained
    number: int = field(default_factory=lambda: next(_NUMBERS))
    slot: int | None = None
    used: int = 0  # when it was last used, in admissions of the store
    requests: int = 0  # admitted so far
    unloaded: bool = False

    @property
    def cache_root(self) -> bytes:
        """The key before that of a sequence's first cache block: no other adapter shares them."""
        return b"adapter" + self.number.to_bytes(8)
