"""What an operation tells the gate: each kernel configuration it ships, as it would be launched.

Knows no compiler; imports without triton.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ShippedKernel:
    """One kernel with its types and constants.

    `signature`: argument -> triton type ("*bf16", "fp32", "i32"), constexprs left out. Pointers
    count as aligned
    to 16 bytes, as torch allocates; an integer that is always a multiple of 16 says so: "i32:16".
    `expects`: words that the PTX must contain ("wgmma", "mma.sync", "cp.async", "setmaxnreg").
    `spills_ok`: the reason why this one may spill registers; None means it must not.
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
