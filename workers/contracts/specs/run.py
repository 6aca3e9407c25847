"""RunSpec: a complete run request with one body per kind, and checks between its fields.

Does not check memory or which data paths an installation allows.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag, model_validator

from workers.contracts.base import Contract, Problem, Refused, problem
from workers.contracts.catalog.devices import check_device
from workers.contracts.catalog.presets import resolve_model
from workers.contracts.specs.data import DataSpec, data_problems
from workers.contracts.specs.legality import plan_problems, rotary_problems
from workers.contracts.specs.model import Count, ModelSpec, Positive
from workers.contracts.specs.plan import ParallelPlan
from workers.contracts.specs.run_bodies import (
    BenchmarkBody,
    EvaluateBody,
    ExternalBody,
    GenerateBody,
    ModelRef,
    ScriptBody,
    ServeBody,
    TrainBody,
)

Kind = Literal["train", "generate", "serve", "evaluate", "script", "external", "benchmark"]
KINDS: tuple[Kind, ...] = (
    "train",
    "generate",
    "serve",
    "evaluate",
    "script",
    "external",
    "benchmark",
)
_NEEDS_BODY = {
    "train": '"train": {"steps": 200, "seq_len": 128}',
    "generate": '"generate": {"input": "prompts.jsonl", "output": "answers.jsonl"}',
}

Plan = Annotated[
    Annotated[Literal["auto"], Tag("@auto")] | Annotated[ParallelPlan, Tag("@plan")],
    Discriminator(lambda value: "@auto" if isinstance(value, str) else "@plan"),
]


class Resources(Contract):
    """Resources of the run; `devices` defaults to the plan's world size."""

    devices: Positive | None = None
    pool: str | None = None
    device: Annotated[str, AfterValidator(check_device)] | None = None
    max_seconds: Annotated[float, Field(gt=0)] | None = None
    # a training run without progress for so long ends as hang; default: ORRERY_HANG_S
    hang_s: Annotated[float, Field(ge=10)] | None = None


class Retries(Contract):
    """How many new attempts each exit class allows; preemption is not limited."""

    user_error: Count = 0
    out_of_memory: Count = 0
    numerics: Count = 1
    hang: Count = 2
    infrastructure: Count = 5
    lost: Count = 10

    def budget(self, exit_class: str) -> int | None:
        """New attempts allowed after this exit class; None: unlimited, 0: never retried."""
        return None if exit_class == "preempted" else int(getattr(self, exit_class, 0))


class RunSpec(Contract):
    """A run: its kind with the body of that kind, model, plan, data and resources."""

    kind: Kind
    model: ModelRef = "llama-tiny"
    plan: Plan = ParallelPlan()
    data: DataSpec = DataSpec(preset="shakespeare")
    train: TrainBody | None = None
    generate: GenerateBody | None = None
    serve: ServeBody | None = None
    evaluate: EvaluateBody | None = None
    script: ScriptBody | None = None
    benchmark: BenchmarkBody | None = None
    external: ExternalBody | None = None
    resources: Resources = Resources()
    priority: Annotated[int, Field(ge=-1_000_000, le=1_000_000)] = 0
    retries: Retries = Retries()
    tags: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=60)]], Field(max_length=50)
    ] = []
    notes: Annotated[str, Field(max_length=20_000)] = ""

    @model_validator(mode="before")
    @classmethod
    def _body(cls, data: Any) -> Any:
        """Require exactly the kind's body; a body whose fields all have defaults may be absent."""
        if not isinstance(data, dict) or data.get("kind") not in KINDS:
            return data
        kind = data["kind"]
        for other in KINDS:
            if other != kind and data.get(other) is not None:
                raise Refused(
                    f"kind is {kind} but a body {other} is given",
                    f"kind {other}, or remove {other}",
                    field=other,
                )
        if data.get(kind) is None:
            if kind in _NEEDS_BODY:
                raise Refused(f"kind {kind} needs a body {kind}", _NEEDS_BODY[kind], field=kind)
            data = {**data, kind: {}}
        return data

    @property
    def has_explicit_plan(self) -> bool:
        """False if the plan is the default: a control plane may then ask the planner."""
        return "plan" in self.model_fields_set

    @property
    def devices(self) -> int:
        """Devices of the run; 1 if an automatic plan is not resolved and none are requested."""
        if self.resources.devices is not None:
            return self.resources.devices
        return self.plan.world_size if isinstance(self.plan, ParallelPlan) else 1

    @property
    def shape(self) -> ModelSpec | None:
        """The model's shape; None if it is stored with weights elsewhere."""
        return resolve_model(self.model)

    @property
    def body(self) -> Contract:
        """The body of this kind."""
        body = getattr(self, self.kind)
        assert isinstance(body, Contract)
        return body


