"""Options of reinforcement learning: the fields `train.grpo` and `train.ppo` of a training body.

Fields, defaults and contradictions between them. Does not hold the formulas.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from workers.contracts.base import Contract, Refused
from workers.contracts.specs.data import ExampleFormat
from workers.contracts.specs.finetuning.rewards import COMPARING, RewardSpec
from workers.contracts.specs.model import Count, ModelSource, Positive

Algorithm = Literal["grpo", "dr_grpo", "dapo", "rloo", "reinforce_pp"]
KlEstimator = Literal["k1_reward", "k2_loss", "k3_ratio_loss", "k3_loss"]
Correction = Literal["none", "truncated", "decoupled"]

_Text = Annotated[str, Field(min_length=1, max_length=100_000)]
# estimators whose gradient is not that of the divergence, with the reason that a refusal states
_COLLAPSING = {
    "k1_loss": "the expected gradient of k1 in the loss is zero, so the policy collapses",
    "k3_reward": "k3 in the reward has a biased gradient, and the policy collapses",
}


class KlSpec(Contract):
    """The penalty for leaving the reference: `coef` times an estimator of the divergence.

    `k1_reward` subtracts log(policy / reference) from the reward, `k2_loss` adds half its square to
    the loss, `k3_ratio_loss` adds the importance ratio times exp(-x) - 1 + x with its gradient:
    these reach the optimum of the penalized objective. `k3_loss` is the original GRPO's (arXiv
    2402.03300), whose optimum differs. `target`: adapt `coef` so that the divergence per token
    stays near it (arXiv 1909.08593).
    """

    coef: Annotated[float, Field(ge=0)] = 0.0
    estimator: KlEstimator = "k2_loss"
    target: Annotated[float, Field(gt=0)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_collapsing(cls, data: Any) -> Any:
        if isinstance(data, dict) and str(data.get("estimator")) in _COLLAPSING:
            raise Refused(
                f"estimator {data['estimator']}: {_COLLAPSING[str(data['estimator'])]}",
                "Use k1_reward, k2_loss or k3_ratio_loss.",
                field="estimator",
            )
        return data

    @model_validator(mode="after")
    def _target_needs_penalty(self) -> KlSpec:
        if self.target is not None and self.coef == 0:
            raise Refused(
                "kl.target has no effect because kl.coef is 0", "Use coef 0.05.", field="coef"
            )
        return self


class ClipSpec(Contract):
    """Importance ratios are clipped to 1 - `low` to 1 + `high` (arXiv 1707.06347, 2503.14476)."""

    low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    high: Annotated[float, Field(gt=0)] = 0.2


# parts with @ are left out of the field's name in problems
RolloutDevices = Annotated[
    Annotated[Literal["auto"], Tag("@auto")] | Annotated[Positive, Tag("@number")],
    Discriminator(lambda value: "@auto" if isinstance(value, str) else "@number"),
]


class RolloutSpec(Contract):
    """How answers are sampled.

    `sync`: `colocated` generates on the training devices between updates, `separate` on `devices`
    more devices (default 1) next to those of the plan. With "auto" a control plane splits
    `resources.devices` between both.
    """

    max_new_tokens: Positive = 128
    temperature: Annotated[float, Field(gt=0)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    devices: RolloutDevices | None = None
    sync: Literal["colocated", "separate"] = "colocated"

    @model_validator(mode="after")
    def _devices_are_separate(self) -> RolloutSpec:
        if self.sync == "colocated" and self.devices is not None:
            raise Refused(
                "colocated rollouts use the devices of the plan",
                "Use sync separate, or omit devices.",
                field="devices",
            )
        return self

    @property
    def separate_devices(self) -> int:
        """Devices besides those of the plan; 1 while a split is open."""
        number = self.devices if isinstance(self.devices, int) else 1
        return number if self.sync == "separate" else 0

    @property
    def splits_devices(self) -> bool:
        """Whether a control plane chooses the number of devices."""
        return self.devices == "auto"


class StalenessSpec(Contract):
    """By how many updates the weights that sampled may be older than those that learn (`max`).

    0: every answer is sampled with the weights that learn from it. `truncated` multiplies a
    token's loss by min(trainer's / sampler's probability, 2) without gradient. `decoupled` is the
    same with the trainer's probabilities computed before the first update of the iteration, without
    dropout, also if it has one update only (arXiv 2505.24298).
    """

    max: Count = 0
    correction: Correction = "none"


HANG_S = 300.0  # the default of ORRERY_HANG_S
# formats of lines with a prompt and, for rewards that compare, an answer
PROMPT_FORMATS: tuple[ExampleFormat, ...] = ("prompt_completion",)


class _PolicyBody(Contract):
    """What GRPO's family and PPO share.

    An iteration samples `group_size` answers to each of `prompts_per_step` prompts and updates from
    them in `minibatches` updates of equal size per epoch, for `epochs` epochs; `train.steps` counts
    updates. `on_reward_error` decides whether an answer whose reward fails ends the run or is left
    out. `template` is a chat template in place of the tokenizer's own.
    """

    rewards: Annotated[list[RewardSpec], Field(min_length=1, max_length=16)]
    clip: ClipSpec = ClipSpec()
    epochs: Annotated[int, Field(ge=1, le=64)] = 1
    minibatches: Annotated[int, Field(ge=1, le=1024)] = 1
    rollout: RolloutSpec = RolloutSpec()
    on_reward_error: Literal["fail", "skip"] = "fail"
    template: _Text | None = None
    group_size: int
    prompts_per_step: Positive = 16
    kl: KlSpec = KlSpec()
    staleness: StalenessSpec = StalenessSpec()

    @model_validator(mode="after")
    def _staleness_is_corrected(self) -> _PolicyBody:
        stale = self.staleness
        if stale.max and stale.correction == "none":
            raise Refused(
                f"answers that are up to {stale.max} updates old need a correction",
                "Use truncated or decoupled.",
                field="staleness.correction",
            )
        if stale.max and self.rollout.sync == "colocated":
            raise Refused(
                "answers sampled on the training devices are never older than the last update",
                "Use 0, or rollout.sync separate.",
                field="staleness.max",
            )
        if stale.correction != "none" and self.rollout.top_p < 1:
            raise Refused(
                "top_p changes the sampler's distribution, which the correction divides by",
                "Use top_p 1.",
                field="rollout.top_p",
            )
        return self

    @model_validator(mode="after")
    def _divides(self) -> _PolicyBody:
        names = self.reward_names
        repeated = next((name for name in names if names.count(name) > 1), None)
        if repeated is not None:
            raise Refused(
                f"two rewards are named {repeated}",
                'Use a "name" for each.',
                field="rewards",
            )
        if self.answers_per_step % self.minibatches:
            raise Refused(
                f"{self.answers_per_step} answers do not divide into {self.minibatches} "
                "minibatches",
                "Use a number that divides group_size x prompts_per_step.",
                field="minibatches",
            )
        return self

    @property
    def answers_per_step(self) -> int:
        """Answers that one generation phase samples."""
        return self.group_size * self.prompts_per_step

    @property
    def rows_per_update(self) -> int:
        """Answers of one optimizer update: the plan's global batch size."""
        return self.answers_per_step // self.minibatches

    @property
    def updates_per_step(self) -> int:
        """Optimizer updates from one generation phase."""
        return self.minibatches * self.epochs

    @property
    def reward_names(self) -> list[str]:
        """The names of the rewards' curves."""
        return [each.name or each.kind for each in self.rewards]

    @property
    def needs_answer(self) -> bool:
        """Whether a reward compares with the `answer` of a line."""
        return any(each.kind in COMPARING for each in self.rewards)

    @property
    def needs_reference(self) -> bool:
        """Whether the policy is compared with a frozen copy of its initial weights."""
        return self.kl.coef > 0

    @property
    def averages_tokens(self) -> bool:
        """Whether token losses are averaged over all tokens of an update, not answer by answer."""
        return True

    @property
    def corrects_mismatch(self) -> bool:
        """Whether losses are multiplied by the trainer's probabilities over the sampler's."""
        return self.staleness.correction != "none"


