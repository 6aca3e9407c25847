"""The rules that are on for everyone. Does not depend on Django."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from orchestrator.alerts.conditions import Condition

_TRAINING: Final = ("train", "external", "script")
NODE_LOST: Final = "node-lost"


@dataclass(frozen=True, slots=True)
class Builtin:
    """A rule: `for_s` is how long the condition must hold; None: about nodes."""

    name: str
    title: str
    description: str
    condition: Condition | None
    for_s: float = 0.0


BUILTINS: Final[Mapping[str, Builtin]] = {
    rule.name: rule
    for rule in (
        Builtin(
            "not-finite",
            "Loss or gradient is not finite",
            "The latest loss, validation loss or gradient norm is NaN or infinite.",
            Condition("nan", kinds=_TRAINING),
        ),
        Builtin(
            "no-progress",
            "No progress",
            "A running training run has logged nothing for 15 minutes.",
            Condition("no_progress", threshold=900.0, kinds=_TRAINING),
        ),
        Builtin(
            "slow",
            "Slower than predicted",
            "A training run has been below half of its predicted tokens per second for 10 minutes.",
            Condition("slow", threshold=0.5, kinds=("train",)),
            600.0,
        ),
        Builtin(
            "idle",
            "Devices are idle",
            "The devices of a training run have been less than 5% utilized for 15 minutes.",
            Condition("idle", threshold=0.05, kinds=_TRAINING),
            900.0,
        ),
        Builtin(
            NODE_LOST, "Node lost", "A node stopped responding, and its runs were ended.", None
        ),
    )
}
