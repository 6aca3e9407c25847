"""One combination of techniques that the training engine refuses."""

from __future__ import annotations

from dataclasses import dataclass

from workers.contracts.base import Problem, problem
from workers.contracts.specs.training_rules.techniques import Combination


@dataclass(frozen=True, slots=True)
class Exclusion:
    """Techniques that cannot be combined. Texts are format strings of `plan` and `train`.

    `label` is the short form for lists. A row of `scope` "plan" is decided by the plan alone.
    """

    techniques: tuple[str, ...]
    field: str
    label: str
    message: str
    hint: str
    scope: str = "run"

    def problem(self, c: Combination) -> tuple[str, Problem]:
        """The label and the problem of a combination that it refuses."""
        label, message = (
            text.format(plan=c.plan, train=c.train, ranks=c.plan.dp * c.plan.cp)
            for text in (self.label, self.message)
        )
        return label, problem(self.field, message, self.hint)
