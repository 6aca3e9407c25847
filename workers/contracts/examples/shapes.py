"""Which examples an objective trains on, and the conversion of pairs to labelled answers.

Does not read files.
"""

from __future__ import annotations

from workers.contracts.examples.example import Example, LineError, Shape
from workers.contracts.specs.data import ExampleFormat
from workers.contracts.specs.train import TrainBody

FORMATS: dict[Shape, tuple[ExampleFormat, ...]] = {
    "answers": ("messages", "prompt_completion", "alpaca", "sharegpt"),
    "pairs": ("preference", "alpaca", "sharegpt"),
    "labels": ("labelled", "preference", "alpaca", "sharegpt"),
}
_EXPECTED: dict[Shape, tuple[str, str]] = {
    "answers": ("one answer per line", "Use another train.objective for these lines."),
    "pairs": ("pairs", "Use lines with chosen and rejected, or train.dpo.loss kto for labels."),
    "labels": ("labelled answers", "Use lines with a label, or train.dpo.loss dpo for pairs."),
}
_NAMES: dict[Shape, str] = {
    "answers": "one answer",
    "pairs": "a chosen and a rejected answer",
    "labels": "a label",
}


def needed_shape(train: TrainBody) -> Shape | None:
    """The shape of the examples that a body trains on; None for pretraining on text."""
    if train.objective in ("sft", "distill"):
        return "answers"
    if train.objective == "reward":
        return "pairs"
    if train.objective == "dpo":
        return "labels" if train.dpo is not None and train.dpo.loss == "kto" else "pairs"
    return None


def as_shape(example: Example, shape: Shape) -> list[Example]:
    """The example in the requested shape: a pair is also two labelled answers.

    Raises LineError if it does not have that shape.
    """
    if example.shape == shape:
        return [example]
    if shape == "labels" and example.shape == "pairs":
        return [
            Example((text,), label=label, tools=example.tools)
            for text, label in zip(example.texts, (True, False), strict=True)
        ]
    expected, hint = _EXPECTED[shape]
    raise LineError(f"has {_NAMES[example.shape]}, this objective trains on {expected}", hint)
