"""Parses what a planner request trains: `train` {objective, adapter, freeze, dpo, ...}, `teacher`.

Fields of `train` are those of a run's training body; steps and sequence length are left out. Does
not depend on formulas.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from workers.contracts.base import Problem, problem, validation_problems
from workers.contracts.specs.finetuning.freezing import frozen_problems
from workers.contracts.specs.model import ModelSpec
from workers.contracts.specs.train import TrainBody

_FIELDS = (
    "objective",
    "adapter",
    "freeze",
    "sft",
    "dpo",
    "reward",
    "grpo",
    "ppo",
    "distill",
    "init_from",
)


@dataclass(frozen=True, slots=True)
class Training:
    """What a request trains: its body, the shape of the trained model, and a teacher's shape."""

    train: TrainBody | None
    model: ModelSpec
    second: ModelSpec | None = None


def parse_training(
    value: Any, *, model: ModelSpec, seq_len: int, teacher: ModelSpec | None
) -> tuple[Training | None, list[Problem]]:
    """`value` is the request's `train`; None trains all weights."""
    if value is None:
        if teacher is None:
            return Training(None, model), []
        return None, [problem("teacher", "a teacher needs train.objective distill", "Use distill.")]
    if not isinstance(value, Mapping):
        return None, [
            problem("train", "train is an object", 'Use {"adapter": {"method": "lora"}}.')
        ]
    unknown = sorted(set(value) - set(_FIELDS))
    if unknown:
        message = f"{unknown[0][:60]!r} is not a field that the planner reads"
        return None, [
            problem(f"train.{unknown[0][:60]}", message, f"Use one of {', '.join(_FIELDS)}.")
        ]
    body: dict[str, Any] = {"steps": 1, "seq_len": seq_len, **value}
    if value.get("adapter") is not None:
        body.setdefault("init_from", {"path": "base"})
    if value.get("objective") == "distill" and teacher is not None:
        body["distill"] = {"teacher": {"path": "teacher"}, **(value.get("distill") or {})}
    try:
        train = TrainBody.from_dict(body)
    except ValidationError as error:
        return None, validation_problems(error, prefix="train")
    if train.policy is not None and train.policy.rollout.splits_devices:
        message = "a search or the submission of a run splits devices, an estimate does not"
        return None, [problem(f"train.{train.objective}.rollout.devices", message, "Use a number.")]
    shape = train.trained_shape(model)
    problems = frozen_problems(train, shape, None)
    if teacher is not None and train.distill is None:
        problems.append(
            problem("teacher", "a teacher needs train.objective distill", "Use distill.")
        )
    elif teacher is not None and teacher.vocab != model.vocab:
        message = f"its vocabulary has {teacher.vocab} tokens, the model's {model.vocab}"
        problems.append(problem("teacher", message, "Use a teacher with the same tokenizer."))
    return (None, problems) if problems else (Training(train, shape, teacher), [])