class GrpoBody(_PolicyBody):
    """Policy optimization from groups of `group_size` answers to each prompt, without a value
    model.

    `algorithm` decides advantages and how token losses are averaged: `grpo` (arXiv 2402.03300),
    `dr_grpo` (2503.20783), `dapo` (2503.14476), `rloo` (2402.14740), `reinforce_pp` (2501.03262).
    """

    algorithm: Algorithm = "grpo"
    group_size: Annotated[int, Field(ge=2, le=128)] = 8

    @model_validator(mode="before")
    @classmethod
    def _clip_of_algorithm(cls, data: Any) -> Any:
        """DAPO clips ratios at 1.28 above by default."""
        if isinstance(data, dict) and data.get("algorithm") == "dapo" and data.get("clip") is None:
            data = {**data, "clip": {"low": 0.2, "high": 0.28}}
        return data

    @property
    def averages_tokens(self) -> bool:
        """See the base class; GRPO, its correction and DAPO differ in this."""
        return self.algorithm in ("dapo", "rloo", "reinforce_pp")


class PpoKlSpec(KlSpec):
    """As `KlSpec`; PPO subtracts the divergence of each token from its reward by default."""

    coef: Annotated[float, Field(ge=0)] = 0.05
    estimator: KlEstimator = "k1_reward"