def spec_problems(spec: RunSpec) -> list[Problem]:
    """Contradictions between valid fields; an empty list means the run may be submitted."""
    problems: list[Problem] = []
    plan, shape = spec.plan, spec.shape
    trains = spec.train or spec.benchmark
    seq_len = trains.seq_len if trains else None
    if spec.kind == "external":
        return problems
    if shape is not None and seq_len is not None:
        problems += [
            item.model_copy(update={"field": f"{spec.kind}.{item.field}"})
            for item in rotary_problems(shape, seq_len)
        ]
    if isinstance(plan, ParallelPlan):
        for item in plan_problems(plan, model=shape, seq_len=seq_len):
            field = f"{spec.kind}.seq_len" if item.field == "seq_len" else item.field
            problems.append(item.model_copy(update={"field": field}))
        if (
            spec.resources.devices is not None
            and spec.resources.devices != plan.world_size
            and spec.kind != "script"
        ):
            problems.append(
                problem(
                    "resources.devices",
                    f"{spec.resources.devices} devices are requested, the plan's world size is "
                    f"{plan.world_size} "
                    f"(dp {plan.dp} x tp {plan.tp} x pp {plan.pp} x cp {plan.cp})",
                    f"devices {plan.world_size}",
                )
            )
    if spec.train:
        problems += _train_problems(spec, spec.train)
    if spec.benchmark and spec.shape is not None:
        problems += data_problems(spec.data, vocab=spec.shape.vocab)
    if spec.script and not spec.script.command:
        problems.append(problem("script.command", "there is no program to run", '["train.py"]'))
    return problems


def _train_problems(spec: RunSpec, train: TrainBody) -> list[Problem]:
    problems = []
    if isinstance(spec.plan, ParallelPlan) and train.accumulate not in (
        None,
        spec.plan.accumulation,
    ):
        batch = spec.plan.micro_batch_size * spec.plan.dp * (train.accumulate or 1)
        problems.append(
            problem(
                "train.accumulate",
                f"{train.accumulate} contradicts the plan, which accumulates "
                f"{spec.plan.accumulation} micro-batches",
                f"global_batch_size {batch}, or no accumulate",
            )
        )
    if train.lr_schedule.warmup_steps > train.steps:
        problems.append(
            problem(
                "train.lr_schedule.warmup_steps",
                f"a warmup of {train.lr_schedule.warmup_steps} steps is longer than the "
                f"{train.steps} steps of the run",
                str(max(1, train.steps // 10)),
            )
        )
    if train.lr_schedule.min_lr > train.optimizer.lr:
        problems.append(
            problem(
                "train.lr_schedule.min_lr",
                f"{train.lr_schedule.min_lr} is above the learning rate {train.optimizer.lr}",
                str(train.optimizer.lr / 10),
            )
        )
    if (
        train.samples
        and train.samples.prompts
        and not spec.data.reads_text
        and train.init_from is None
    ):
        message = "token files have no tokenizer, so prompts cannot be encoded"
        problems.append(
            problem("train.samples.prompts", message, "data.tokenizer, or leaving the prompts out")
        )
    if spec.shape is not None:
        problems += data_problems(spec.data, vocab=spec.shape.vocab)
        if train.eval and train.eval.data:
            held_out = train.eval.data
            problems += data_problems(
                held_out, vocab=spec.shape.vocab, field="train.eval.data", training=spec.data
            )
    return problems
