"""The metrics that an evaluate run requests. Loads no torch."""

from __future__ import annotations

from collections.abc import Sequence

from workers.contracts.specs.inference_support import (
    ANSWERS,
    CHOICES,
    EVALUATION_METRICS,
    LIKELIHOOD,
    ROUGE,
)
from workers.runtime.exit_codes import UserError

__all__ = ["ANSWERS", "CHOICES", "LIKELIHOOD", "ROUGE", "read_metrics"]


def read_metrics(requested: Sequence[str]) -> tuple[str, ...]:
    """Each metric once, in the requested order; `rouge` means all of ROUGE.

    Raises UserError for an unknown metric or an empty list.
    """
    known = ", ".join(EVALUATION_METRICS)
    if not requested:
        raise UserError(f"evaluate.metrics: the list is empty. Use some of {known}.")
    names: dict[str, None] = {}
    for name in requested:
        if name not in EVALUATION_METRICS:
            raise UserError(f"evaluate.metrics: unknown metric {name!r}; choose from {known}")
        names |= dict.fromkeys(ROUGE if name == "rouge" else (name,))
    return tuple(names)
