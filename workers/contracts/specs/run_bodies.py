"""The body of each kind of run: train, generate, serve, evaluate, script, benchmark, external.

Fields and defaults only; `run` checks how bodies, model, plan and resources fit together.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag, model_validator

from workers.contracts.base import Contract
from workers.contracts.catalog.presets import check_preset
from workers.contracts.specs.data import DataSpec
from workers.contracts.specs.model import Count, ModelSource, ModelSpec, Positive

Rate = Annotated[float, Field(ge=0)]
Quantize = Literal["int8", "int4", "fp8"]
RoundingFormat = Literal["int8", "int4"]  # of quantisation-aware training
CacheDtype = Literal["int8"]  # of keys and values; default: the weights' dtype
Objective = Literal["pretrain", "sft", "dpo", "reward", "grpo", "ppo", "distill"]
OptimizerName = Literal["adamw", "adafactor", "lion", "muon", "sgd", "adamw8bit"]


def _as_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


# a string or a list of strings, as OpenAI's `stop`
Stops = Annotated[list[str], BeforeValidator(_as_list, json_schema_input_type=list[str] | str)]


def _model_tag(value: Any) -> str:
    if isinstance(value, str):
        return "@preset"
    if isinstance(value, ModelSource) or (
        isinstance(value, dict) and ("path" in value or "package" in value)
    ):
        return "@source"
    return "@spec"


ModelRef = Annotated[
    Annotated[str, AfterValidator(check_preset), Tag("@preset")]
    | Annotated[ModelSpec, Tag("@spec")]
    | Annotated[ModelSource, Tag("@source")],
    Discriminator(_model_tag),
]

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
    that muon uses for parameters that are not matrices (default: lr).
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


class AdapterSpec(Contract):
    """Low-rank adapters (arXiv 2106.09685) on projections, all else frozen, for qlora in 4 bits."""

    name: Literal["lora", "qlora"] = "lora"
    rank: Positive = 16
    alpha: Annotated[float, Field(gt=0)] = 32.0
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    targets: list[Literal["q", "k", "v", "o", "gate", "up", "down"]] = ["q", "k", "v", "o"]


class TrainBody(Contract):
    """Training: objective, steps, optimizer, evaluation, checkpoints and initial weights."""

    objective: Objective = "pretrain"
    steps: Positive
    seq_len: Positive
    seed: Count = 0
    eval: EvalSpec | None = None
    optimizer: OptimizerSpec = OptimizerSpec()
    lr_schedule: LrSchedule = LrSchedule()
    clip_norm: Annotated[float, Field(gt=0)] | None = None
    accumulate: Positive | None = None
    checkpoint: CheckpointSpec | None = None
    samples: SamplesSpec | None = None
    init_from: ModelSource | None = None
    adapter: AdapterSpec | None = None
    compile: bool = False
    fused_kernels: bool = True
    quantize_aware: RoundingFormat | None = None
    log_every: Positive = 1

    @property
    def writes(self) -> SamplesSpec | None:
        """The samples to generate, None for none; the default with checkpoints is SamplesSpec()."""
        spec = self.samples or (SamplesSpec() if self.checkpoint else None)
        return spec if spec and spec.count else None

    def validates(self, step: int) -> bool:
        """Whether validation runs after the step."""
        return self.eval is not None and step % self.eval.every_steps == 0

    def logs(self, step: int) -> bool:
        """Whether a point is recorded for the step."""
        return self.validates(step) or step % self.log_every == 0 or step == self.steps


class SpeculateSpec(Contract):
    """Speculative decoding: at most `tokens` are drafted per answer and step.

    Drafts come from the run's draft model or, with `ngram`, from what followed the last `ngram`
    tokens earlier in the text. `adaptive` chooses the number by measured times, possibly 0.
    """

    ngram: Annotated[int, Field(ge=1, le=8)] | None = None
    tokens: Annotated[int, Field(ge=1, le=16)] = 4
    adaptive: bool = True


class GenerateBody(Contract):
    """Answers to a JSONL of prompts.

    Temperature 0 is greedy; top_k 0 and top_p 1 disable these filters.
    """

    input: str
    output: str
    max_new_tokens: Positive = 64
    temperature: Rate = 1.0
    top_k: Count = 0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    seed: Count = 0
    stop: Stops = []
    ignore_eos: bool = False
    draft: ModelRef | None = None
    speculate: SpeculateSpec | None = None
    quantize: Quantize | None = None
    kv_cache_dtype: CacheDtype | None = None


class ServeBody(Contract):
    """A server of OpenAI's API with `max_seqs` concurrent requests.

    `max_waiting` more may wait; further ones get 429. Without `api_key` only the control plane and,
    on a loopback address, this machine have access. From the submit on `api_key` is the hash of the
    key (`api_key_hash.hash_key`), never the key itself.
    """

    max_batch_tokens: Positive = 2048
    max_seqs: Positive = 16
    max_waiting: Count = 256
    kv_blocks: Positive | None = None
    quantize: Quantize | None = None
    kv_cache_dtype: CacheDtype | None = None
    draft: ModelRef | None = None
    speculate: SpeculateSpec | None = None
    api_key: Annotated[str, Field(min_length=1, max_length=400)] | None = None
    backend: Literal["orrery", "vllm"] = "orrery"


class EvaluateBody(Contract):
    """Metrics over `input` (default: the last tenth of the run's data).

    `references` are the expected answers of metrics that compare answers. Likelihoods are computed
    in windows of `window` tokens (default: the model's context, at most 1,024) with stride `stride`
    (default: half a window), over at most the first `max_tokens`. Answers are greedy, of at most
    `max_new_tokens`.
    """

    input: str | None = None
    metrics: list[str] = ["loss", "perplexity"]
    references: str | None = None
    window: Annotated[int, Field(ge=2)] | None = None
    stride: Positive | None = None
    max_tokens: Positive | None = None
    max_new_tokens: Positive = 64
    stop: Stops = []
    quantize: Quantize | None = None


class ScriptBody(Contract):
    """A user's torchrun program: `command` follows torchrun's own arguments."""

    command: list[str] = []
    workdir: str | None = None
    env: dict[str, str] = {}


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
