"""Masks of illegal plans in a table: the contract's legality rules evaluated on NumPy columns.

Does not depend on memory or speed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from workers.contracts.specs.legality import legality_rules
from workers.contracts.specs.model import ModelSpec

Mask = NDArray[np.bool_]


def illegal(
    columns: Mapping[str, Any],
    *,
    model: ModelSpec | None,
    seq_len: int | None = None,
    devices: Any = None,
) -> dict[str, Mask]:
    """A mask of illegal plans for each reason that applies to any; other plans are legal.

    `columns` are those of `workers.contracts.specs.legality.plan_columns`, as integers or arrays
    that broadcast against each other; the ones that rules call optional may be absent.
    """
    arrays = {name: np.asarray(value) for name, value in columns.items()}
    masks = {
        rule.name: np.asarray(rule.broken(arrays), bool)
        for rule in legality_rules(model=model, seq_len=seq_len, devices=devices)
        if not rule.optional or rule.optional in arrays
    }
    return {reason: mask for reason, mask in masks.items() if mask.any()}
