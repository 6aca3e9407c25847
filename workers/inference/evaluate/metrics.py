"""What an evaluate run's body asks for, from the names that the contract knows.

Computes nothing and loads no torch.
"""

from __future__ import annotations

from collections.abc import Sequence

from workers.contracts.specs.inference_support import ANSWERS, CHOICES, EVALUATION_METRICS, LIKELIHOOD, ROUGE
from workers.runtime.exits import UserError

__all__ = ["ANSWERS", "CHOICES", "LIKELIHOOD", "ROUGE", "read_metrics"]


def read_metrics(given: Sequence[str]) -> tuple[str, ...]:
    """Each once, in the order asked for; `rouge` is all of ROUGE.

    Raises UserError for one that is unknown, or none.
    """
    if not given:
        raise UserError(f"evaluate.metrics: it names none; try some of {', '.join(EVALUATION_METRICS)}")
    found: dict[str, None] = {}
    for name in given:
        if name not in EVALUATION_METRICS:
            raise UserError(
                f"evaluate.metrics: {name!r} is no metric; there are {', '.join(EVALUATION_METRICS)}"
            )
        found |= dict.fromkeys(ROUGE if name == "rouge" else (name,))
    return tuple(found)
