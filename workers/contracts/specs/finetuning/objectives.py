"""Options of the fine-tuning objectives: the field `train.<objective>` of a training body.

Fields and defaults only; `run` checks how they fit the data, the model and the adapter. Does not
hold the formulas, which the engine implements.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from workers.contracts.base import Contract, Refused
from workers.contracts.specs.finetuning.reinforcement import GrpoBody, PpoBody
from workers.contracts.specs.model import ModelSource, Positive

Objective = Literal["pretrain", "sft", "dpo", "reward", "grpo", "ppo", "distill"]
PreferenceLoss = Literal["dpo", "cdpo", "hinge", "ipo", "kto", "orpo", "simpo"]
# losses of preference optimization that compare with a frozen reference model
REFERENCED: tuple[PreferenceLoss, ...] = ("dpo", "cdpo", "hinge", "ipo", "kto")

PositiveRate = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Reference = Annotated[
    Annotated[Literal["initial", "adapter_off"], Tag("@name")]
    | Annotated[ModelSource, Tag("@source")],
    Discriminator(lambda value: "@name" if isinstance(value, str) else "@source"),
]


class SftBody(Contract):
    """Supervised fine-tuning on conversations or on prompts with completions.

    `train_on` selects the tokens with loss: those of the assistant's turns up to and including each
    stop token, those of the completion (the last answer), or all. With `packing` several samples
    share one sequence and attention stays within each; without it every sample is one padded row.
    `template` is a chat template (jinja) in place of the tokenizer's own.
    """

    train_on: Literal["assistant", "completion", "all"] = "assistant"
    packing: bool = True
    template: Annotated[str, Field(min_length=1, max_length=100_000)] | None = None


class DpoBody(Contract):
    """Preference optimization on pairs, or for `kto` on labelled answers.

    `beta` scales log-probability ratios (arXiv 2305.18290); `label_smoothing` is the rate of wrong
    labels that `cdpo` assumes; `gamma` is the target margin of `simpo`; `desirable_weight` and
    `undesirable_weight` multiply the losses of `kto`'s good and bad answers. `reference` is the
    frozen model: a copy of the initial weights (default), the model without its adapter (default
    with one that leaves the model's weights as they are), or other weights. `orpo` and `simpo` use
    none. `template` is a chat template in place of the tokenizer's own.
    """

    loss: PreferenceLoss = "dpo"
    beta: PositiveRate = 0.1
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] | None = None
    gamma: Annotated[float, Field(ge=0)] | None = None
    desirable_weight: PositiveRate | None = None
    undesirable_weight: PositiveRate | None = None
    reference: Reference | None = None
    template: Annotated[str, Field(min_length=1, max_length=100_000)] | None = None

    @model_validator(mode="after")
    def _fits_loss(self) -> DpoBody:
        owners = {
            "label_smoothing": "cdpo",
            "gamma": "simpo",
            "desirable_weight": "kto",
            "undesirable_weight": "kto",
        }
        for field, loss in owners.items():
            if getattr(self, field) is not None and self.loss != loss:
                raise Refused(
                    f"{self.loss} has no {field}", f"Omit {field}, or use loss {loss}.", field=field
                )
        if self.reference is not None and not self.needs_reference:
            raise Refused(
                f"{self.loss} compares with no reference", "Omit the field.", field="reference"
            )
        return self

    @property
    def needs_reference(self) -> bool:
        """Whether the loss compares with a reference model."""
        return self.loss in REFERENCED

    @property
    def weights(self) -> tuple[float, float]:
        """The weights of good and of bad answers of `kto`."""
        return self.desirable_weight or 1.0, self.undesirable_weight or 1.0

    @property
    def smoothing(self) -> float:
        """The rate of wrong labels of `cdpo`."""
        return 0.1 if self.label_smoothing is None else self.label_smoothing

    @property
    def target_margin(self) -> float:
        """The target margin of `simpo` (arXiv 2405.14734)."""
        return 0.5 if self.gamma is None else self.gamma


class RewardBody(Contract):
    """A reward model by Bradley-Terry on pairs; the model gets one scalar head.

    `margin`: subtract each pair's `margin` from the difference of its rewards.
    """

    margin: bool = False
    template: Annotated[str, Field(min_length=1, max_length=100_000)] | None = None


TEACHER_MANIFEST = "teacher.json"  # in a folder of a teacher's stored tokens, which has no weights


class DistillBody(Contract):
    """Distillation from a teacher with the same tokenizer.

    `forward_kl` is KL(teacher, student), `reverse_kl` is KL(student, teacher), `jsd` generalized
    Jensen-Shannon divergence with weight `beta` of the teacher (arXiv 2306.13649). `teacher` is a
    model, or a folder with its `top_k` log-probabilities per token
    (`workers.training.precompute_teacher`); with `top_k` the teacher's distribution is over so many
    tokens. `on_policy` is the share of
    steps whose answers the student generates, of at most `max_new_tokens` each, at
    `sampling_temperature`.
    """

    teacher: ModelSource
    loss: Literal["forward_kl", "reverse_kl", "jsd"] = "forward_kl"
    beta: Fraction = 0.5
    temperature: PositiveRate = 1.0
    top_k: Positive | None = None
    on_policy: Fraction = 0.0
    max_new_tokens: Positive = 128
    sampling_temperature: Annotated[float, Field(ge=0)] = 1.0
    train_on: Literal["assistant", "completion", "all"] = "assistant"
    packing: bool = True
    template: Annotated[str, Field(min_length=1, max_length=100_000)] | None = None

    @model_validator(mode="after")
    def _fits_loss(self) -> DistillBody:
        if self.top_k is not None and self.loss != "forward_kl":
            raise Refused(
                f"{self.loss} requires probabilities of all tokens; top_k keeps only some",
                "Use loss forward_kl, or omit top_k.",
                field="top_k",
            )
        if self.on_policy and self.packing:
            raise Refused(
                "the student answers one prompt per row; packed rows have several",
                "Use packing false.",
                field="packing",
            )
        return self


# objectives that have options, and the field of a training body that holds them
BODIES: dict[str, type[Contract]] = {
    "sft": SftBody,
    "dpo": DpoBody,
    "reward": RewardBody,
    "distill": DistillBody,
    "grpo": GrpoBody,
    "ppo": PpoBody,
}


def default_body(objective: str) -> Contract | None:
    """The options of an objective whose fields all have defaults; None if it has none."""
    kind = BODIES.get(objective)
    return None if kind is None or kind in (DistillBody, GrpoBody, PpoBody) else kind()
