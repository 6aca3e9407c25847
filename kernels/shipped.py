"""The kernel configurations that an operation ships, as the compile gate receives them.

Imports without triton.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ShippedKernel:
    """One kernel with its argument types and constants.

    `signature`: argument -> triton type ("*bf16", "fp32", "i32"), without constexprs. Pointers
    count as aligned to 16 bytes, as torch allocates; "i32:16" marks an integer that is always a
    multiple of 16. `expects`: instructions that the PTX must contain ("wgmma", "mma.sync",
    "cp.async", "setmaxnreg"). `spills_ok`: the reason why this kernel may spill registers; None if
    it must not.
    """

    op: str
    name: str
    fn: Any
    signature: Mapping[str, str]
    constexprs: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    expects: tuple[str, ...] = ()
    spills_ok: str | None = None