class PpoClipSpec(ClipSpec):
    """As `ClipSpec`; `value` limits how far an update moves a value from that at the start of the
    iteration (None: not at all).
    """

    value: Annotated[float, Field(gt=0)] | None = 0.2


class GaeSpec(Contract):
    """Generalized advantage estimation (arXiv 1506.02438): discount `gamma`, weight `lam`."""

    gamma: Annotated[float, Field(gt=0, le=1)] = 1.0
    lam: Annotated[float, Field(ge=0, le=1)] = 0.95


class ValueSpec(Contract):
    """The value model: the policy's shape with a scalar head, trained next to it.

    `init_from`: its initial weights, such as a reward model's; None: those of the policy with a new
    head. `coef` multiplies its loss; `lr` is its learning rate (None: the optimizer's).
    """

    init_from: ModelSource | None = None
    coef: Annotated[float, Field(gt=0)] = 0.5
    lr: Annotated[float, Field(gt=0)] | None = None


class PpoBody(_PolicyBody):
    """Proximal policy optimization (arXiv 1707.06347) with a value model.

    Advantages of tokens by `gae`, whitened over all tokens of an iteration. `rewards` score whole
    answers; `reward_model` is short for a reward of kind `model` with that path or run. Without
    `prompts_per_step` an iteration has as many prompts as fill the plan's batches.
    """

    group_size: Annotated[int, Field(ge=1, le=128)] = 1
    kl: PpoKlSpec = PpoKlSpec()
    clip: PpoClipSpec = PpoClipSpec()
    gae: GaeSpec = GaeSpec()
    value: ValueSpec = ValueSpec()

    @model_validator(mode="before")
    @classmethod
    def _reward_model(cls, data: Any) -> Any:
        """Make `reward_model` the first of the rewards."""
        if not isinstance(data, dict) or "reward_model" not in data:
            return data
        data = dict(data)
        source = data.pop("reward_model")
        if source is None:
            return data
        named = source if isinstance(source, dict) else {"path": source}
        if set(named) not in ({"path"}, {"run"}) or not isinstance(
            next(iter(named.values())), str | int
        ):
            raise Refused(
                "the reward model is neither a folder of weights nor a serve run",
                'Use {"path": "DIR"} or {"run": 12}.',
                field="reward_model",
            )
        entry = {"kind": "model", **named, "name": "reward_model"}
        rewards = data.get("rewards") or []
        data["rewards"] = [entry, *rewards] if isinstance(rewards, list) else rewards
        return data


PolicyBody = GrpoBody | PpoBody
