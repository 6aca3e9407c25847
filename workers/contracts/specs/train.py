"""Bodies of training, benchmark and external runs; `inference` has the others.

Fields and defaults only; `run` checks how bodies, model, plan and resources fit together.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from workers.contracts.base import Contract, Refused
from workers.contracts.specs.data import DataSpec
from workers.contracts.specs.finetuning.adapters import AdapterSpec
from workers.contracts.specs.finetuning.objectives import (
    BODIES,
    DistillBody,
    DpoBody,
    Objective,
    RewardBody,
    SftBody,
    default_body,
)
from workers.contracts.specs.finetuning.reinforcement import GrpoBody, PolicyBody, PpoBody
from workers.contracts.specs.inference import EvaluateBody, Rate
from workers.contracts.specs.model import Count, ModelSource, ModelSpec, Positive

RoundingFormat = Literal["int8", "int4"]  # of quantization-aware training
OptimizerName = Literal["adamw", "adafactor", "lion", "muon", "sgd", "adamw8bit"]

# defaults by optimizer: torch.optim's own, Lion's from arXiv 2302.06675
_OPTIMIZER_DEFAULTS: dict[str, dict[str, Any]] = {
    "adamw": {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.01},
    "adamw8bit": {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.01},
    "adafactor": {"lr": 1e-2, "betas": (0.9, 0.999), "weight_decay": 0.0},
    "lion": {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.0},
    "muon": {
        "lr": 1e-3,
        "betas": (0.9, 0.999),
        "weight_decay": 0.1,
        "momentum": 0.95,
        "nesterov": True,
    },
    "sgd": {"lr": 1e-3, "betas": (0.9, 0.999), "weight_decay": 0.0},
}


class EvalSpec(Contract):
    """Validation on a held-out split, or on `data`, every `every_steps` steps."""

    every_steps: Positive = 100
    batches: Positive = 8
    data: DataSpec | None = None


class OptimizerSpec(Contract):
    """An update rule; defaults depend on its name (torch.optim's defaults).

    `momentum`, `nesterov`, `ns_steps` are for sgd and muon. `scalar_lr` is the AdamW learning rate
    that muon uses for parameters that are not matrices (default: lr). `lora_plus_ratio` multiplies
    the rate of the matrices B of low-rank adapters (LoRA+, arXiv 2402.12354). With `paged` states
    are in a GPU's unified memory, which moves to the host when it is full (QLoRA).
    """

    name: OptimizerName = "adamw"
    lr: Rate = 1e-3
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (
        0.9,
        0.999,
    )
    eps: Annotated[float, Field(gt=0)] = 1e-8
    weight_decay: Rate = 0.01
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    nesterov: bool = False
    ns_steps: Positive = 5
    scalar_lr: Rate | None = None
    lora_plus_ratio: Annotated[float, Field(gt=0)] | None = None
    paged: bool = False

    @model_validator(mode="before")
    @classmethod
    def _by_name(cls, data: Any) -> Any:
        if isinstance(data, dict):
            return {**_OPTIMIZER_DEFAULTS.get(str(data.get("name", "adamw")), {}), **data}
        return data


class LrSchedule(Contract):
    """Learning rate over steps: linear warmup, then the named shape to `min_lr` at the last step.

    `wsd` (warmup, stable, decay; arXiv 2404.06395) decays linearly over the last `decay_steps`
    (default: a tenth).
    """

    name: Literal["constant", "cosine", "linear", "wsd"] = "constant"
    warmup_steps: Count = 0
    min_lr: Rate = 0.0
    decay_steps: Count | None = None


class CheckpointSpec(Contract):
    """A checkpoint every `every_steps` steps, of which the newest `keep` are retained.

    With `async` they are written in the background.
    """

    every_steps: Positive = 200
    keep: Positive = 3
    async_: bool = Field(default=True, validation_alias="async", serialization_alias="async")


class SamplesSpec(Contract):
    """Texts that the model generates at every checkpoint and at the end of its training.

    They continue `prompts`, or `count` excerpts of the held-out text (0: none), by at most
    `max_tokens`. Temperature 0 is greedy. The same seed gives the same random numbers at every step
    and under every plan.
    """

    count: Annotated[int, Field(ge=0, le=8)] = 3
    prompts: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=4000)]], Field(max_length=8)
    ] = []
    max_tokens: Annotated[int, Field(ge=1, le=512)] = 40
    temperature: Rate = 0.8


class TrainBody(Contract):
    """Training: objective, steps, optimizer, evaluation, checkpoints and initial weights.

    The field of the objective's name holds its options. `freeze` lists name patterns (fnmatch) of
    parameters that are not trained. With `evaluate` a run of kind evaluate follows that compares
    the last checkpoint with the initial weights. `allow_data_change` continues a checkpoint of
    other data, which is refused otherwise.
    """

    objective: Objective = "pretrain"
    sft: SftBody | None = None
    dpo: DpoBody | None = None
    reward: RewardBody | None = None
    distill: DistillBody | None = None
    grpo: GrpoBody | None = None
    ppo: PpoBody | None = None
    steps: Positive
    seq_len: Positive
    seed: Count = 0
    eval: EvalSpec | None = None
    evaluate: EvaluateBody | None = None
    optimizer: OptimizerSpec = OptimizerSpec()
    lr_schedule: LrSchedule = LrSchedule()
    clip_norm: Annotated[float, Field(gt=0)] | None = None
    accumulate: Positive | None = None
    checkpoint: CheckpointSpec | None = None
    samples: SamplesSpec | None = None
    init_from: ModelSource | None = None
    adapter: AdapterSpec | None = None
    freeze: list[Annotated[str, Field(min_length=1, max_length=200)]] = []
    compile: bool = False
    fused_kernels: bool = True
    quantize_aware: RoundingFormat | None = None
    log_every: Positive = 1
    allow_data_change: bool = False

    @model_validator(mode="before")
    @classmethod
    def _options(cls, data: Any) -> Any:
        """Require the objective's own options only; options with defaults may be absent."""
        if not isinstance(data, dict):
            return data
        objective = data.get("objective", "pretrain")
        for other in BODIES:
            if other != objective and data.get(other) is not None:
                raise Refused(
                    f"objective is {objective} but options of {other} are given",
                    f"Use objective {other}, or remove {other}.",
                    field=other,
                )
        if data.get(objective) is None:
            if objective == "distill":
                raise Refused(
                    "distillation needs a teacher",
                    'Use "distill": {"teacher": {"path": "DIR"}}.',
                    field="distill",
                )
            if objective in ("grpo", "ppo"):
                raise Refused(
                    "policy optimization needs rewards",
                    f'Use "{objective}": {{"rewards": [{{"kind": "exact"}}]}}.',
                    field=str(objective),
                )
            if (options := default_body(str(objective))) is not None:
                data = {**data, objective: options}
        return data

    @property
    def policy(self) -> PolicyBody | None:
        """The options of policy optimization; None for other objectives."""
        return self.grpo or self.ppo

    @property
    def compares(self) -> bool:
        """Whether a second, frozen module runs next to the trained one: a reference or teacher."""
        return (
            self.distill is not None
            or (self.dpo is not None and self.dpo.needs_reference)
            or (self.policy is not None and self.policy.needs_reference)
        )

    def trained_shape(self, model: ModelSpec) -> ModelSpec:
        """The shape of the trained model: of a reward model, `model` with a scalar head."""
        return model if self.reward is None else model.with_scalar_head()

    @property
    def pairs(self) -> bool:
        """Whether a row holds a chosen and a rejected answer."""
        return self.reward is not None or (self.dpo is not None and self.dpo.loss != "kto")

    @property
    def reference(self) -> Literal["initial", "adapter_off"] | ModelSource | None:
        """The frozen model that preferences are compared with; None without one.

        By default the model without its adapter, if it is known, else a copy of its first weights.
        """
        options = self.dpo or self.policy
        if options is None or not options.needs_reference:
            return None
        off = self.adapter is not None and self.adapter.is_removable
        named = None if self.dpo is None else self.dpo.reference
        return named or ("adapter_off" if off else "initial")

    @property
    def holds_second(self) -> bool:
        """Whether a second module with weights of its own runs next to the trained one."""
        return self.compares and self.reference != "adapter_off"

    @property
    def writes(self) -> SamplesSpec | None:
        """The samples to generate, None for none; the default with checkpoints is SamplesSpec()."""
        # a reward model scores texts instead of writing some; rollouts are samples
        if self.reward is not None or self.policy is not None:
            return None
        spec = self.samples or (SamplesSpec() if self.checkpoint else None)
        return spec if spec and spec.count else None

    def validates(self, step: int) -> bool:
        """Whether validation runs after the step."""
        return self.eval is not None and step % self.eval.every_steps == 0

    def logs(self, step: int) -> bool:
        """Whether a point is recorded for the step."""
        return self.validates(step) or step % self.log_every == 0 or step == self.steps


class BenchmarkBody(Contract):
    """Variants of the run's plan on the same samples, each with one technique changed.

    Empty `techniques` means all of `benchmark.TECHNIQUES`. A variant trains `steps` steps in
    `repeats` repeats that alternate with other variants; each starts from the initial weights with
    `warmup_steps` that are not timed.
    """

    techniques: list[str] = []
    steps: Positive = 20
    seq_len: Positive = 128
    seed: Count = 0
    warmup_steps: Count = 2
    repeats: Annotated[int, Field(ge=1, le=100)] = 3
    optimizer: OptimizerSpec = OptimizerSpec()
    clip_norm: Annotated[float, Field(gt=0)] | None = None


class ExternalBody(Contract):
    """No options: the program runs elsewhere and reports by the recorder."""
